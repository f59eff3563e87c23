"""Incremental text from token ids, never half a character (OUT-20, OUT-21, OUT-23, OUT-24).

Promises: the pieces joined are the text of all ids decoded at once (for ids that spell well-formed text),
whatever the chunking; the cost of a token does not depend on how much text there is; a replacement
character comes out only when no later token could mend it.
Does not know: where ids come from, stop strings, or which tokenizer library decodes.

Fast path: the tokenizer library's own decode stream. Slow path, for decoders without one and for the
`spaces_between_special_tokens=False` option: a window of two parts, `prefix` (ids whose text is out and that
only give context, since many decoders treat the first token specially) and `pending` (ids whose text is not
complete). When decoding the window gives more text than was sent and it does not end in the middle of a
character, the difference is sent and `pending` becomes the next `prefix`.
"""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_MAX_PENDING = 16  # ids; well-formed text needs at most 4 for one character
_KEEP_PENDING = 8  # ids kept as context when a malformed window is cut
_MAX_UNFINISHED = 3  # bytes of a character that the next byte may complete


class DecodeStream(Protocol):
    """A decode stream: text comes out when it is complete."""

    def step(self, token_id: int) -> str | None:
        """The text that this id completes; None: nothing yet. May raise when its prefix became invalid."""


class TokenDecoder(Protocol):
    """What turning ids into text needs of a tokenizer."""

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of all ids at once."""

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, for log-probabilities."""

    def open_stream(self, *, skip_special_tokens: bool) -> DecodeStream | None:
        """A new decode stream, or None when this tokenizer has no fast path."""


class TextSource(Protocol):
    """One answer's ids in, text out."""

    def step(self, token_id: int) -> str:
        """The text that is complete with this id, often one token's, possibly empty."""

    def flush(self) -> str:
        """What is still held back; the answer has ended."""

    @property
    def holding(self) -> bool:
        """True while the text of the last ids is not out."""


class NoText:
    """For requests with `detokenize=False`.

    Owns: nothing.
    """

    holding = False

    def step(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Detokenizer:
    """Text of one answer.

    `context` are the ids before the answer (the end of the prompt): their text is not sent, but decoders that
    treat a text's first token specially then know that it is not the first, so prompt and answer join well.

    Owns: the window and the decode stream.
    """

    __slots__ = ("_decoder", "_pending", "_prefix", "_sent", "_skip_special", "_spaces", "_stream")

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        self._decoder = decoder
        self._skip_special = skip_special_tokens
        # Without special tokens in the text there is nothing to put spaces between.
        self._spaces = spaces_between_special_tokens or skip_special_tokens
        self._prefix: list[int] = []
        self._pending: list[int] = []
        self._sent = 0  # characters of the window's text that are out; kept up only while there is no stream
        self._stream = self._open_stream()
        for token_id in context:
            self.step(token_id)

    @property
    def holding(self) -> bool:
        """True while the text of the last ids is not out."""
        return bool(self._pending)

    def step(self, token_id: int) -> str:
        """The text that is complete with this id."""
        self._pending.append(token_id)
        if self._stream is None:
            return self._slow_step()
        try:
            text = self._stream.step(token_id)
        except Exception:  # the library raises a bare Exception when the text before changed
            self._leave_stream()
            return self._slow_step()
        if text is not None:
            self._prefix = self._pending
            self._pending = []
            return text
        if len(self._pending) < _MAX_PENDING:
            return ""
        self._leave_stream()
        return self._slow_step()

    def flush(self) -> str:
        """What is held back, replacement characters included."""
        if not self._pending:
            return ""
        if self._stream is not None:
            self._leave_stream()
        text = self._decode(self._prefix + self._pending)[self._sent :]
        self._prefix, self._pending = self._pending, []
        self._sent = len(self._decode(self._prefix))
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(
            ids, skip_special_tokens=self._skip_special, spaces_between_special_tokens=self._spaces
        )

    def _open_stream(self) -> DecodeStream | None:
        return self._decoder.open_stream(skip_special_tokens=self._skip_special) if self._spaces else None

    def _leave_stream(self) -> None:
        self._stream = None
        self._sent = len(self._decode(self._prefix))

    def _slow_step(self) -> str:
        text = self._decode(self._prefix + self._pending)
        if len(text) > self._sent and not text.endswith(REPLACEMENT):
            new = text[self._sent :]
            self._prefix, self._pending = self._pending, []
            self._sent = len(self._decode(self._prefix))
            self._return_to_stream()
            return new
        if len(self._pending) < _MAX_PENDING:
            return ""
        return self._cut(text)

    def _return_to_stream(self) -> None:
        """Go on with a fresh stream that has seen the window, if it agrees with the window."""
        stream = self._open_stream()
        if stream is None:
            return
        try:
            seen = sum(len(stream.step(token_id) or "") for token_id in self._prefix)
        except Exception:  # as in step(): stay on the slow path until the next clean border
            return
        if seen == self._sent:
            self._stream = stream

    def _cut(self, text: str) -> str:
        """Shorten a window that does not come to an end: malformed bytes, or a run of skipped special tokens."""
        if len(text) == self._sent and not text.endswith(REPLACEMENT):
            self._pending = []  # these ids have no text; the context stays
            return ""
        num_broken = len(text) - len(text.rstrip(REPLACEMENT))
        num_unsent = max(0, min(num_broken, _MAX_UNFINISHED, len(text) - self._sent))
        tail = self._pending[-_KEEP_PENDING:]
        tail_text = self._decode(tail)
        if not tail_text.endswith(REPLACEMENT * num_unsent):
            num_unsent = 0
        new = text[self._sent : len(text) - num_unsent]
        self._prefix, self._pending = [], tail
        self._sent = len(tail_text) - num_unsent
        return new
