"""Microseconds per step of the scheduler's bookkeeping: schedule, apply, and encoding of both messages.

    python benchmarks/scheduler.py [--rows 1,16,256] [--block-size 16] [--steps 300]

All requests decode; none ends while it is measured. The result is made beforehand, so that nothing but
bookkeeping is timed. Prints the median and the 90th percentile of each part.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np

from octavo.base.kvspec import FullAttentionSpec
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.base.step import Ragged, StepPlan, StepResult, as_ints
from octavo.kvcache.groups import plan_layout
from octavo.kvcache.hashing import make_hasher
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.apply import ResultApplier
from octavo.scheduler.limits import SchedulerLimits, builtin_constraints
from octavo.scheduler.order import make_order
from octavo.scheduler.scheduler import Scheduler

PROMPT = 100  # tokens


def build(rows: int, block_size: int, steps: int) -> tuple[Scheduler, ResultApplier]:
    """A scheduler with `rows` requests that decode for more than `steps` steps."""
    longest = PROMPT + steps + 100
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_dim=64, dtype="float32")
    layout = plan_layout(
        [spec] * 4,
        budget_bytes=None,
        num_blocks=2 + rows * (longest // block_size + 2),
        max_model_len=longest,
        max_batched_tokens=rows * PROMPT,
    )
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_active_seqs=rows,
        max_num_scheduled_tokens=rows * PROMPT,
        max_num_batched_tokens=rows * PROMPT,
        max_model_len=longest,
    )
    kv = KVCacheManager(
        layout,
        hasher_block_size=block_size,
        enable_prefix_caching=True,
        watermark_blocks=0,
        max_model_len=longest,
        max_batched_tokens=rows * PROMPT,
    )
    scheduler = Scheduler(
        limits=limits,
        kv=kv,
        order=make_order("fcfs", clock=time.monotonic),
        parts=(),
        constraints=builtin_constraints(limits, block_size),
        hasher=make_hasher("sha256"),
        hash_block_size=block_size,
        num_groups=len(layout.groups),
        clock=time.monotonic,
    )
    for i in range(rows):
        prompt = tuple((i * 7919 + j * 31) % 50000 for j in range(PROMPT - i % block_size))
        sampling = SamplingParams(max_tokens=steps + 50, ignore_eos=True)
        scheduler.add(EngineRequest(request_id=f"request-{i}", prompt_token_ids=prompt, sampling=sampling))
    return scheduler, ResultApplier(scheduler)


def result_of(plan: StepPlan) -> StepResult:
    """One token for each row that samples."""
    counts = plan.batch.num_sampled_tokens
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return StepResult(seq=plan.seq, tokens=Ragged(offsets, as_ints(np.full(offsets[-1], plan.seq % 1000))))


def encoder() -> Callable[[object], bytes]:
    """MessagePack with arrays as their bytes, as between processes."""

    def plain(value: object) -> object:
        if isinstance(value, np.ndarray):
            return value.tobytes()
        raise TypeError(type(value).__name__)

    return msgspec.msgpack.Encoder(enc_hook=plain).encode


def measure(rows: int, block_size: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each part, one entry a step."""
    scheduler, applier = build(rows, block_size, steps)
    encode = encoder()
    times: dict[str, list[float]] = {"schedule": [], "apply": [], "messages": [], "all": []}
    for step in range(steps):
        t0 = time.perf_counter()
        plan = scheduler.schedule()
        t1 = time.perf_counter()
        assert plan is not None, "the benchmark ran out of work"
        result = result_of(plan)
        t2 = time.perf_counter()
        outputs = applier.apply(plan, result)
        t3 = time.perf_counter()
        encode(plan)
        encode(outputs)
        t4 = time.perf_counter()
        if step < 20:
            continue  # prompts, and the first rounds of everything
        times["schedule"].append(t1 - t0)
        times["apply"].append(t3 - t2)
        times["messages"].append(t4 - t3)
        times["all"].append(t1 - t0 + t4 - t2)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,256")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    for rows in map(int, args.rows.split(",")):
        print(f"{rows} rows, blocks of {args.block_size}, {args.steps} steps")
        for name, values in measure(rows, args.block_size, args.steps).items():
            p90 = statistics.quantiles(values, n=10)[-1]
            print(f"  {name:9} {statistics.median(values) * 1e6:7.0f} us median {p90 * 1e6:7.0f} us p90")


if __name__ == "__main__":
    main()
