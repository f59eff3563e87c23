"""A tokenizer on the `tokenizers` library, whatever file its vocabulary came from.

Promises: thread-safe, quick for short texts, and other threads run while a long text is encoded.
Does not know: files (see `tokenizer_folder`, `tokenizer_gguf`).

Special tokens in people's text. Everything given to `encode` may contain special tokens, as in other
engines: completions prompts and rendered templates need them. `protect` is for text that must not: it
breaks each special token's literal with a mark, a private token that splits the text while it is encoded
and is dropped from the ids. Text without such literals is not touched, so its ids are the usual ones.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core
from tokenizers.decoders import DecodeStream

from octavo.inputs.pieces import PieceTable

# Not secret: a text that contains the mark only loses it, and its two sides still do not join.
MARK = "\U000f0000octavo:as-text\U000f0001"
LONG_TEXT = 4096  # characters from which releasing the interpreter is worth more than it costs


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Special tokens by their role, as text. `named` is what chat templates see: `bos_token` and the like."""

    bos: str | None = None
    eos: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)


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

    def __init__(self, core: Core, specials: SpecialTokens) -> None:
        core.no_padding()
        core.no_truncation()
        added = core.get_added_tokens_decoder()
        self._core = core
        self._known = max(core.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added), 0)
        self._added = {i: token.content for i, token in added.items()}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._variables = dict(specials.named)
        self._bos = None if specials.bos is None else core.token_to_id(specials.bos)
        self._eos = None if specials.eos is None else core.token_to_id(specials.eos)
        empty = core.encode("", add_special_tokens=True).ids
        self._adds_bos = self._bos is not None and empty[:1] == [self._bos]
        self._literals = _literals(token.content for token in added.values() if token.special)
        core.add_special_tokens([AddedToken(MARK, special=True, normalized=False)])
        self._mark_id = core.token_to_id(MARK)

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
        text: str = self._core.decode([i for i in ids if 0 <= i < self._known], skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def _pieces(self) -> PieceTable:
        return PieceTable.for_decoder(self._core.decoder)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes; empty for an unknown id."""
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
        return FastStream(self._core, skip_special_tokens, self._known)

    def protect(self, text: str) -> str:
        """Break the literals of special tokens; text without any comes back as it is."""
        if self._literals is None:
            return text
        return self._literals.sub(lambda m: m[0][0] + MARK + m[0][1:], text)

    def unprotect(self, text: str) -> str:
        """Remove the marks."""
        return text.replace(MARK, "")


class FastStream:
    """One request's text as its ids arrive.

    Owns: the library's stream, which holds the last few ids.
    """

    def __init__(self, core: Core, skip_special_tokens: bool, known: int) -> None:
        self._core = core
        self._known = known
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str | None:
        """The text that this id completes; raises `ValueError` when the text cannot be told step by step."""
        if not 0 <= token_id < self._known:
            return None
        try:
            text: str | None = self._stream.step(self._core, token_id)
        except Exception as e:  # the library raises the bare class
            raise ValueError(f"cannot decode token {token_id} incrementally: {e}") from None
        return text


def _literals(contents: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of all special tokens, longest first; one character cannot be broken and is left out."""
    words = sorted((c for c in contents if len(c) > 1 and c != MARK), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None
