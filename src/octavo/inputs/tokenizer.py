"""Text to token ids and back, for any model source.

Promises: one protocol whatever the vocabulary came from, and ids equal to those of Transformers for the
same files; torch and transformers are never imported on the way in.
Does not know: chat messages, requests, or streams of output (see `chat`, `renderer`, `outputs`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from octavo.base.errors import LoadError
from octavo.inputs.tokenizer_folder import load_folder
from octavo.inputs.tokenizer_gguf import load_gguf
from octavo.inputs.tokenizer_hf import load_through_child


class TokenStream(Protocol):
    """Turns ids into text one at a time; `step` gives None while a character is not complete."""

    def step(self, token_id: int) -> str | None:
        """The text that this id completes, if any."""


class Tokenizer(Protocol):
    """A vocabulary and its rules. Every method may be called from any thread."""

    @property
    def vocab_size(self) -> int:
        """Ids 0 .. vocab_size - 1 are known; added tokens are counted."""

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


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a GGUF file or of a Hugging Face folder.

    A folder is read through its `tokenizer.json`; one that has only a `tokenizer.model` goes once through
    Transformers in a child process (extra `slow-tokenizers`).
    Raises `LoadError` naming what is missing or not supported.
    """
    path = Path(source)
    if path.is_dir():
        return load_folder(path) if (path / "tokenizer.json").is_file() else load_through_child(path)
    if path.suffix == ".json" and path.is_file():
        return load_folder(path.parent)
    if path.is_file():
        return load_gguf(path)
    raise LoadError(f"no tokenizer at {source}: it is neither a folder nor a GGUF file")
