"""Figures of a running engine (OPS-6, REQ-6, MET-01)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.outputs import RequestTimes, StatsSnapshot
from octavo.base.types import FinishReason
from octavo.observe.stats import Histogram, NullStats, RequestRecord, StatsLog


class Clock:
    """Owns: the time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def record(reason: FinishReason = FinishReason.STOP, **more: object) -> RequestRecord:
    times = RequestTimes(arrived_s=1.0, queued_s=1.5, scheduled_s=2.0, first_token_s=4.0, finished_s=8.0)
    return RequestRecord(**{"reason": reason, "times": times, "output_tokens": 3, "prompt_tokens": 10, **more})  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 10, allow_nan=False)), st.lists(st.floats(0, 10), min_size=1, max_size=5, unique=True))
def test_histograms_count_at_or_below_each_bound(values: list[float], bounds: list[float]) -> None:
    one, many = Histogram(sorted(bounds)), Histogram(sorted(bounds))
    for value in values:
        one.observe(value)
    many.observe_all(values)
    want = [(b, sum(v <= b for v in values)) for b in [*sorted(bounds), float("inf")]]
    assert one.cumulative() == many.cumulative() == want
    assert one.count == len(values) and one.sum == pytest.approx(sum(values)) and many.sum == pytest.approx(one.sum)


def test_a_finished_request_feeds_each_latency() -> None:
    book = StatsLog(Clock())
    book.ended(record())
    assert [h.sum for h in (book.queue_s, book.prefill_s, book.first_token_s, book.decode_s, book.end_to_end_s)] == [
        0.5, 2.0, 3.0, 4.0, 7.0,
    ]  # fmt: skip
    assert (book.prompt_tokens.sum, book.output_tokens.sum) == (10, 3)


def test_a_request_that_never_ran_feeds_only_what_it_reached() -> None:
    book = StatsLog(Clock())
    book.ended(record(FinishReason.ABORT, times=RequestTimes(arrived_s=1.0, finished_s=3.0), prompt_tokens=None))
    assert book.finished[FinishReason.ABORT] == 1 and book.finished[FinishReason.STOP] == 0
    assert (book.queue_s.count, book.first_token_s.count, book.decode_s.count) == (0, 0, 0)
    assert (book.end_to_end_s.sum, book.prompt_tokens.count) == (2.0, 0)


def test_gauges_are_those_of_the_last_snapshot_met_01() -> None:
    book = StatsLog(Clock())
    book.absorb(StatsSnapshot(seq=7, num_running=90, num_waiting=10, kv_usage=0.8, num_blocks_used=80, step_rows=90))
    book.absorb(StatsSnapshot(seq=8, output_tokens=50))
    assert (book.snapshot.num_running, book.snapshot.num_waiting, book.snapshot.kv_usage) == (0, 0, 0.0)
    book.absorb(StatsSnapshot(seq=7, num_running=90))  # late
    assert book.snapshot.num_running == 0


def test_a_step_counts_once_although_its_figures_come_again() -> None:
    book = StatsLog(Clock())
    for seq in (1, 1, 2):
        book.absorb(StatsSnapshot(seq=seq, step_rows=4, step_tokens=4, step_s=0.5))
    assert (book.step_s.count, book.step_tokens.sum) == (2, 8)


def test_death_empties_the_gauges_and_keeps_the_counters() -> None:
    book = StatsLog(Clock())
    book.absorb(StatsSnapshot(seq=1, num_running=3, num_waiting=2, num_blocks_used=5, kv_usage=0.5, output_tokens=9))
    book.engine_died()
    s = book.snapshot
    assert (s.num_running, s.num_waiting, s.num_blocks_used, s.kv_usage, s.output_tokens) == (0, 0, 0, 0.0, 9)
    assert not book.engine_up


def test_rates_are_since_the_last_call() -> None:
    clock = Clock()
    book = StatsLog(clock)
    book.absorb(StatsSnapshot(seq=1, prompt_tokens=100, output_tokens=50, prefix_queries=100, prefix_hits=25))
    clock.now_s += 2.0
    rates = book.rates()
    assert (rates.prompt_tokens_per_s, rates.output_tokens_per_s, rates.prefix_hit_share) == (50.0, 25.0, 0.25)
    clock.now_s += 1.0
    assert book.rates().output_tokens_per_s == 0 and book.rates().prefix_hit_share is None


def test_the_summary_is_one_line() -> None:
    clock = Clock()
    book = StatsLog(clock)
    clock.now_s += 10.0
    book.absorb(StatsSnapshot(seq=2, num_running=2, kv_usage=0.5, output_tokens=60, prefix_queries=4, prefix_hits=1))
    assert book.summary() == "running 2, waiting 0, prompt 0.0 tok/s, generation 6.0 tok/s, KV 50.0%, prefix hits 25%"


def test_the_null_sink_takes_everything() -> None:
    sink = NullStats()
    sink.absorb(StatsSnapshot())
    sink.ended(record())
    sink.gaps([1.0])
    sink.refused()
    sink.engine_died()
