"""Figures of a running engine: counters, gauges and latency histograms, in plain Python.

Promises: feeding it costs well under a microsecond per figure and changes nothing else; gauges are those
of the last snapshot, so they fall to zero when the engine says so (MET-01).
Does not know: Prometheus, HTTP, or where the figures come from. Not thread-safe: one thread feeds it; a
reader on another thread may see a figure one event old, never a broken one.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from octavo.base.outputs import RequestTimes, StatsSnapshot
from octavo.base.types import FinishReason

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(2.0**i for i in range(18))


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that has ended, as the front saw it.

    `prompt_tokens` is None for the second and later answers to one prompt, so that it counts once.
    """

    reason: FinishReason
    times: RequestTimes
    output_tokens: int
    prompt_tokens: int | None = None


class StatsSink(Protocol):
    """Who wants to know what the front sees."""

    def absorb(self, snapshot: StatsSnapshot) -> None:
        """The engine's own figures after a step."""

    def ended(self, record: RequestRecord) -> None:
        """One answer ended."""

    def gaps(self, gaps_s: Sequence[float]) -> None:
        """Seconds between successive outputs of requests, as they reached the front."""

    def refused(self) -> None:
        """A request was turned away because too many wait."""

    def engine_died(self) -> None:
        """The engine is gone."""


class NullStats:
    """Nobody wants to know.

    Owns: nothing.
    """

    def absorb(self, snapshot: StatsSnapshot) -> None:
        return None

    def ended(self, record: RequestRecord) -> None:
        return None

    def gaps(self, gaps_s: Sequence[float]) -> None:
        return None

    def refused(self) -> None:
        return None

    def engine_died(self) -> None:
        return None


class Histogram:
    """Counts of values by upper bound, with their sum.

    Owns: its counts.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last one is above every bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a value equal to a bound belongs to that bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several."""
        counts, bounds, total = self.counts, self.bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum += total

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, values at or below it) in rising order, infinity last."""
        out, running = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            out.append((bound, running))
        return out


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What happened since the last call of `StatsLog.rates`."""

    seconds: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    prefix_hit_share: float | None  # None: nothing was looked up


class StatsLog:
    """All figures of one engine.

    Owns: the last snapshot, the histograms and the counters of the front.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marked = StatsSnapshot()
        self._marked_s = clock()
        self.snapshot = StatsSnapshot()
        self.engine_up = True
        self.num_refused = 0
        self.finished: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
        self.queue_s = Histogram(LATENCY_S)
        self.prefill_s = Histogram(LATENCY_S)
        self.first_token_s = Histogram(LATENCY_S)
        self.inter_token_s = Histogram(LATENCY_S)
        self.decode_s = Histogram(LATENCY_S)
        self.end_to_end_s = Histogram(LATENCY_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.output_tokens = Histogram(TOKENS)
        self.step_s = Histogram(LATENCY_S)
        self.step_tokens = Histogram(TOKENS)

    def absorb(self, snapshot: StatsSnapshot) -> None:
        """Take the engine's own figures; an older one that comes late is left aside."""
        if snapshot.seq < self.snapshot.seq:
            return
        new_step = snapshot.seq != self.snapshot.seq
        self.snapshot = snapshot
        if new_step and snapshot.step_rows:
            self.step_s.observe(snapshot.step_s)
            self.step_tokens.observe(snapshot.step_tokens)

    def ended(self, record: RequestRecord) -> None:
        """Count one answer by its reason, and its latencies as far as it got (REQ-6)."""
        self.finished[record.reason] += 1
        t = record.times
        queued_s = t.queued_s or t.arrived_s
        _span(self.queue_s, queued_s, t.scheduled_s)
        _span(self.prefill_s, t.scheduled_s, t.first_token_s)
        _span(self.first_token_s, t.arrived_s, t.first_token_s)
        _span(self.decode_s, t.first_token_s, t.finished_s)
        _span(self.end_to_end_s, t.arrived_s, t.finished_s)
        if record.prompt_tokens is not None:
            self.prompt_tokens.observe(record.prompt_tokens)
        self.output_tokens.observe(record.output_tokens)

    def gaps(self, gaps_s: Sequence[float]) -> None:
        """Count the times between successive outputs of requests."""
        self.inter_token_s.observe_all(gaps_s)

    def refused(self) -> None:
        """Count a request that was turned away."""
        self.num_refused += 1

    def engine_died(self) -> None:
        """Nothing runs any more: the gauges go to zero, counters keep their values."""
        self.engine_up = False
        self.snapshot = msgspec.structs.replace(
            self.snapshot, num_running=0, num_waiting=0, num_blocks_used=0, kv_usage=0.0
        )

    def rates(self) -> Rates:
        """Throughput since the last call (or since this book was opened)."""
        now_s, new, old = self._clock(), self.snapshot, self._marked
        seconds = max(now_s - self._marked_s, 1e-9)
        self._marked, self._marked_s = new, now_s
        queries = new.prefix_queries - old.prefix_queries
        return Rates(
            seconds=seconds,
            prompt_tokens_per_s=(new.prompt_tokens - old.prompt_tokens) / seconds,
            output_tokens_per_s=(new.output_tokens - old.output_tokens) / seconds,
            prefix_hit_share=(new.prefix_hits - old.prefix_hits) / queries if queries else None,
        )

    @property
    def has_news(self) -> bool:
        """True while there is work, or there was some since the last call of `rates`."""
        new, old = self.snapshot, self._marked
        moved = (new.prompt_tokens, new.output_tokens) != (old.prompt_tokens, old.output_tokens)
        return bool(new.num_running or new.num_waiting or moved)

    def summary(self) -> str:
        """One line for the log: what runs, how fast, how full."""
        rates, s = self.rates(), self.snapshot
        hits = "" if rates.prefix_hit_share is None else f", prefix hits {rates.prefix_hit_share:.0%}"
        return (
            f"running {s.num_running}, waiting {s.num_waiting}, prompt {rates.prompt_tokens_per_s:.1f} tok/s, "
            f"generation {rates.output_tokens_per_s:.1f} tok/s, KV {s.kv_usage:.1%}{hits}"
        )


def _span(histogram: Histogram, start_s: float, end_s: float) -> None:
    """Count the time between two moments, if both happened."""
    if start_s and end_s:
        histogram.observe(max(0.0, end_s - start_s))
