"""The native sampler against its numpy twin, at every instruction set level this machine has (OUT-2, OUT-4, OUT-30)."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octavo.base.params import SamplingParams
from octavo.sampling import draw, rows
from octavo.sampling.bitmask import TokenBitmask
from octavo.sampling.logprobs import LogprobsMode, score
from octavo.sampling.penalties import TokenCounts
from octavo.sampling.sampler import Mask, SampledTokens, Sampler, TokenSampler
from octavo.sampling.state import PARAMS, SamplingRows, SamplingState
from tests.support import sampling_twin as twin

native = pytest.importorskip("octavo.ops.native", exc_type=ImportError)
NativeSampler = pytest.importorskip("octavo.sampling.native", exc_type=ImportError).NativeSampler

TOLERANCE = 2e-6  # of the row's mass: how near to a border the last bits of exp and of sums decide


LEVELS = [level for level in native.levels() if level != "avx512_bf16"]  # its instructions have no part in this


@pytest.fixture(params=LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs at every level."""
    native.use_level(request.param)
    yield request.param
    native.use_level(native.levels()[-1])


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sample(
    sampler: TokenSampler,
    x: torch.Tensor,
    params: list[SamplingParams],
    *,
    known: np.ndarray | None = None,
    prompt: int = 3,
    limit: int | None = None,
    masks: tuple[Mask, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SampledTokens:
    """One step of rows that know `known` [N, L], whose first `prompt` tokens are prompts."""
    n = len(params)
    known = np.zeros((n, prompt), dtype=np.int32) if known is None else known
    state = SamplingState(
        max_num_seqs=n, vocab_limit=limit or x.shape[1], engine_seed=0, make_counts=sampler.make_counts
    )
    for i, p in enumerate(params):
        state.enter(i, f"r{i}", p, num_prompt_tokens=prompt, eos_token_ids=(1,), bad_words_ids=bad_words)
    lengths = np.full(n, known.shape[1], dtype=np.int64)
    slots = np.arange(n, dtype=np.int32)
    return sampler.sample(
        x.clone(), SamplingRows(metadata=state.metadata(slots), token_ids=known, lengths=lengths), masks
    )


def logits(rng: np.random.Generator, n: int, vocab: int, kind: str) -> torch.Tensor:
    """Rows of one kind: flat, peaked, with many equal values, with most tokens forbidden, in bfloat16's steps."""
    x = rng.normal(0, 2, (n, vocab)).astype(np.float32)
    if kind == "peaked":
        x[np.arange(n), rng.integers(0, vocab, n)] += 15
    elif kind == "ties":
        x = np.round(x)
    elif kind == "equal":
        x[:] = 0.25
    elif kind == "forbidden":
        x[:, rng.random(vocab) < 0.9] = -np.inf
        x[:, vocab // 2] = 1.0
    elif kind == "coarse":
        return torch.from_numpy(x).bfloat16().float()
    return torch.from_numpy(x)


KINDS = ["flat", "peaked", "ties", "equal", "forbidden", "coarse"]
GRID = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t in (0.0, 0.7, 1.0, 30.0)
    for k in (0, 1, 50, 3000)
    for p in (0.1, 0.9, 0.999, 1.0)
    for m in (0.0, 0.02)
]


def near_a_border(x: np.ndarray, p: SamplingParams, uniform: float, got: int) -> bool:
    """True when `got` is what a number within `TOLERANCE` of `uniform`, or a nucleus that much larger, would give."""
    for u in (uniform - TOLERANCE, uniform + TOLERANCE):
        for top_p in {p.top_p, max(1e-9, p.top_p - TOLERANCE), min(1.0, p.top_p + TOLERANCE)}:
            u = min(max(u, 0.0), 1 - 2**-53)
            if rows.draw_row(x, x.max(), np.float32(p.temperature), p.top_k, top_p, p.min_p, u) == got:
                return True
    return False


@pytest.mark.parametrize("vocab", [1, 5, 17, 255, 256, 257, 5003])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_twins_but_at_borders_within_rounding(vocab: int, kind: str) -> None:
    rng = np.random.default_rng(vocab)
    x = logits(rng, len(GRID), vocab, kind)
    params = [SamplingParams(seed=int(rng.integers(0, 2**62)), **p) for p in GRID]
    got = sample(NativeSampler(vocab_limit=vocab), x, params).tokens
    expected = sample(Sampler(vocab_limit=vocab), x, params).tokens
    at_borders = 0
    for i in np.flatnonzero(got != expected).tolist():
        uniform = twin.uniform(params[i].seed or 0, 0, 0)
        assert near_a_border(x[i].numpy(), params[i], uniform, int(got[i])), params[i]
        at_borders += 1
    assert at_borders <= 1, "borders are rare"


def test_what_is_drawn_has_the_distribution_that_the_parameters_describe() -> None:
    rng = np.random.default_rng(3)
    n, x = 2000, logits(rng, 1, 100, "flat")
    for kw in ({}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.1}):
        params = [SamplingParams(seed=i, temperature=0.8, **kw) for i in range(n)]  # type: ignore[arg-type]
        tokens = sample(NativeSampler(vocab_limit=100), x.expand(n, -1), params).tokens
        weights = twin.kept(x[0].tolist(), params[0])
        counts = np.bincount(tokens, minlength=100)
        assert set(np.flatnonzero(counts)) <= set(weights)
        share = np.array(list(weights.values())) / sum(weights.values())
        expected, observed = share * n, counts[list(weights)]
        common = expected > 5
        chi = ((observed[common] - expected[common]) ** 2 / expected[common]).sum()
        degrees = common.sum() - 1
        assert chi < degrees + 4 * (2 * degrees) ** 0.5 + 6, kw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["flat", "ties"])
def test_a_row_is_the_same_alone_in_any_batch_and_with_any_number_of_threads(
    dtype: torch.dtype, kind: str, threads: None
) -> None:
    """OUT-30: tokens and log-probabilities to the bit."""
    rng = np.random.default_rng(7)
    params = [
        SamplingParams(seed=i, logprobs=i % 4, repetition_penalty=1 + i % 3 / 10, **p) for i, p in enumerate(GRID[:48])
    ]
    x = logits(rng, len(params), 3001, kind).to(dtype)
    known = rng.integers(0, 3001, (len(params), 40)).astype(np.int32)
    sampler = NativeSampler(vocab_limit=2999)
    torch.set_num_threads(2)
    batch = sample(sampler, x, params, known=known, limit=2999)
    torch.set_num_threads(1)
    again = sample(sampler, x, params, known=known, limit=2999)
    assert batch.logprobs is not None and again.logprobs is not None
    assert (batch.tokens == again.tokens).all()
    assert batch.logprobs.logprobs.tobytes() == again.logprobs.logprobs.tobytes()
    for i in range(0, len(params), 5):
        alone = sample(sampler, x[i : i + 1], [params[i]], known=known[i : i + 1], limit=2999)
        width = int(batch.logprobs.width[i])
        assert alone.tokens[0] == batch.tokens[i]
        if width:
            assert alone.logprobs is not None
            assert alone.logprobs.logprobs[0].tobytes() == batch.logprobs.logprobs[i, :width].tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", LogprobsMode)
@pytest.mark.parametrize("columns", [1, 4, 90, 5001])
def test_log_probabilities_are_the_twins(dtype: torch.dtype, mode: LogprobsMode, columns: int) -> None:
    """OUT-2 steps 1 and 11, in every mode; ranks and ids exactly, values to rounding."""
    rng = np.random.default_rng(columns)
    n, vocab, limit = 12, 5020, 5003
    x = torch.cat([logits(rng, 4, vocab, kind) for kind in ("flat", "ties", "peaked")]).to(dtype)
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.3)[i % 3], top_k=(0, 40)[i % 2], top_p=(1.0, 0.9)[i // 2 % 2], seed=i,
            logprobs=columns - 1 if columns < limit else -1, presence_penalty=0.5 * (i % 2),
        )
        for i in range(n)
    ]  # fmt: skip
    known = rng.integers(0, limit, (n, 30)).astype(np.int32)
    twin_sampler = Sampler(vocab_limit=limit, mode=mode)
    expected = sample(twin_sampler, x, params, known=known, limit=limit)
    got = sample(NativeSampler(vocab_limit=limit, mode=mode), x, params, known=known, limit=limit)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert got.logprobs is not None and expected.logprobs is not None
    assert (got.logprobs.ranks == expected.logprobs.ranks).all()
    assert (got.logprobs.width == expected.logprobs.width).all()
    assert np.allclose(got.logprobs.logprobs, expected.logprobs.logprobs, atol=2e-5, rtol=1e-6)
    assert (got.logprobs.token_ids == expected.logprobs.token_ids).all()
    finite = np.isfinite(expected.logprobs.logprobs)
    assert finite.all() or mode.processed


@pytest.mark.parametrize("columns", [1, 3, 70, 300])
def test_known_tokens_are_scored_as_the_twin_scores_them(columns: int) -> None:
    """OUT-6."""
    rng = np.random.default_rng(columns)
    x = torch.cat([logits(rng, 3, 1501, kind) for kind in KINDS])
    chosen = rng.integers(0, 1500, len(x))
    chosen[12:15] = 750  # where all others may be forbidden
    ids, values, ranks = NativeSampler(vocab_limit=1500).score(x, chosen, columns)
    expected = score(x, chosen, columns, 1500)
    assert (ids == expected[0]).all() and (ranks == expected[2]).all()
    finite = np.isfinite(expected[1])
    assert np.allclose(values[finite], expected[1][finite], atol=1e-5) and np.isneginf(values[~finite]).all()


def test_edited_rows_are_the_twins() -> None:
    """Masks, bias, penalties, held-back ends: station 4, over a vocabulary of many blocks."""
    rng = np.random.default_rng(11)
    n, vocab = 64, 3000
    x = logits(rng, n, vocab, "flat")
    known = rng.integers(0, 50, (n, 60)).astype(np.int32)
    known[::2, -1] = 5
    params = [
        SamplingParams(
            temperature=(0.0, 1.0)[i % 2], seed=i, max_tokens=500, min_tokens=(0, 400)[i // 2 % 2],
            repetition_penalty=(1.0, 1.3)[i // 4 % 2], frequency_penalty=(0.0, 0.4)[i // 8 % 2],
            logit_bias={int(t): float(v) for t, v in zip(rng.integers(0, 50, 4), rng.normal(0, 9, 4), strict=True)},
            allowed_token_ids=tuple(range(40)) if i % 5 == 0 else None, top_p=(1.0, 0.9)[i // 16 % 2],
        )
        for i in range(n)
    ]  # fmt: skip
    x[:, :50] += 6
    expected = sample(Sampler(vocab_limit=vocab), x, params, known=known, prompt=10, bad_words=((2,), (5, 6), (5, 7)))
    got = sample(NativeSampler(vocab_limit=vocab), x, params, known=known, prompt=10, bad_words=((2,), (5, 6), (5, 7)))
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert 2 not in got.tokens


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 2050])
def test_a_bitmask_is_read_as_it_lies(vocab: int) -> None:
    """OUT-12: lowest bit first; the native sampler and torch agree, also when there are several."""
    rng = np.random.default_rng(vocab)
    n = 9
    words = rng.integers(-(2**31), 2**31, (n, -(-vocab // 32))).astype(np.int32)
    words[:, 0] |= 1
    words[4] = -1
    x = logits(rng, n, vocab, "flat")
    params = [SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i, logprobs=2) for i in range(n)]
    for masks in ((TokenBitmask(words),), (TokenBitmask(words), TokenBitmask(np.roll(words, 1, 1) | 1))):
        expected = sample(Sampler(vocab_limit=vocab), x, params, masks=masks)
        got = sample(NativeSampler(vocab_limit=vocab), x, params, masks=masks)
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert got.logprobs is not None and expected.logprobs is not None
        assert (got.logprobs.token_ids == expected.logprobs.token_ids).all(), "raw: untouched by masks"
        for row, token in enumerate(got.tokens.tolist()):
            assert words[row, token // 32] >> (token % 32) & 1
    plain = sample(NativeSampler(vocab_limit=vocab), x, params)
    opened = sample(NativeSampler(vocab_limit=vocab), x, params, masks=(TokenBitmask(np.full_like(words, -1)),))
    assert plain.tokens.tolist() == opened.tokens.tolist()


def test_a_mask_that_is_no_bitmask_leaves_raw_log_probabilities_alone() -> None:
    x = torch.arange(40.0)[None].expand(2, -1)
    params = [SamplingParams(temperature=0.0, logprobs=1), SamplingParams(temperature=0.0)]

    def mask(scores: torch.Tensor) -> None:
        scores[:, 30:] = -torch.inf

    out = sample(NativeSampler(vocab_limit=40), x, params, masks=(mask,))
    assert out.tokens.tolist() == [29, 29] and out.logprobs is not None
    assert out.logprobs.token_ids[0].tolist() == [29, 39] and out.logprobs.ranks[0] == 11


@pytest.mark.parametrize("where", [0, 100, 999])
def test_damaged_rows_fail_alone_wherever_the_damage_is(where: int) -> None:
    x = logits(np.random.default_rng(0), 6, 1000, "flat")
    x[1, where] = torch.nan
    x[2, where] = torch.inf
    x[3] = -torch.inf
    x[4, where] = -torch.nan
    for kw in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9, "logprobs": 700}, {"top_k": 5}):
        params = [SamplingParams(seed=1, **kw) for _ in range(6)]  # type: ignore[arg-type]
        got = sample(NativeSampler(vocab_limit=1000), x, params)
        expected = sample(Sampler(vocab_limit=1000), x, params)
        assert got.errors == expected.errors and [e.row for e in got.errors] == [1, 2, 3, 4]
        assert got.tokens[[0, 5]].tolist() == expected.tokens[[0, 5]].tolist()
        assert ((got.tokens >= 0) & (got.tokens < 1000)).all(), "the next step may compute them"


def test_the_numbers_drawn_are_those_of_the_counter_based_generator() -> None:
    """A row of equal weights shows its number: the token is its integer part."""
    vocab, n = 5000, 400
    rng = np.random.default_rng(5)
    seeds = [int(s) for s in rng.integers(-(2**63), 2**63 - 1, n)]
    out = sample(NativeSampler(vocab_limit=vocab), torch.zeros(n, vocab), [SamplingParams(seed=s) for s in seeds])
    words = np.array([draw.seed_word(s) for s in seeds], dtype=np.uint64)
    uniforms = draw.uniforms(words, np.zeros(n, np.int64), np.zeros(n, np.int64))
    assert out.tokens.tolist() == (uniforms * vocab).astype(np.int64).tolist()


def test_native_counts_are_the_twins_counts() -> None:
    rng = np.random.default_rng(2)
    for with_prompt in (False, True):
        mine, other = native.core.TokenCounts(with_prompt), TokenCounts(with_prompt=with_prompt)
        tokens = rng.integers(0, 400, 3000).astype(np.int32)
        for length in (50, 51, 52, 400, 380, 381, 2999, 60, 3000):  # shorter: guesses were taken back
            mine.update(tokens.ctypes.data, length, 50)
            other.update(tokens[:length], 50)
            assert dict(mine.items()) == dict(zip(other.ids.tolist(), other.counts.tolist(), strict=True))


def test_the_layout_of_a_row_is_the_cores() -> None:
    names = PARAMS.names or ()
    assert native.core.sample_row_layout() == [*(PARAMS.fields[name][1] for name in names), PARAMS.itemsize]  # type: ignore[index]
