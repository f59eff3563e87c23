"""Text to token ids and back, for any model source.

Promises: one protocol whatever the vocabulary came from, and ids equal to those of Transformers for the
same files; torch and transformers are never imported on the way in.
Does not know: chat messages, requests, or streams of output (see `chat`, `renderer`, `outputs`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from octavo.base.errors import LoadError
from octavo.base.gguf import is_gguf, read_gguf
from octavo.config.facts import gguf_alone
from octavo.inputs.ends import END_TEXTS, WITHIN_A_TURN
from octavo.inputs.tokenizer_folder import load_folder
from octavo.inputs.tokenizer_gguf import from_metadata, rule_of, warning_of
from octavo.inputs.tokenizer_hf import load_through_child


class TokenStream(Protocol):
    """Turns ids into text one at a time; `step` gives None while a character is not complete."""

    def step(self, token_id: int) -> str | None:
        """The text that this id completes, if any."""


class Tokenizer(Protocol):
    """A vocabulary and its rules. Every method may be called from any thread."""

    @property
    def vocab_size(self) -> int:
        """Ids 0 .. vocab_size - 1 are known: up to the largest that the files have, added tokens, repeats and holes too."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the model has one."""

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if the model has one."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: hidden from text when special tokens are skipped."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Control tokens that end a generation by their text, whatever the model's id keys say."""

    @property
    def adds_bos(self) -> bool:
        """True when `encode` with special tokens begins with `bos_token_id`."""

    @property
    def template_variables(self) -> Mapping[str, str]:
        """What chat templates may name: `bos_token`, `eos_token`, and so on, as text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in the text are recognized unless `protect` wrapped them.

        A lone surrogate, which is no character, becomes U+FFFD.
        """

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids`; ids that are not in the vocabulary give nothing."""

    def token_id(self, text: str) -> int | None:
        """The first id whose entry is written exactly so, if there is one."""

    def token_text(self, token_id: int) -> str:
        """One token's own text, its leading space included; U+FFFD where it is only part of a character."""

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, which need not be whole characters."""

    def open_stream(self, *, skip_special_tokens: bool) -> TokenStream | None:
        """A fast incremental decoder for one request, or None when there is none."""

    def protect(self, text: str) -> str:
        """`text` marked so that `encode` reads special tokens in it as ordinary text."""

    def unprotect(self, text: str) -> str:
        """`text` without the marks that `protect` made."""


def load_tokenizer(
    source: str, *, pre_tokenizer: str | None = None, say: Callable[[str], None] | None = None
) -> Tokenizer:
    """The tokenizer of a GGUF file (itself, or alone in its folder) or of a Hugging Face folder.

    A folder is read through its `tokenizer.json`; one that has only a `tokenizer.model` goes once through
    Transformers in a child process (extra `slow-tokenizers`). `pre_tokenizer` names how a GGUF file's text is cut, where
    the file does not know or is wrong. `say` is told what was assumed. Raises `LoadError` naming what is missing or not
    supported.
    """
    place = gguf_alone(Path(source))
    if place.suffix == ".json" and place.is_file():
        place = place.parent
    if place.is_dir():
        if pre_tokenizer is not None:
            raise LoadError(f"--pre-tokenizer is for GGUF files, and {place} is a folder with a tokenizer of its own")
        return load_folder(place) if (place / "tokenizer.json").is_file() else load_through_child(place)
    if not place.is_file():
        raise LoadError(f"no tokenizer at {source}: it is neither a folder nor a GGUF file")
    metadata = read_gguf(place, with_tensors=False).metadata
    warning = warning_of(metadata, str(place), pre_tokenizer)
    if warning is not None and say is not None:
        say(f"warning: {warning}")
    return from_metadata(metadata, str(place), pre_tokenizer)


def tokenizer_warning(source: str, pre_tokenizer: str | None = None) -> str | None:
    """What `load_tokenizer` would say of a GGUF file, without making its tokenizer; raises as it does."""
    place = gguf_alone(Path(source))
    if not is_gguf(place):
        return None
    metadata = read_gguf(place, with_tensors=False).metadata
    rule_of(metadata, str(place), pre_tokenizer)
    return warning_of(metadata, str(place), pre_tokenizer)


def ends_of_generation(tokenizer: Tokenizer, templates: Iterable[str]) -> tuple[int, ...]:
    """Ids that end a generation by their text: the vocabulary's own, and those that a chat template writes."""
    written, found = tuple(templates), dict[str, int]()
    for text in END_TEXTS:
        index = tokenizer.token_id(text)
        if index is not None and (index in tokenizer.end_ids or any(text in template for template in written)):
            found[text] = index
    for group, within in WITHIN_A_TURN:
        if all(text in found for text in group):
            found.pop(within, None)
    return tuple(found.values())
