"""The whole sampler against its slow twin, and the promises that no twin states (OUT-1..4, SMP-01, SED-01..03)."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from octavo.base.params import SamplingParams
from octavo.sampling.choice import make_sampler
from octavo.sampling.processors import Processors
from octavo.sampling.sampler import NOT_FINITE, NOTHING_LEFT, Mask, SampledTokens, Sampler
from octavo.sampling.state import SamplingRows, SamplingState
from tests.support import sampling_twin as twin

VOCAB, LIMIT, MAX_LEN = 40, 37, 64


class Silent:
    """A processor that changes nothing and notes the rows it was given: those of every `each`-th slot."""

    def __init__(self, keeps_argmax: bool, each: int = 1) -> None:
        self.keeps_argmax = keeps_argmax
        self.each = each
        self.seen: list[list[int]] = []

    def enter(self, slot: int, request_id: str, params: SamplingParams) -> bool:
        return slot % self.each == 0

    def leave(self, slot: int) -> None:
        return None

    def apply(self, logits: torch.Tensor, rows: SamplingRows, index: np.ndarray) -> None:
        self.seen.append(index.tolist())
        assert logits.shape[0] == len(index)


class Bench:
    """A state and a sampler with rows entered from twin rows."""

    def __init__(
        self, rows: list[twin.Row], *, slots: list[int] | None = None, limit: int = LIMIT, kind: str = "row by row"
    ) -> None:
        self.rows = rows
        self.slots = np.array(slots or list(range(len(rows))), dtype=np.int32)
        # a processor that keeps the argmax needs all rows at once, as an accelerator does
        given = {"together": (Silent(True),), "split": (Silent(False, each=2), Silent(True, each=3))}.get(kind, ())
        processors = Processors(given)
        self.sampler = make_sampler(vocab_limit=limit, processors=processors, native=kind in ("native", "split"))
        self.state = SamplingState(
            max_num_seqs=max(self.slots) + 1,
            vocab_limit=limit,
            engine_seed=3,
            make_counts=self.sampler.make_counts,
        )
        self.tokens = np.zeros((max(self.slots) + 1, MAX_LEN), dtype=np.int32)
        for slot, row in zip(self.slots.tolist(), rows, strict=True):
            self.state.enter(
                slot,
                f"r{slot}",
                row.params,
                num_prompt_tokens=len(row.prompt),
                sample_index=row.sample_index,
                eos_token_ids=row.eos,
                bad_words_ids=row.bad_words,
            )
            processors.enter(slot, f"r{slot}", row.params)
            known = row.prompt + row.output
            self.tokens[slot, : len(known)] = known

    def sample(self, dtype: torch.dtype = torch.float32, masks: tuple[Mask, ...] = ()) -> SampledTokens:
        lengths = np.array([len(r.prompt) + len(r.output) for r in self.rows], dtype=np.int64)
        rows = SamplingRows(metadata=self.state.metadata(self.slots), token_ids=self.tokens, lengths=lengths)
        logits = torch.tensor([r.logits for r in self.rows], dtype=dtype)
        return self.sampler.sample(logits, rows, masks)


@pytest.fixture(params=["row by row", "together", "native", "split"])
def bench(request: pytest.FixtureRequest) -> Callable[..., Bench]:
    """Makes a bench with each kind of sampler."""
    if request.param in ("native", "split"):
        pytest.importorskip("octavo.ops.native", exc_type=ImportError)
    return partial(Bench, kind=request.param)


def random_row(rng: np.random.Generator) -> twin.Row:
    def maybe(value: object, other: object, share: float = 0.4) -> object:
        return value if rng.random() < share else other

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(0, LIMIT, rng.integers(low, high)))

    scale = float(rng.choice([0.5, 2.0, 8.0]))
    logits = rng.normal(0, scale, VOCAB).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 1e-6, 1e-5, 1e-4, 0.5, 1.0, 3.0])),
        top_k=int(rng.choice([0, 1, 5, 100])),
        top_p=float(rng.choice([0.3, 0.9, 1.0])),
        min_p=float(maybe(0.1, 0.0)),
        presence_penalty=float(maybe(0.7, 0.0)),
        frequency_penalty=float(maybe(-0.4, 0.0)),
        repetition_penalty=float(maybe(1.7, 1.0)),
        seed=int(rng.integers(0, 2**62)),
        min_tokens=int(maybe(4, 0)),
        max_tokens=20,
        stop_token_ids=ids(0, 3),
        ignore_eos=bool(rng.random() < 0.3),
        logit_bias=maybe({t: float(rng.normal(0, 5)) for t in ids(1, 4)}, None),
        allowed_token_ids=maybe(ids(1, 12), None, 0.2),
    )
    prompt, output = list(ids(1, 10)), list(ids(0, 8))
    bad = [(*(prompt + output)[-int(rng.integers(0, 3)) :], int(np.argmax(logits[:LIMIT])))]
    return twin.Row(
        logits=[float(v) for v in logits],
        prompt=prompt,
        output=output,
        params=params,
        seed=int(params.seed or 0),
        sample_index=int(rng.integers(0, 3)),
        eos=list(ids(0, 3)),
        bad_words=list(maybe([*bad, *[ids(1, 4) for _ in range(3)]], [])),
    )


@pytest.mark.parametrize("seed", range(12))
def test_every_station_in_its_order_agrees_with_the_slow_twin(seed: int, bench: Callable[..., Bench]) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(40)]
    out = bench(rows, slots=rng.permutation(60)[:40].tolist()).sample()
    failed = {e.row for e in out.errors}
    for i, row in enumerate(rows):
        expected = twin.choose(row, LIMIT)
        assert (expected is None) == (i in failed)
        if expected is not None:
            assert int(out.tokens[i]) == expected, row.params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(dtype: torch.dtype, bench: Callable[..., Bench]) -> None:
    """SED-01, OUT-4, OUT-30."""
    rng = np.random.default_rng(99)
    rows = [random_row(rng) for _ in range(30)]
    batch = bench(rows).sample(dtype)
    for i, row in enumerate(rows):
        alone = bench([row], slots=[5]).sample(dtype)
        if not alone.errors:
            assert int(alone.tokens[0]) == int(batch.tokens[i])


def plain(logits: list[float], output: int = 0, **params: object) -> twin.Row:
    p = SamplingParams(max_tokens=50, **params)  # type: ignore[arg-type]
    return twin.Row(logits=logits, prompt=[1], output=[2] * output, params=p, seed=p.seed or 0)


def test_drawn_tokens_have_the_distribution_that_the_parameters_describe(bench: Callable[..., Bench]) -> None:
    logits = [float(v) for v in np.random.default_rng(5).normal(0, 1.5, VOCAB)]
    rows = [plain(logits, temperature=1.3, top_k=12, top_p=0.9, seed=s) for s in range(6000)]
    drawn = np.bincount(bench(rows).sample().tokens, minlength=VOCAB)
    weights = twin.kept(logits[:LIMIT], rows[0].params)
    assert set(np.flatnonzero(drawn)) <= set(weights)
    ids, w = list(weights), np.array(list(weights.values()))
    expected = w / w.sum() * len(rows)
    statistic = ((drawn[ids] - expected) ** 2 / expected).sum()
    assert len(ids) > 5 and statistic < len(ids) - 1 + 3.3 * math.sqrt(2 * (len(ids) - 1)) + 6


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 1e-5, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float, bench: Callable[..., Bench]) -> None:
    """SMP-01, alone and beside a hot row; one row has masked logits."""
    rng = np.random.default_rng(8)
    cold = [plain([float(v) for v in rng.normal(0, 8, VOCAB)], temperature=temperature, seed=i) for i in range(20)]
    cold[3].logits[:20] = [-math.inf] * 20
    cold[4].logits[20:] = [-3.4e38] * (VOCAB - 20)  # overflows when it is divided
    hot = plain([0.0] * VOCAB, temperature=1.5, seed=1)
    out = bench([*cold, hot]).sample()
    assert not out.errors
    assert out.tokens[:-1].tolist() == [int(np.argmax(r.logits[:LIMIT])) for r in cold]


def test_top_p_zero_is_the_most_probable_token(bench: Callable[..., Bench]) -> None:
    """F19: at any temperature, beside rows that draw."""
    rng = np.random.default_rng(9)
    rows = [
        plain([float(v) for v in rng.normal(0, 1, VOCAB)], temperature=t, top_p=0, top_k=k, min_p=m, seed=i)
        for i in range(10)
        for t, k, m in ((1.0, 0, 0.0), (5.0, 7, 0.5), (0.0, 0, 1.0))
    ]
    out = bench([*rows, plain([0.0] * VOCAB, temperature=1.5, seed=1)]).sample()
    assert out.tokens[:-1].tolist() == [int(np.argmax(r.logits[:LIMIT])) for r in rows]


def test_seeds_sample_indices_and_positions_draw_differently_and_repeatably(bench: Callable[..., Bench]) -> None:
    """SED-01, SED-03: and no seed means one from the engine's seed and the request's id."""
    flat = [0.0] * VOCAB

    def texts(**kw: int) -> list[int]:
        index = kw.pop("sample_index", 0)
        rows = [plain(flat, output=n, **kw) for n in range(16)]
        for r in rows:
            r.sample_index = index
        return bench(rows).sample().tokens.tolist()

    assert texts(seed=42) == texts(seed=42)
    assert len({tuple(texts(seed=s)) for s in range(8)}) == 8
    assert len({tuple(texts(seed=1, sample_index=i)) for i in range(4)}) == 4
    assert len(set(texts(seed=42))) > 4
    assert texts() == texts() != texts(seed=42)


def test_ids_beyond_the_tokenizers_vocabulary_are_never_sampled(bench: Callable[..., Bench]) -> None:
    logits = [0.0] * LIMIT + [50.0] * (VOCAB - LIMIT)
    rows = [plain(logits, temperature=t, top_p=p, seed=i) for i in range(60) for t in (0.0, 5.0) for p in (0.9, 1.0)]
    assert int(bench(rows).sample().tokens.max()) < LIMIT


def test_a_row_with_nan_or_infinite_logits_fails_alone(bench: Callable[..., Bench]) -> None:
    rows = [plain([float(i == n) for i in range(VOCAB)], temperature=t, seed=1) for n in range(6) for t in (0.0, 1e-5)]
    rows[1].logits[4] = math.nan
    rows[4].logits[0] = math.inf
    rows[7].logits = [-math.inf] * VOCAB
    out = bench(rows).sample()
    assert [(e.row, e.message) for e in out.errors] == [(1, NOT_FINITE), (4, NOT_FINITE), (7, NOTHING_LEFT)]
    good = [i for i in range(12) if i not in (1, 4, 7)]
    assert [int(out.tokens[i]) for i in good] == [i // 2 for i in good]


def test_contradicting_rules_end_the_request_with_a_reason(bench: Callable[..., Bench]) -> None:
    row = plain([0.0] * VOCAB, allowed_token_ids=(5,), min_tokens=3, stop_token_ids=(5,))
    assert [e.message for e in bench([row]).sample().errors] == [NOTHING_LEFT]


def test_min_tokens_hold_back_every_end_until_they_are_reached(bench: Callable[..., Bench]) -> None:
    logits = [0.0] * VOCAB
    logits[7], logits[9], logits[11] = 30.0, 20.0, 10.0

    def first(output: int, **kw: object) -> int:
        row = plain(logits, output=output, temperature=0.0, min_tokens=3, stop_token_ids=(9,), **kw)
        row.eos = [7]
        return int(bench([row]).sample().tokens[0])

    assert [first(n) for n in range(5)] == [11, 11, 11, 7, 7]
    assert first(0, ignore_eos=True) == 7


def test_a_mask_comes_after_raw_logprobs_and_before_everything_else(bench: Callable[..., Bench]) -> None:
    logits = [float(i) for i in range(VOCAB)]
    row = plain(logits, temperature=0.0, logprobs=1, logit_bias={36: 5.0})

    def mask(x: torch.Tensor) -> None:
        assert x.dtype == torch.float32
        x[0, 36] = -torch.inf

    out = bench([row]).sample(masks=(mask,))
    assert out.tokens.tolist() == [35]
    assert out.logprobs is not None and out.logprobs.token_ids[0].tolist() == [35, 36]


def test_metadata_is_rebuilt_only_when_the_batch_changes() -> None:
    """OUT-1."""
    one = Bench([plain([0.0] * VOCAB, seed=i) for i in range(4)])
    first = one.state.metadata(one.slots)
    assert one.state.metadata(one.slots.copy()) is first
    assert one.state.metadata(one.slots[:2]) is not first
    again = one.state.metadata(one.slots)
    one.state.enter(2, "x", SamplingParams(temperature=0.0), num_prompt_tokens=1)
    changed = one.state.metadata(one.slots)
    assert again is not changed and changed.drawn.tolist() == [0, 1, 3]


def test_rules_with_ids_outside_the_vocabulary_are_passed_over(bench: Callable[..., Bench]) -> None:
    row = plain([0.0] * VOCAB, temperature=0.0, logit_bias={10**9: 5.0, -4: 5.0, 3: 1.0}, stop_token_ids=(10**9,))
    row.bad_words = [(10**9,), (5, 10**9)]
    assert bench([row]).sample().tokens.tolist() == [3]


def test_an_empty_batch_gives_no_tokens() -> None:
    state = SamplingState(max_num_seqs=1, vocab_limit=4, engine_seed=0)
    none = np.zeros(0, dtype=np.int32)
    rows = SamplingRows(
        metadata=state.metadata(none), token_ids=np.zeros((1, 4), np.int32), lengths=np.zeros(0, np.int64)
    )
    assert Sampler(vocab_limit=4).sample(torch.zeros(0, 4), rows).tokens.shape == (0,)


def test_processors_run_before_greedy_or_on_drawn_rows_only() -> None:
    """OUT-5."""
    one = Bench([plain([0.0] * VOCAB, temperature=t, seed=1) for t in (0.0, 1.0)])
    before, after = Silent(False), Silent(True)
    processors = Processors((before, after))
    one.sampler = Sampler(vocab_limit=LIMIT, processors=processors)
    for slot, row in enumerate(one.rows):
        processors.enter(slot, "r", row.params)
    one.sample()
    assert before.seen == [[0, 1]] and after.seen == [[1]]


class Odd(Silent):
    """Raises, or forbids all but one token, for every second slot."""

    def __init__(self, keeps_argmax: bool, only: int | None) -> None:
        super().__init__(keeps_argmax, each=2)
        self.only = only

    def apply(self, logits: torch.Tensor, rows: SamplingRows, index: np.ndarray) -> None:
        super().apply(logits, rows, index)
        if self.only is None:
            logits.fill_(torch.nan)
            raise LookupError("the moon is full")
        logits[:, : self.only] = -torch.inf
        logits[:, self.only + 1 :] = -torch.inf


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("keeps_argmax", [True, False])
def test_a_processor_changes_the_rows_that_it_said_yes_to_and_no_other(native: bool, keeps_argmax: bool) -> None:
    """OUT-5: text and log-probabilities of the others are what they are without it."""
    rng = np.random.default_rng(3)
    rows = [plain(rng.normal(0, 2, VOCAB).tolist(), temperature=t, seed=i, logprobs=i % 4) for i, t in enumerate((1.0, 1.0, 0.7, 0.0, 1.5, 2.0))]  # fmt: skip
    without, one = Bench(rows, kind="native" if native else "row by row"), Bench(rows)
    processors = Processors((Odd(keeps_argmax, only=5),))
    one.sampler = make_sampler(vocab_limit=LIMIT, processors=processors, native=native)
    for slot, row in enumerate(rows):
        processors.enter(slot, "r", row.params)
    one.state = without.state
    want, got = without.sample(), one.sample()
    assert got.tokens[::2].tolist() == [5, 5, 5] and got.tokens[1::2].tolist() == want.tokens[1::2].tolist()
    assert not got.errors and got.logprobs is not None and want.logprobs is not None
    assert np.array_equal(got.logprobs.width, want.logprobs.width)
    for row in (1, 3, 5):
        width = want.logprobs.width[row]
        assert np.array_equal(got.logprobs.token_ids[row, :width], want.logprobs.token_ids[row, :width])
        assert np.allclose(got.logprobs.logprobs[row, :width], want.logprobs.logprobs[row, :width], atol=1e-5)
    for slot in range(0, 6, 2):
        processors.leave(slot)
    assert one.sample().tokens.tolist() == want.tokens.tolist(), "nobody uses it any more"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("keeps_argmax", [True, False])
def test_what_a_processor_raises_ends_its_own_rows(native: bool, keeps_argmax: bool) -> None:
    """OUT-5: the others go on, with the tokens that they would have had."""
    rows = [plain([0.0, 1.0, 2.0, *[0.0] * (VOCAB - 3)], temperature=1.0, seed=i) for i in range(4)]
    without, one = Bench(rows, kind="native" if native else "row by row"), Bench(rows)
    processors = Processors((Odd(keeps_argmax, only=None),))
    one.sampler = make_sampler(vocab_limit=LIMIT, processors=processors, native=native)
    for slot, row in enumerate(rows):
        processors.enter(slot, "r", row.params)
    one.state = without.state
    got = one.sample()
    assert sorted(error.row for error in got.errors) == [0, 2]
    assert {error.message for error in got.errors} == {"logits processor Odd failed: LookupError('the moon is full')"}
    assert got.tokens[1::2].tolist() == without.sample().tokens[1::2].tolist()


def test_a_mask_that_is_no_bitmask_reaches_both_kinds_of_rows() -> None:
    """OUT-12: a mask is of the whole batch, whoever samples its rows."""
    rows = [plain([0.0] * VOCAB, temperature=0.0) for _ in range(4)]

    def forbid(x: torch.Tensor) -> None:
        for row in range(4):
            x[row, : row + 1] = -torch.inf

    assert Bench(rows, kind="split").sample(masks=(forbid,)).tokens.tolist() == [1, 2, 3, 4]
