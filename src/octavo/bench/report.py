"""From samples to figures: percentiles, throughput, goodput, as JSON and as a table (OPS-8).

Promises: failed requests are counted and shown with their errors, and their times are in no percentile.
Does not know: how samples were taken.

Definitions. TTFT: from sending a request to its first token. TPOT: the mean time of one further token, (last token -
first token) / (tokens - 1), one value a request. ITL: each time between two events of one stream. E2E: from sending
to the end of the answer. Goodput: requests a second that met every target.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from octavo.base.errors import ConfigError
from octavo.bench.samples import ClientCost, LoadResult, Sample

MAX_ERRORS_SHOWN = 5


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Values in seconds, summed up. All are 0 when there are none; look at `num`."""

    num: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    min: float = 0.0
    max: float = 0.0


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must keep to count as good: seconds; None asks nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None  # the longest gap of the stream
    e2e_s: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run. Rates count answers that came whole, over the run's wall time."""

    name: str
    num_ok: int
    num_failed: int
    wall_s: float
    request_rate: float  # whole answers a second
    prompt_tok_s: float
    output_tok_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_s: Spread
    tpot_s: Spread
    itl_s: Spread
    e2e_s: Spread
    goal: Goal | None = None
    num_good: int | None = None
    goodput: float | None = None  # requests a second that met the goal
    errors: dict[str, int] = {}  # message -> how often
    client: ClientCost = ClientCost()
    ceiling_chunks_s: float | None = None  # what the client could take on one core
    counted_tokens: bool = False  # some server gave no usage: events were counted as tokens


def parse_goal(pairs: Sequence[str]) -> Goal:
    """A goal from words such as `ttft:500` and `tpot:50`, in milliseconds; raises `ConfigError`."""
    names = ("ttft", "tpot", "itl", "e2e")
    found: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = math.nan
        if name not in names or not limit_ms > 0 or math.isinf(limit_ms):
            raise ConfigError(
                f"--goodput takes NAME:MILLISECONDS with NAME one of {', '.join(names)}, such as ttft:500, got {pair!r}."
            )
        found[f"{name}_s"] = limit_ms / 1000
    return Goal(**found)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the sorted values lie, with linear interpolation between neighbours."""
    at = (len(ordered) - 1) * share
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float]) -> Spread:
    """Mean, percentiles and extremes of any values."""
    if not values:
        return Spread()
    ordered = sorted(values)
    return Spread(
        num=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        min=ordered[0],
        max=ordered[-1],
    )


def ttft_s(sample: Sample) -> float | None:
    """Time to the first token; None when none came."""
    return None if sample.first_token_s is None else sample.first_token_s - sample.start_s


def tpot_s(sample: Sample) -> float | None:
    """Mean time of one token after the first; None below two tokens."""
    if sample.first_token_s is None or sample.output_tokens < 2 or len(sample.token_times) < 2:
        return None
    return (sample.token_times[-1] - sample.first_token_s) / (sample.output_tokens - 1)


def itl_s(sample: Sample) -> list[float]:
    """The times between the events of one stream."""
    return [b - a for a, b in pairwise(sample.token_times)]


def meets(sample: Sample, goal: Goal) -> bool:
    """True when the answer came whole and within every limit; what was not observed breaks no limit but TTFT's."""
    if not sample.ok:
        return False
    first = ttft_s(sample)
    checks = (
        (goal.ttft_s, math.inf if first is None else first),
        (goal.tpot_s, tpot_s(sample)),
        (goal.itl_s, max(itl_s(sample), default=None)),
        (goal.e2e_s, sample.end_s - sample.start_s),
    )
    return all(limit is None or value is None or value <= limit for limit, value in checks)


def summarize(result: LoadResult, goal: Goal | None = None, *, ceiling_chunks_s: float | None = None) -> Summary:
    """The figures of a run."""
    good = [s for s in result.samples if s.ok]
    wall_s = result.wall_s or math.inf
    prompt_tokens, output_tokens = sum(s.prompt_tokens or 0 for s in good), sum(s.output_tokens for s in good)
    num_good = None if goal is None else sum(meets(s, goal) for s in good)
    return Summary(
        name=result.name,
        num_ok=len(good),
        num_failed=len(result.samples) - len(good),
        wall_s=result.wall_s,
        request_rate=len(good) / wall_s,
        prompt_tok_s=prompt_tokens / wall_s,
        output_tok_s=output_tokens / wall_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(s.cached_tokens or 0 for s in good),
        ttft_s=spread([v for s in good if (v := ttft_s(s)) is not None]),
        tpot_s=spread([v for s in good if (v := tpot_s(s)) is not None]),
        itl_s=spread([v for s in good for v in itl_s(s)]),
        e2e_s=spread([s.end_s - s.start_s for s in good]),
        goal=goal,
        num_good=num_good,
        goodput=None if num_good is None else num_good / wall_s,
        errors=dict(Counter(s.error for s in result.samples if s.error is not None).most_common()),
        client=result.client,
        ceiling_chunks_s=ceiling_chunks_s,
        counted_tokens=any(s.counted for s in good),
    )


def as_json(summary: Summary, result: LoadResult | None = None, **about: Any) -> dict[str, Any]:
    """Plain values: what the run was (`about`), its figures in seconds, and with `result` every request."""
    found: dict[str, Any] = {**about, "summary": msgspec.to_builtins(summary)}
    found["summary"]["client"]["cpu_s_per_chunk"] = summary.client.cpu_s_per_chunk
    if result is not None:
        found["requests"] = [
            msgspec.to_builtins(msgspec.structs.asdict(s) | {"token_times": list(s.token_times)})
            for s in result.samples
        ]
    return found


def as_table(summary: Summary) -> str:
    """The figures for people; times in milliseconds."""
    s = summary
    lines = [
        f"{s.name}: {s.num_ok} of {s.num_ok + s.num_failed} requests answered in {s.wall_s:.2f} s",
        f"requests      {s.request_rate:10.2f} per s",
        f"prompt        {s.prompt_tok_s:10.1f} tokens per s  ({s.prompt_tokens:,} tokens, {s.cached_tokens:,} cached)",
        f"output        {s.output_tok_s:10.1f} tokens per s  ({s.output_tokens:,} tokens"
        + (", events counted: the server gives no usage)" if s.counted_tokens else ")"),
    ]
    lines += spread_table({"TTFT": s.ttft_s, "TPOT": s.tpot_s, "ITL": s.itl_s, "E2E": s.e2e_s})
    if s.goal is not None:
        lines.append(f"goodput       {s.goodput or 0:10.2f} per s  ({s.num_good} requests met {_goal_text(s.goal)})")
    lines += _client_lines(s)
    if s.num_failed:
        lines.append(f"FAILED: {s.num_failed} requests")
        lines += [f"  {count} x {error}" for error, count in list(s.errors.items())[:MAX_ERRORS_SHOWN]]
        if len(s.errors) > MAX_ERRORS_SHOWN:
            lines.append(f"  and {len(s.errors) - MAX_ERRORS_SHOWN} other errors (--output-json has them all)")
    return "\n".join(lines)


def spread_table(rows: Mapping[str, Spread]) -> list[str]:
    """One line for each spread, in milliseconds, under a line of headings."""
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    lines = [f"{'ms':<8}" + "".join(f"{n:>11}" for n in names)]
    for title, values in rows.items():
        cells = (f"{getattr(values, n) * 1000:11.2f}" if values.num else f"{'-':>11}" for n in names)
        lines.append(f"{title:<8}" + "".join(cells))
    return lines


def _goal_text(goal: Goal) -> str:
    limits = {n.removesuffix("_s"): v for n, v in msgspec.structs.asdict(goal).items() if v is not None}
    return ", ".join(f"{name} <= {limit * 1000:g} ms" for name, limit in limits.items()) or "no target"


def _client_lines(s: Summary) -> list[str]:
    c = s.client
    if not c.num_chunks:
        return []
    rate, busy = (c.num_chunks / s.wall_s, c.cpu_s / s.wall_s) if s.wall_s else (0.0, 0.0)
    text = f"client        {rate:10.0f} events per s on {busy:.1%} of a core"
    if s.ceiling_chunks_s:
        text += f"; it could take {s.ceiling_chunks_s:,.0f} per s on one"
    late = f"event loop late by {c.max_lag_s * 1000:.1f} ms at most, sends by {c.max_late_s * 1000:.1f} ms"
    return [text, f"{'':14}{late}"]
