"""A tokenizer on the `tokenizers` library, whatever file its vocabulary came from.

Promises: thread-safe, quick for short texts, and other threads run while a long text is encoded.
Does not know: files (see `tokenizer_folder`, `tokenizer_gguf`).

Special tokens in people's text. Everything given to `encode` may contain special tokens, as in other
engines: completions prompts and rendered templates need them. `protect` is for text that must not: it
breaks each special token's literal with a mark, a private token that splits the text while it is encoded
and is dropped from the ids. Text without such literals is not touched, so its ids are the usual ones.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core
from tokenizers.decoders import DecodeStream

from octavo.inputs.pieces import PieceTable

# Not secret: a text that contains the mark only loses it, and its two sides still do not join.
MARK = "\U000f0000octavo:as-text\U000f0001"
LONG_TEXT = 4096  # characters from which releasing the interpreter is worth more than it costs


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Special tokens by their role, as text. `named` is what chat templates see: `bos_token` and the like.

    `bos_id` and `eos_id` are for files that name ids, which need not be the first with their text. `ends` are texts that
    end a generation by themselves.
    """

    bos: str | None = None
    eos: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    bos_id: int | None = None
    eos_id: int | None = None
    ends: tuple[str, ...] = ()


def without_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class FastTokenizer:
    """Satisfies `tokenizer.Tokenizer`.

    Owns: its core, which nobody changes after construction (the library's setters are not thread-safe).
    """

    def __init__(self, core: Core, specials: SpecialTokens, repeats: Mapping[int, int] | None = None) -> None:
        """`repeats` are ids whose text another has too, with the first id of that text; `core` holds stand-ins there."""
        core.no_padding()
        core.no_truncation()
        self._repeats = dict(repeats or {})
        self._known = number_of_ids(core)
        core = _with_mark(core, self._known)
        added = {i: token for i, token in core.get_added_tokens_decoder().items() if token.content != MARK}
        self._core = core
        self._mark_id = core.token_to_id(MARK)
        self._added = {i: token.content for i, token in added.items()}
        special = {i for i, token in added.items() if token.special}
        self._special_ids = frozenset(special | {i for i, first in self._repeats.items() if first in special})
        self._variables = dict(specials.named)
        self._bos = self._id_of_role(specials.bos, specials.bos_id)
        self._eos = self._id_of_role(specials.eos, specials.eos_id)
        self._ends = frozenset(i for text in specials.ends if (i := core.token_to_id(text)) in special)
        empty = core.encode("", add_special_tokens=True).ids
        self._adds_bos = self._bos is not None and empty[:1] == [self._bos]
        self._literals = _literals(token.content for token in added.values() if token.special)

    def _id_of_role(self, text: str | None, index: int | None) -> int | None:
        return index if index is not None or text is None else self._core.token_to_id(text)

    @property
    def vocab_size(self) -> int:
        """Ids 0 .. vocab_size - 1 are known."""
        return self._known

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text."""
        return self._bos

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text."""
        return self._eos

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return self._special_ids

    @property
    def end_ids(self) -> frozenset[int]:
        """Control tokens that end a generation by their text."""
        return self._ends

    @property
    def adds_bos(self) -> bool:
        """True when `encode` with special tokens begins with BOS."""
        return self._adds_bos

    @property
    def template_variables(self) -> Mapping[str, str]:
        """Special tokens by the names chat templates use."""
        return self._variables

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; see `tokenizer.Tokenizer.encode`."""
        text = without_surrogates(text)
        if len(text) < LONG_TEXT:
            ids: list[int] = self._core.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # the batch call runs without the interpreter's lock and skips offsets
            ids = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return [i for i in ids if i != self._mark_id] if MARK in text else ids

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids`. The library decides spaces, so `spaces_between_special_tokens` has no effect here."""
        known = [self._repeats.get(i, i) for i in ids if 0 <= i < self._known]
        if len(known) < LONG_TEXT:
            text: str = self._core.decode(known, skip_special_tokens=skip_special_tokens)
        else:  # as in `encode`
            (text,) = self._core.decode_batch([known], skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, text: str) -> int | None:
        """The first id whose entry is written exactly so."""
        index: int | None = self._core.token_to_id(text)
        return index

    @cached_property
    def _pieces(self) -> PieceTable:
        return PieceTable.for_decoder(self._core.decoder)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes; empty for an unknown id."""
        token_id = self._repeats.get(token_id, token_id)
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
        piece = self._core.id_to_token(token_id) if 0 <= token_id < self._known else None
        if piece is None:
            return b""
        raw = self._pieces.raw(piece)
        return raw if raw is not None else self._core.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """One token's own text, with U+FFFD where it is only part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def open_stream(self, *, skip_special_tokens: bool) -> "FastStream":
        """An incremental decoder for one request."""
        return FastStream(self._core, skip_special_tokens, self._known, self._repeats)

    def protect(self, text: str) -> str:
        """Break the literals of special tokens; text without any comes back as it is."""
        if self._literals is None:
            return text
        return self._literals.sub(lambda m: m[0] + MARK, text)

    def unprotect(self, text: str) -> str:
        """Remove the marks."""
        return text.replace(MARK, "")


class FastStream:
    """One request's text as its ids arrive.

    Owns: the library's stream, which holds the last few ids.
    """

    def __init__(self, core: Core, skip_special_tokens: bool, known: int, repeats: Mapping[int, int]) -> None:
        self._core = core
        self._known = known
        self._repeats = repeats
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str | None:
        """The text that this id completes; raises `ValueError` when the text cannot be told step by step."""
        if not 0 <= token_id < self._known:
            return None
        try:
            text: str | None = self._stream.step(self._core, self._repeats.get(token_id, token_id))
        except Exception as e:  # the library raises the bare class
            raise ValueError(f"cannot decode token {token_id} incrementally: {e}") from None
        return text


def number_of_ids(core: Core) -> int:
    """Ids are 0 up to this, itself not included; with holes it is more than the number of entries."""
    size: int = core.get_vocab_size(with_added_tokens=True)
    if None not in map(core.id_to_token, range(size)):  # as many places as entries: no hole, and none beyond
        return size
    return max(core.get_vocab(with_added_tokens=True).values()) + 1


def _with_mark(core: Core, known: int) -> Core:
    """`core` with the mark under an id that nothing else has: the library would put it into a hole."""
    if core.get_vocab_size(with_added_tokens=True) != known:
        core = with_fixed_ids(json.loads(core.to_str()), {MARK: known})
    core.add_special_tokens([AddedToken(MARK, special=True, normalized=False)])
    return core


def with_fixed_ids(state: dict[str, Any], more: Mapping[str, int]) -> Core:
    """The tokenizer of a `tokenizer.json`, with its added tokens and `more` entries under the ids that are given.

    The library counts added tokens on from the number of entries, whatever ids the file has. A vocabulary without holes
    by its kind (Unigram's list) is left as it is.
    """
    vocab = state["model"].get("vocab")
    if isinstance(vocab, dict):
        vocab.update({token["content"]: token["id"] for token in state.get("added_tokens") or ()} | dict(more))
    return Core.from_str(json.dumps(state))


def _literals(contents: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of the first character of each special token; one of a single character cannot be broken.

    It looks ahead instead of taking the whole, so that tokens which overlap in a text are all found. Branches share
    what their words begin with: a model may have hundreds of such tokens, and a text a million characters.
    """
    words = {c for c in contents if len(c) > 1 and c != MARK}
    firsts = sorted({w[0] for w in words})
    branches = (f"{re.escape(c)}(?={_endings({w[1:] for w in words if w[0] == c})})" for c in firsts)
    return re.compile("|".join(branches)) if words else None


def _endings(words: set[str]) -> str:
    """A pattern of any of `words`; where one begins with another, the shorter is enough."""
    if "" in words:
        return ""
    firsts = sorted({w[0] for w in words})
    branches = [re.escape(c) + _endings({w[1:] for w in words if w[0] == c}) for c in firsts]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
