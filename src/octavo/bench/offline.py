"""Offline figures: one batch at a time (latency), and many requests at once (throughput), through the Python class.

Promises: every prompt is new, so that a prefix cache answers nothing; times come from the engine's own clock where
it has them, wall time is taken outside.
Does not know: how an engine is made; it needs `generate` alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from octavo.base.errors import ServerError
from octavo.base.outputs import RequestOutput, RequestTimes
from octavo.base.params import SamplingParams
from octavo.bench.report import Spread, spread, spread_table
from octavo.bench.workloads import IdRange, Item, random_prompts

Clock = Callable[[], float]


class Generates(Protocol):
    """What is measured: `entrypoints.llm.LLM`."""

    def generate(
        self, prompts: list[Mapping[str, Any] | str], sampling_params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        """One output for each prompt."""


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a latency measurement; lengths in tokens."""

    input_len: int
    output_len: int
    batch_size: int
    iterations: int
    warmups: int  # batches before those that count
    ids: IdRange
    seed: int = 0


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds over the iterations, each one batch: until all have their first token, and so on."""

    work: Batches
    prefill_s: Spread  # from the call to the first token of the last request
    tpot_s: Spread  # of every request, the mean time of one further token
    e2e_s: Spread  # of one batch
    decode_tok_s: float  # tokens per second and batch after the first
    prefill_tok_s: float


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one run, rates per second of wall time."""

    num_ok: int
    num_failed: int
    wall_s: float
    request_rate: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    prompt_tok_s: float
    output_tok_s: float
    total_tok_s: float
    e2e_s: Spread
    errors: dict[str, int] = {}


def latency(engine: Generates, work: Batches, *, clock: Clock = time.perf_counter) -> Latency:
    """Run batches one after the other; the first `warmups` do not count. Raises `ServerError` when a request fails."""
    prefill, tpot, whole = [], [], []
    for i in range(work.warmups + work.iterations):
        items = random_prompts(
            work.batch_size,
            input_len=work.input_len,
            output_len=work.output_len,
            seed=work.seed * 1_000_003 + i,
            ids=work.ids,
        )
        start = clock()
        outputs = _generate(engine, items, ignore_eos=True)
        seconds = clock() - start
        if failed := [o.error for o in outputs if o.error is not None]:
            raise ServerError(f"{len(failed)} of {len(outputs)} requests of a batch failed: {failed[0]}")
        if i < work.warmups:
            continue
        whole.append(seconds)
        times = [o.times for o in outputs if o.times is not None]
        if times:
            prefill.append(max(t.first_token_s for t in times) - min(t.arrived_s for t in times))
        tpot += [per_token_s(t, work.output_len) for t in times if work.output_len > 1]
    prefill_s, tpot_s = spread(prefill), spread(tpot)
    return Latency(
        work=work,
        prefill_s=prefill_s,
        tpot_s=tpot_s,
        e2e_s=spread(whole),
        decode_tok_s=work.batch_size / tpot_s.mean if tpot_s.mean else 0.0,
        prefill_tok_s=work.batch_size * work.input_len / prefill_s.mean if prefill_s.mean else 0.0,
    )


def per_token_s(times: RequestTimes, num_tokens: int) -> float:
    """The mean time of a token after the first."""
    return (times.finished_s - times.first_token_s) / (num_tokens - 1)


def throughput(
    engine: Generates, items: Sequence[Item], *, ignore_eos: bool = True, clock: Clock = time.perf_counter
) -> Throughput:
    """Give all items at once and wait for the last."""
    start = clock()
    outputs = _generate(engine, items, ignore_eos=ignore_eos)
    wall_s = clock() - start
    good = [o for o in outputs if o.error is None]
    errors: dict[str, int] = {}
    for output in outputs:
        if output.error is not None:
            errors[output.error] = errors.get(output.error, 0) + 1
    prompt_tokens, output_tokens = sum(len(o.prompt_token_ids) for o in good), sum(o.num_output_tokens for o in good)
    return Throughput(
        num_ok=len(good),
        num_failed=len(outputs) - len(good),
        wall_s=wall_s,
        request_rate=len(good) / wall_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(o.num_cached_tokens for o in good),
        prompt_tok_s=prompt_tokens / wall_s,
        output_tok_s=output_tokens / wall_s,
        total_tok_s=(prompt_tokens + output_tokens) / wall_s,
        e2e_s=spread([o.times.finished_s - o.times.arrived_s for o in good if o.times is not None]),
        errors=errors,
    )


def _generate(engine: Generates, items: Sequence[Item], *, ignore_eos: bool) -> list[RequestOutput]:
    prompts: list[Mapping[str, Any] | str] = [
        item.prompt if isinstance(item.prompt, str) else {"prompt_token_ids": list(item.prompt)} for item in items
    ]
    params = [SamplingParams(max_tokens=item.max_tokens, temperature=0.0, ignore_eos=ignore_eos) for item in items]
    return engine.generate(prompts, params, use_tqdm=False)


def latency_table(found: Latency) -> str:
    """The figures for people."""
    f, w = found, found.work
    lines = [
        f"{w.iterations} batches of {w.batch_size}, {w.input_len} tokens in, {w.output_len} out, after {w.warmups} to warm up",
        f"prefill       {f.prefill_tok_s:10.1f} tokens per s",
        f"decode        {f.decode_tok_s:10.1f} tokens per s",
        *spread_table({"prefill": f.prefill_s, "TPOT": f.tpot_s, "E2E": f.e2e_s}),
    ]
    return "\n".join(lines)


def throughput_table(found: Throughput) -> str:
    """The figures for people."""
    f = found
    lines = [
        f"{f.num_ok} of {f.num_ok + f.num_failed} requests answered in {f.wall_s:.2f} s",
        f"requests      {f.request_rate:10.2f} per s",
        f"prompt        {f.prompt_tok_s:10.1f} tokens per s  ({f.prompt_tokens:,} tokens, {f.cached_tokens:,} cached)",
        f"output        {f.output_tok_s:10.1f} tokens per s  ({f.output_tokens:,} tokens)",
        f"together      {f.total_tok_s:10.1f} tokens per s",
        *spread_table({"E2E": f.e2e_s}),
    ]
    lines += [f"FAILED: {count} x {error}" for error, count in f.errors.items()]
    return "\n".join(lines)
