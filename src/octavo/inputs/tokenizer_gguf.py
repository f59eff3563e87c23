"""A tokenizer from the vocabulary inside a GGUF file.

Promises: ids equal to those of the model's own tokenizer files for the vocabularies listed here, and an
error with its name for any other.
Does not know: how GGUF is stored (see `base.gguf`), or chat templates.

Source: the metadata keys are those of the GGUF specification (ggml's docs/gguf.md).
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Core

from octavo.base.errors import LoadError
from octavo.inputs.ends import END_TEXTS
from octavo.inputs.pieces import SPACE_MARK
from octavo.inputs.pre_tokenizers import NAMES, REFUSED, UNNAMED, Habit, build
from octavo.inputs.tokenizer_fast import FastTokenizer, SpecialTokens

PREFIX = "tokenizer.ggml."
_ENDS = frozenset(END_TEXTS)
_STAND_IN = "\U000f0004octavo:repeat:{}\U000f0005"
ROLE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


class TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says about an entry."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# ---- byte-level vocabularies ----------------------------------------------------------------

UNMADE_SHARE = (
    0.01  # of the entries that have two halves may have no merge: tables made from other formats leave some out
)


def rule_of(metadata: Mapping[str, Any], where: str, asked: str | None = None) -> Habit | None:
    """How the file's vocabulary cuts text; `asked` wins over what the file says. None: its family has no such rule.

    Raises `LoadError` for a name that is not known or cannot be built.
    """
    if metadata.get(PREFIX + "model") != "gpt2":
        if asked is not None:
            raise LoadError(
                f"{where} has no byte-level vocabulary: --pre-tokenizer has no meaning for it; leave it out"
            )
        return None
    name = asked or metadata.get(PREFIX + "pre") or UNNAMED
    needs = f"{where} needs the pre-tokenizer {name!r}" if asked is None else f"--pre-tokenizer is {name!r}"
    if name in REFUSED:
        raise LoadError(f"{needs}: {REFUSED[name]}")
    if name not in NAMES:
        raise LoadError(f"{needs}, which is not known; known are {', '.join(sorted(NAMES))}")
    return NAMES[name]


def warning_of(metadata: Mapping[str, Any], where: str, asked: str | None = None) -> str | None:
    """What to say of a file that does not name its rule."""
    if asked is not None or metadata.get(PREFIX + "model") != "gpt2" or metadata.get(PREFIX + "pre"):
        return None
    return (
        f"{where} does not say how text is cut before it is tokenized (tokenizer.ggml.pre): the rule {UNNAMED!r} is used, "
        "and answers are worse where it is another; name the model's own with --pre-tokenizer, such as llama-bpe or qwen2"
    )


def _byte_level(vocab: "_Vocabulary", where: str, asked: str | None) -> Core:
    rule = rule_of(vocab.metadata, where, asked)
    if rule is None:
        raise LoadError(f"{where} has no byte-level vocabulary")
    merges = _merges(vocab, where)
    made = {left + right for left, right in merges}
    _check_whole(vocab, made, where)
    vocab = vocab.with_ends(made)
    core = Core(models.BPE(vocab=vocab.by_text(), merges=merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = build(rule)
    core.decoder = decoders.ByteLevel()
    vocab.finish(core, adds_bos=rule.adds_bos)
    return core


def _merges(vocab: "_Vocabulary", where: str) -> list[tuple[str, str]]:
    """The merges as pairs."""
    lines = vocab.get("merges")
    if lines is None or not len(lines):
        what = "no merges" if lines is None else "an empty list of merges"
        raise LoadError(
            f"{where} holds {what} (tokenizer.ggml.merges): its words would fall into bytes; convert it again"
        )
    merges = []
    for place, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if not left or not right:
            raise LoadError(
                f"{where} is damaged: merge {place} (tokenizer.ggml.merges) is {line!r:.40}, not two entries"
            )
        merges.append((left, right))
    return merges


def _check_whole(vocab: "_Vocabulary", made: set[str], where: str) -> None:
    """Raise `LoadError` for a list of merges that was cut: entries are left over whose halves are entries."""
    words = [text for text in vocab.texts(TokenType.NORMAL) if len(text) > 1]
    known, left = set(vocab.tokens), [text for text in dict.fromkeys(words) if text not in made]
    lost = [text for text in left if any(text[:i] in known and text[i:] in known for i in range(1, len(text)))]
    if len(lost) > UNMADE_SHARE * len(words):
        raise LoadError(
            f"{where} lacks the merges (tokenizer.ggml.merges) of {len(lost)} of its {len(words)} words, such as "
            f"{lost[0]!r}: the list is cut short; convert the model again"
        )


# ---- SentencePiece vocabularies ----------------------------------------------------------------


def _sentencepiece(vocab: "_Vocabulary", where: str, asked: str | None) -> Core:
    """SentencePiece's BPE: pieces merge by score, unknown characters fall back to their bytes.

    The space that SentencePiece puts before a text is put before each stretch of text between special
    tokens, as GGUF's own reader does.
    """
    rule_of(vocab.metadata, where, asked)
    scores = vocab.get("scores")
    if scores is None or len(scores) != len(vocab.tokens):
        have = "none" if scores is None else f"{len(scores)} for {len(vocab.tokens)} tokens"
        raise LoadError(
            f"{where} has no score for each token (tokenizer.ggml.scores), which a 'llama' vocabulary needs: there are "
            f"{have}; convert the model again"
        )
    vocab = vocab.with_ends(set())
    unknown = vocab.text_of("unknown_token_id") or next(vocab.texts(TokenType.UNKNOWN), None)
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
    for i, (text, score, kind) in enumerate(zip(tokens, scores, kinds, strict=True)):
        if kind != TokenType.NORMAL or known[text] != i:
            continue
        halves = [(text[:n], text[n:]) for n in range(1, len(text)) if text[:n] in known and text[n:] in known]
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
        if kinds is None or not len(kinds):
            raise LoadError(
                f"{where} does not say of what type its tokens are (tokenizer.ggml.token_type): control tokens would be "
                "read as plain text; convert the model again"
            )
        if len(kinds) != len(tokens):
            raise LoadError(f"{where} has {len(tokens)} tokens but {len(kinds)} token types; the file is damaged")
        return cls(metadata, list(tokens), [int(k) for k in kinds])

    def with_ends(self, made: Container[str]) -> "_Vocabulary":
        """The same, where texts that end a generation are control tokens unless text is `made` into them by merging."""
        places = [i for i, text in enumerate(self.tokens) if text in _ENDS and text not in made]
        kinds = list(self.kinds)
        for i in places:
            kinds[i] = TokenType.CONTROL
        return _Vocabulary(self.metadata, self.tokens, kinds)

    def repeats(self) -> dict[int, int]:
        """Ids whose text an earlier one has, with that one."""
        if len(set(self.tokens)) == len(self.tokens):
            return {}
        first: dict[str, int] = {}
        return {i: j for i, text in enumerate(self.tokens) if (j := first.setdefault(text, i)) != i}

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(PREFIX + key, default)

    def by_text(self) -> dict[str, int]:
        """Text to id. Of two equal texts the first counts; the second's id gets a stand-in that no text becomes."""
        repeats = self.repeats()
        if not repeats:
            return dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        return {_STAND_IN.format(i) if i in repeats else text: i for i, text in enumerate(self.tokens)}

    def texts(self, *kinds: TokenType) -> Any:
        return (text for text, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds)

    def text_of(self, key: str) -> str | None:
        """The text of the token that an id key names, if it names one."""
        index = self.get(key)
        return self.tokens[int(index)] if index is not None and 0 <= int(index) < len(self.tokens) else None

    def id_of(self, key: str) -> int | None:
        """The id that a key names, if there is such a token."""
        return int(self.get(key)) if self.text_of(key) is not None else None

    def specials(self) -> SpecialTokens:
        named = {role: text for role, key in ROLE_KEYS.items() if (text := self.text_of(key)) is not None}
        return SpecialTokens(
            bos=named.get("bos_token"),
            eos=named.get("eos_token"),
            named=named,
            bos_id=self.id_of("bos_token_id"),
            eos_id=self.id_of("eos_token_id"),
            ends=END_TEXTS,
        )

    def finish(self, core: Core, *, adds_bos: bool) -> None:
        """Declare added tokens, and whether BOS and EOS go around a text."""
        core.add_special_tokens(
            [
                AddedToken(t, special=True, normalized=False)
                for t in self.texts(TokenType.CONTROL, TokenType.UNKNOWN)
                if t
            ]
        )
        core.add_tokens(
            [AddedToken(t, special=False, normalized=False) for t in self.texts(TokenType.USER_DEFINED) if t]
        )
        before = self.id_of("bos_token_id") if self.get("add_bos_token", adds_bos) else None
        after = self.id_of("eos_token_id") if self.get("add_eos_token", False) else None
        around = {name: index for name, index in (("before", before), ("after", after)) if index is not None}
        if around:
            parts = ("before" if before is not None else None, "$A", "after" if after is not None else None)
            core.post_processor = processors.TemplateProcessing(
                single=[part for part in parts if part is not None], pair=None, special_tokens=list(around.items())
            )


def special_tokens(metadata: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens that GGUF metadata name."""
    tokens = metadata.get(PREFIX + "tokens") or ()
    return _Vocabulary(metadata, tokens, ()).specials()


Maker = Callable[[_Vocabulary, str, "str | None"], Core]
FAMILIES: Mapping[str, Maker] = {"gpt2": _byte_level, "llama": _sentencepiece}


def from_metadata(metadata: Mapping[str, Any], where: str, pre_tokenizer: str | None = None) -> FastTokenizer:
    """A tokenizer from GGUF metadata; `where` names the file in errors, `pre_tokenizer` wins over the file's own.

    Raises `LoadError` for a vocabulary of another family, an unknown pre-tokenizer, or damaged metadata.
    """
    family = metadata.get(PREFIX + "model")
    if family is None:
        raise LoadError(f"{where} holds no vocabulary (tokenizer.ggml.model)")
    make = FAMILIES.get(family)
    if make is None:
        known = ", ".join(FAMILIES)
        raise LoadError(
            f"{where} has a vocabulary of the family '{family}', which is not supported (supported: {known})"
        )
    vocabulary = _Vocabulary.read(metadata, where)
    try:
        core = make(vocabulary, where, pre_tokenizer)
    except LoadError:
        raise
    except Exception as e:  # the library raises the bare class
        raise LoadError(f"{where} has a damaged vocabulary: {e}") from None
    return FastTokenizer(core, vocabulary.specials(), vocabulary.repeats())
