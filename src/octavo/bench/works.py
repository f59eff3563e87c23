"""The works of the comparison, W1 to W7: what is sent to a server, and which figures come out (OPS-9).

Promises: every engine gets the same token ids in the same order, new ones in each round, so that no engine's prefix
cache holds anything but what a work shares on purpose; a run in which a request failed or stopped early gives no
figure.
Does not know: engines, processes, or what a figure is compared with.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from octavo.base.errors import ServerError
from octavo.bench.peers.api import ServerNeed
from octavo.bench.report import itl_s, percentile, tpot_s, ttft_s
from octavo.bench.samples import LoadResult, Sample
from octavo.bench.workloads import Item, Workload, poisson, random_prompts, shared_prefix

REPEATS = 3  # of the works of one request, in each round
BATCH = 32
LOADS = (0.60, 0.95)  # W5's shares of the best peer's capacity
CAPACITY = "capacity"  # the closed loop that W5's rates come from; not a work of its own
CAPACITY_REQUESTS = 96

# Decoding of one stream, prefill of one prompt, start: a server for one request at a time.
SINGLE = ServerNeed(slots=1, tokens_per_slot=2304)
MANY = ServerNeed(slots=BATCH, tokens_per_slot=512)
SHARING = ServerNeed(slots=BATCH, tokens_per_slot=1280, shared_tokens=1024)

Sender = Callable[[Workload], LoadResult]


class RunFailed(ServerError):
    """A run gave no figure."""


class WorkMetric(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a work. `scale` turns the stored value into `unit`."""

    key: str
    title: str
    unit: str
    higher_is_better: bool
    scale: float = 1.0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a work gave: values by figure's key, several where a work repeats, and the runs behind them."""

    values: Mapping[str, tuple[float, ...]]
    runs: tuple[LoadResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A work: the server it needs, its figures, and how it is run.

    `run(send, seed, rate)` sends workloads and reads the samples; `rate` (requests per second) is the best peer's
    capacity, for W5 alone. None: it is read off a server's start. W7 is W2 while the comparison watches from outside.
    """

    name: str
    title: str
    need: ServerNeed
    figures: tuple[WorkMetric, ...]
    run: Callable[[Sender, int, float], Measured] | None


def warm_up(send: Sender, work: Work, seed: int) -> None:
    """A few requests of the work's shape with other prompts, so that nothing is done for the first time later."""
    if work.need is SINGLE:
        length, num = (2048 if work.name == "W3" else 128), 1
    else:
        length, num = 256, 4
    items = random_prompts(num, input_len=length, output_len=8, seed=seed)
    checked(send(Workload(name=f"{work.name} warm-up", items=items, concurrency=num)))


def checked(result: LoadResult) -> LoadResult:
    """The result, when every request was answered; raises `RunFailed` naming the first error."""
    errors = [sample.error for sample in result.samples if sample.error is not None]
    if errors:
        raise RunFailed(f"{len(errors)} of {len(result.samples)} requests failed, the first with: {errors[0]:.300}")
    return result


def _sent(send: Sender, name: str, items: tuple[Item, ...], concurrency: int | None) -> LoadResult:
    """Send, and see that every answer has as many tokens as were asked for."""
    result = checked(send(Workload(name=name, items=items, concurrency=concurrency)))
    for item, sample in zip(items, result.samples, strict=True):
        if not sample.counted and sample.output_tokens != item.max_tokens:
            raise RunFailed(f"a request for {item.max_tokens} tokens got {sample.output_tokens}")
        if sample.prompt_tokens is not None and sample.prompt_tokens != len(item.prompt):
            raise RunFailed(f"a prompt of {len(item.prompt)} tokens was taken as {sample.prompt_tokens}")
    return result


def _one_by_one(send: Sender, name: str, seed: int, *, input_len: int, output_len: int) -> tuple[LoadResult, ...]:
    items = random_prompts(REPEATS, input_len=input_len, output_len=output_len, seed=seed)
    return tuple(_sent(send, name, (item,), 1) for item in items)


def _decode(send: Sender, seed: int, _: float) -> Measured:
    runs = _one_by_one(send, "W1", seed, input_len=128, output_len=128)
    samples = [run.samples[0] for run in runs]
    tpots = [value for sample in samples if (value := tpot_s(sample))]
    return Measured(
        values={
            "decode_tok_s": tuple(1 / value for value in tpots),
            "request_tok_s": tuple(s.output_tokens / (s.end_s - s.start_s) for s in samples),
        },
        runs=runs,
    )


def _throughput(send: Sender, seed: int, _: float) -> Measured:
    items = random_prompts(BATCH, input_len=256, output_len=128, seed=seed)
    run = _sent(send, "W2", items, BATCH)
    return Measured(values={"output_tok_s": (sum(s.output_tokens for s in run.samples) / run.wall_s,)}, runs=(run,))


def _prefill(send: Sender, seed: int, _: float) -> Measured:
    runs = _one_by_one(send, "W3", seed, input_len=2048, output_len=1)
    return Measured(values={"prompt_tok_s": tuple(2048 / _first(run.samples[0]) for run in runs)}, runs=runs)


def _shared(send: Sender, seed: int, _: float) -> Measured:
    items = shared_prefix(BATCH, prefix_len=1024, input_len=32, output_len=64, seed=seed)
    run = _sent(send, "W4", items, BATCH)
    return Measured(values={"wall_s": (run.wall_s,)}, runs=(run,))


def open_loop(num: int) -> Callable[[Sender, int, float], Measured]:
    """W5 with `num` requests at each of the two rates."""

    def run(send: Sender, seed: int, rate: float) -> Measured:
        values: dict[str, tuple[float, ...]] = {}
        runs = []
        for share in LOADS:
            items = random_prompts(num, input_len=256, output_len=64, seed=seed + round(share * 100))
            result = _sent(send, f"W5 at {share:.0%}", poisson(items, rate * share, seed), None)
            firsts = [_first(sample) for sample in result.samples]
            gaps = [gap for sample in result.samples for gap in itl_s(sample)]
            values[f"ttft_p99_{share:.0%}"] = (percentile(sorted(firsts), 0.99),)
            values[f"itl_p99_{share:.0%}"] = (percentile(sorted(gaps), 0.99),)
            runs.append(result)
        return Measured(values=values, runs=tuple(runs))

    return run


def capacity(send: Sender, seed: int) -> Measured:
    """Requests a second of W5's shape with all slots busy: the rate at which a queue would grow without end."""
    items = random_prompts(CAPACITY_REQUESTS, input_len=256, output_len=64, seed=seed)
    run = _sent(send, CAPACITY, items, BATCH)
    return Measured(values={"requests_s": (len(items) / run.wall_s,)}, runs=(run,))


def first_light(send: Sender) -> LoadResult:
    """W6's request: the first token a new server can give."""
    return _sent(send, "W6", random_prompts(1, input_len=8, output_len=2), 1)


def _first(sample: Sample) -> float:
    """Time to the first token; to the end where no token had text of its own (half a character, say)."""
    value = ttft_s(sample)
    return sample.end_s - sample.start_s if value is None else value


def _latency(key: str, title: str) -> WorkMetric:
    return WorkMetric(key=key, title=title, unit="ms", higher_is_better=False, scale=1000)


def _rate(key: str, title: str) -> WorkMetric:
    return WorkMetric(key=key, title=title, unit="tok/s", higher_is_better=True)


def works(num_open_loop: int) -> dict[str, Work]:
    """Every work by name, in the order in which a server runs them."""
    tails = tuple(
        _latency(f"{kind}_p99_{share:.0%}", f"{title} p99 at {share:.0%}")
        for share in LOADS
        for kind, title in (("ttft", "first token"), ("itl", "inter-token"))
    )
    start = WorkMetric(key="start_s", title="command to first token", unit="s", higher_is_better=False)
    peak = WorkMetric(key="peak_bytes", title="peak memory in W2", unit="MiB", higher_is_better=False, scale=1 / 2**20)
    wall = WorkMetric(key="wall_s", title="32 x (1024 shared + 32) in, 64 out", unit="s", higher_is_better=False)
    rows = (
        Work(name="W6", title="start", need=SINGLE, figures=(start,), run=None),
        Work(
            name="W1",
            title="one stream, 128 in, 128 out",
            need=SINGLE,
            figures=(_rate("decode_tok_s", "one stream, decode"), _rate("request_tok_s", "one stream, whole request")),
            run=_decode,
        ),
        Work(
            name="W3",
            title="one prompt of 2,048",
            need=SINGLE,
            figures=(_rate("prompt_tok_s", "one prompt of 2,048"),),
            run=_prefill,
        ),
        Work(name="W7", title="memory", need=MANY, figures=(peak,), run=_throughput),
        Work(
            name="W2",
            title="32 at once, 256 in, 128 out",
            need=MANY,
            figures=(_rate("output_tok_s", "32 at once, output"),),
            run=_throughput,
        ),
        Work(name="W5", title="open loop, 256 in, 64 out", need=MANY, figures=tails, run=open_loop(num_open_loop)),
        Work(name="W4", title="shared prefix", need=SHARING, figures=(wall,), run=_shared),
    )
    return {work.name: work for work in rows}


def median_of(values: Mapping[str, tuple[float, ...]], key: str) -> float | None:
    """One value for a run: the median of its repeats."""
    found = values.get(key, ())
    return statistics.median(found) if found else None
