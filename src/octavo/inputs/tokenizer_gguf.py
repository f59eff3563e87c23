"""A tokenizer from the vocabulary inside a GGUF file.

Promises: ids equal to those of the model's own tokenizer files for the vocabularies listed here, and an
error with its name for any other.
Does not know: how GGUF is stored (see `base.gguf`), or chat templates.

Sources: the metadata keys are those of the GGUF specification (ggml's docs/gguf.md); each pre-tokenizer
is the one in the `tokenizer.json` that its model's authors published.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

from octavo.base.errors import LoadError
from octavo.base.gguf import read_gguf
from octavo.inputs.pieces import SPACE_MARK
from octavo.inputs.tokenizer_fast import FastTokenizer, SpecialTokens

PREFIX = "tokenizer.ggml."
ROLE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


class Kind(IntEnum):
    """What `tokenizer.ggml.token_type` says about an entry."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# ---- byte-level vocabularies ----------------------------------------------------------------

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _split(*patterns: str) -> Any:
    """Cut by each pattern in turn, then map bytes to the printable alphabet."""
    cuts = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text before merging, and the habits that go with it."""

    make: Callable[[], Any]
    whole_words: bool = False  # a word that is an entry is taken without merging
    adds_bos: bool = False  # where the file does not say
    nfc: bool = False


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(make=_gpt2),
    "smollm": PreTokenizer(make=_smollm),
    "llama-bpe": PreTokenizer(make=lambda: _split(_LLAMA3), whole_words=True, adds_bos=True),
    "qwen2": PreTokenizer(make=lambda: _split(_QWEN2), nfc=True),
    "tekken": PreTokenizer(make=lambda: _split(_TEKKEN), whole_words=True, adds_bos=True),
    "default": PreTokenizer(make=lambda: _split(*_DEFAULT)),
}


def _byte_level(vocab: "_Vocabulary", where: str) -> Core:
    name = vocab.get("pre") or "default"
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise LoadError(f"{where} needs the pre-tokenizer '{name}', which is not supported (supported: {known})")
    merges = [tuple(line.split(" ", 1)) for line in vocab.get("merges") or ()]
    core = Core(models.BPE(vocab=vocab.by_text(), merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre.make()
    core.decoder = decoders.ByteLevel()
    vocab.finish(core, adds_bos=pre.adds_bos)
    return core


# ---- SentencePiece vocabularies ----------------------------------------------------------------


def _sentencepiece(vocab: "_Vocabulary", where: str) -> Core:
    """SentencePiece's BPE: pieces merge by score, unknown characters fall back to their bytes.

    The space that SentencePiece puts before a text is put before each stretch of text between special
    tokens, as GGUF's own reader does.
    """
    scores = vocab.get("scores")
    if scores is None or len(scores) != len(vocab.tokens):
        raise LoadError(f"{where} has no score for each token, which a 'llama' vocabulary needs")
    unknown = vocab.text_of("unknown_token_id") or next(vocab.texts(Kind.UNKNOWN), None)
    core = Core(
        models.BPE(
            vocab=vocab.by_text(),
            merges=merges_by_score(vocab.tokens, [float(s) for s in scores], vocab.kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    visible_spaces = normalizers.Replace(" ", SPACE_MARK)
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.get("add_space_prefix", True):
        core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), visible_spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        core.normalizer = visible_spaces
    core.decoder = decoders.Sequence(steps)
    vocab.finish(core, adds_bos=True)
    return core


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """The merge list that gives SentencePiece's BPE: every way to halve a piece, best-scored piece first."""
    known = {text: i for i, text in reversed(list(enumerate(tokens)))}
    ranked: list[tuple[float, str, str]] = []
    for text, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind != Kind.NORMAL:
            continue
        halves = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in known and text[i:] in known]
        halves.sort(key=lambda pair: (known[pair[0]], known[pair[1]]))
        ranked += [(score, left, right) for left, right in halves]
    ranked.sort(key=lambda entry: -entry[0])  # stable: equal scores keep the order of the vocabulary
    return [(left, right) for _, left, right in ranked]


# ---- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The `tokenizer.ggml.*` metadata, with what both families need of it."""

    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    kinds: Sequence[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], where: str) -> "_Vocabulary":
        tokens = metadata.get(PREFIX + "tokens")
        if tokens is None or not len(tokens):
            raise LoadError(f"{where} holds no vocabulary (tokenizer.ggml.tokens)")
        kinds = metadata.get(PREFIX + "token_type")
        types = [Kind.NORMAL] * len(tokens) if kinds is None else [int(k) for k in kinds]
        if len(types) != len(tokens):
            raise LoadError(f"{where} has {len(tokens)} tokens but {len(types)} token types; the file is damaged")
        return cls(metadata, list(tokens), types)

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(PREFIX + key, default)

    def by_text(self) -> dict[str, int]:
        """Text to id; of two equal texts (padding) the first counts."""
        return {text: i for i, text in reversed(list(enumerate(self.tokens)))}

    def texts(self, *kinds: Kind) -> Any:
        return (text for text, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds)

    def text_of(self, key: str) -> str | None:
        """The text of the token that an id key names, if it names one."""
        index = self.get(key)
        return self.tokens[int(index)] if index is not None and 0 <= int(index) < len(self.tokens) else None

    def specials(self) -> SpecialTokens:
        named = {role: text for role, key in ROLE_KEYS.items() if (text := self.text_of(key)) is not None}
        return SpecialTokens(bos=named.get("bos_token"), eos=named.get("eos_token"), named=named)

    def finish(self, core: Core, *, adds_bos: bool) -> None:
        """Declare added tokens, and whether BOS and EOS go around a text."""
        core.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in self.texts(Kind.CONTROL, Kind.UNKNOWN) if t]
        )
        core.add_tokens([AddedToken(t, special=False, normalized=False) for t in self.texts(Kind.USER_DEFINED) if t])
        before = self.text_of("bos_token_id") if self.get("add_bos_token", adds_bos) else None
        after = self.text_of("eos_token_id") if self.get("add_eos_token", False) else None
        around = [(t, core.token_to_id(t)) for t in (before, after) if t is not None]
        if around:
            single = [before, "$A", after]
            core.post_processor = processors.TemplateProcessing(
                single=[part for part in single if part is not None],
                pair=None,
                special_tokens=list(dict.fromkeys(around)),
            )


def special_tokens(metadata: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens that GGUF metadata name."""
    tokens = metadata.get(PREFIX + "tokens") or ()
    return _Vocabulary(metadata, tokens, ()).specials()


FAMILIES: Mapping[str, Callable[[_Vocabulary, str], Core]] = {"gpt2": _byte_level, "llama": _sentencepiece}


def load_gguf(path: Path) -> FastTokenizer:
    """The tokenizer of a GGUF file."""
    return from_metadata(read_gguf(path, with_tensors=False).metadata, str(path))


def from_metadata(metadata: Mapping[str, Any], where: str) -> FastTokenizer:
    """A tokenizer from GGUF metadata; `where` names the file in errors.

    Raises `LoadError` for a vocabulary of another family, an unknown pre-tokenizer, or damaged metadata.
    """
    family = metadata.get(PREFIX + "model")
    if family is None:
        raise LoadError(f"{where} holds no vocabulary (tokenizer.ggml.model)")
    build = FAMILIES.get(family)
    if build is None:
        known = ", ".join(FAMILIES)
        raise LoadError(
            f"{where} has a vocabulary of the family '{family}', which is not supported (supported: {known})"
        )
    vocabulary = _Vocabulary.read(metadata, where)
    try:
        core = build(vocabulary, where)
    except LoadError:
        raise
    except Exception as e:  # the library raises the bare class
        raise LoadError(f"{where} has a damaged vocabulary: {e}") from None
    return FastTokenizer(core, vocabulary.specials())
