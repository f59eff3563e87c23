"""Tokenizers of every kind that text is made with, as decoders with and without a fast path.

Promises: each kind is built in memory with the tokenizers library; `well_formed` texts survive a round trip
through their kind, as far as that kind keeps text at all.
Does not know: models.
"""

from collections.abc import Callable, Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.inputs.tokenizer_fast import FastTokenizer, SpecialTokens
from octavo.outputs.detokenizer import DecodeStream
from tests.support.fixture_tokenizers import trained_bpe

_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello hello world, a small test of words",
    "pages and blocks",
]
_SPECIAL = AddedToken("<end>", special=True, normalized=False)


def _wrap(core: Tokenizer) -> FastTokenizer:
    core.add_special_tokens([_SPECIAL])
    return FastTokenizer(core, SpecialTokens())


def _llama() -> FastTokenizer:
    """SentencePiece-like BPE: a mark for spaces, unknown characters as bytes, the first space stripped."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    core.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=tokens[:1], show_progress=False)
    )
    vocab = {token: i for i, token in enumerate(tokens)}
    for token in sorted(core.get_vocab(), key=core.get_vocab().__getitem__):
        vocab.setdefault(token, len(vocab))
    merges = [(a, b) for a in list(vocab)[257:] for b in list(vocab)[257:] if a + b in vocab]
    merges.sort(key=lambda pair: vocab[pair[0] + pair[1]])
    fresh = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    fresh.normalizer, fresh.decoder = core.normalizer, core.decoder
    return _wrap(fresh)


def _unigram() -> FastTokenizer:
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    core.train_from_iterator(
        _CORPUS,
        trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
    )
    return _wrap(core)


def _wordpiece() -> FastTokenizer:
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    core.train_from_iterator(
        _CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    )
    return _wrap(core)


def _suffixed() -> FastTokenizer:
    """Old BPE that marks the ends of words."""
    core = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder()
    core.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False),
    )
    return _wrap(core)


def _words() -> FastTokenizer:
    """Whole words and no decoder: the library joins with spaces."""
    core = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.train_from_iterator(_CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return _wrap(core)


KINDS: dict[str, Callable[[], FastTokenizer]] = {
    "byte-bpe": lambda: _wrap(trained_bpe()),
    "byte-fallback-bpe": _llama,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "suffixed-bpe": _suffixed,
    "word-level": _words,
}


@cache
def tokenizer(kind: str) -> FastTokenizer:
    """The tokenizer of a kind, built once; nobody changes it."""
    return KINDS[kind]()


class NoFastPath:
    """A tokenizer without a decode stream.

    Owns: nothing.
    """

    def __init__(self, inner: FastTokenizer) -> None:
        self._inner = inner
        self.num_decoded = 0  # ids, over all calls

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        self.num_decoded += len(ids)
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        return self._inner.token_text(token_id)

    def open_stream(self, *, skip_special_tokens: bool) -> DecodeStream | None:
        return None


class Breaking(NoFastPath):
    """A tokenizer whose decode streams raise at every `every`-th step, as on an invalid prefix.

    Owns: the count of steps.
    """

    def __init__(self, inner: FastTokenizer, every: int) -> None:
        super().__init__(inner)
        self._every = every
        self.num_opened = 0
        self.num_steps = 0

    def open_stream(self, *, skip_special_tokens: bool) -> DecodeStream | None:
        self.num_opened += 1
        outer, stream = self, self._inner.open_stream(skip_special_tokens=skip_special_tokens)

        class _Stream:
            def step(self, token_id: int) -> str | None:
                outer.num_steps += 1
                if outer.num_steps % outer._every == 0:
                    raise ValueError("invalid prefix encountered")
                return stream.step(token_id)

        return _Stream()
