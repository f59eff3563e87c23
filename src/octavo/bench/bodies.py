"""Request bodies, made before the clock starts.

Promises: a body is a tuple of byte strings to be written one after the other; what several bodies have in common
(their head, a shared prefix, their end) is one object in memory.
Does not know: connections.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from octavo.base.errors import ConfigError
from octavo.bench.workloads import Item, Prompt, Workload

COMPLETIONS, CHAT = "completions", "chat"
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
_ASSISTANT = (b'"},{"role":"assistant","content":"', b'"},{"role":"user","content":"')

Body = tuple[bytes, ...]
Turn = tuple[bytes, str]  # what a user said, as the inside of a JSON string, and what was answered


class Bodies:
    """Makes the bodies of one workload.

    Owns: the bytes that bodies share.
    """

    def __init__(self, work: Workload, *, model: str, api: str, extra: Mapping[str, Any]) -> None:
        if api not in PATHS:
            raise ConfigError(f"the API must be {' or '.join(PATHS)}, got {api!r}.")
        fields: dict[str, Any] = {"model": model, "stream": work.stream}
        if work.stream:
            fields["stream_options"] = {"include_usage": True}
        if work.temperature is not None:
            fields["temperature"] = work.temperature
        if work.ignore_eos:
            fields["ignore_eos"] = True
        fields.update(extra)
        self._api = api
        head = msgspec.json.encode(fields)[:-1]
        self._ids_head = head + b',"prompt":['
        self._text_head = head + (b',"messages":[{"role":"user","content":"' if api == CHAT else b',"prompt":"')
        self._text_tail = b'"}]' if api == CHAT else b'"'
        self._shared: dict[Prompt, bytes] = {}
        self._tails: dict[tuple[bytes, int], bytes] = {}

    def whole(self, item: Item) -> Body:
        """The body of an item whose prompt is whole."""
        text = isinstance(item.prompt, str)
        if not text and self._api == CHAT:
            raise ConfigError("the chat API takes no token ids; use a data set of text, or the completions API.")
        head, own = (self._text_head, b"") if text else (self._ids_head, b"")
        parts = [head]
        if item.num_shared:
            parts.append(self._prefix(item.prompt[: item.num_shared]))
        own = _inside(item.prompt[item.num_shared :])
        if not text and item.num_shared and own:
            own = b"," + own
        parts += [own, self._tail(b"]" if not text else self._text_tail, item.max_tokens)]
        return tuple(part for part in parts if part)

    def next_turn(self, history: Sequence[Turn], turn: bytes, max_tokens: int) -> Body:
        """The body of a conversation's next turn, after real answers. `turn` comes from `turn_text`."""
        between = _ASSISTANT if self._api == CHAT else (b"", b"")
        parts = [self._text_head]
        for said, answered in history:
            parts += [said, between[0], _inside(answered), between[1]]
        parts += [turn, self._tail(self._text_tail, max_tokens)]
        return tuple(part for part in parts if part)

    def turn_text(self, item: Item) -> bytes:
        """A turn's own text as it stands inside a JSON string."""
        if not isinstance(item.prompt, str):
            raise ConfigError("a conversation with the server's real answers needs prompts of text.")
        return _inside(item.prompt)

    def _prefix(self, prefix: Prompt) -> bytes:
        if prefix not in self._shared:
            self._shared[prefix] = _inside(prefix)
        return self._shared[prefix]

    def _tail(self, end: bytes, max_tokens: int) -> bytes:
        key = (end, max_tokens)
        if key not in self._tails:
            self._tails[key] = end + b',"max_tokens":%d}' % max_tokens
        return self._tails[key]


def _inside(prompt: Prompt) -> bytes:
    """A prompt without its quotes or brackets."""
    return msgspec.json.encode(prompt)[1:-1]


def units(items: Sequence[Item]) -> Iterator[tuple[int, ...]]:
    """Indices of items that are sent one after the other: each conversation, and each other item alone."""
    conversations: dict[int, list[int]] = {}
    order: list[list[int]] = []
    for i, item in enumerate(items):
        if item.conversation is None:
            order.append([i])
        elif item.conversation in conversations:
            conversations[item.conversation].append(i)
        else:
            order.append(conversations.setdefault(item.conversation, [i]))
    return (tuple(unit) for unit in order)
