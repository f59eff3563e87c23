"""A scheduler's state in words, for whoever looks into an engine that hangs (OPS-3).

Promises: it reads and changes nothing, takes no lock, and may be called from any thread; it then may raise, where it
meets a change half made. Requests are named by id, never by what they say. Lists are bounded.
Does not know: who reads it.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from octavo.base.step import StepPlan
from octavo.kvcache.manager import KVStats
from octavo.scheduler.request import Request

MAX_ROWS: Final = 64  # of each kind; more are counted


def state_lines(
    running: Sequence[Request], waiting: Sequence[Request], others: int, kv: KVStats, *, paused: bool, now_s: float
) -> list[str]:
    """Who runs, who waits, and the pool. `others`: alive, and in neither."""
    held = f", {others} held by a feature" if others else ""
    lines = [
        f"scheduler: {len(running)} running, {len(waiting)} waiting{held}{', paused' if paused else ''}",
        f"KV pool: {kv.num_free_blocks} of {kv.num_total_blocks} blocks free, {kv.num_cached_blocks} findable; "
        f"{kv.num_requests} requests hold blocks",
    ]
    for word, requests in (("running", running), ("waiting", waiting)):
        lines += [f"  {word}: {_request(req, now_s)}" for req in requests[:MAX_ROWS]]
        if len(requests) > MAX_ROWS:
            lines.append(f"  {word}: {len(requests) - MAX_ROWS} more")
    return lines


def _request(req: Request, now_s: float) -> str:
    slot = "no slot" if req.slot is None else f"slot {req.slot}"
    again = f", preempted {req.num_preemptions} times" if req.num_preemptions else ""
    return (
        f"{req.request_id}: {slot}, {req.num_computed_tokens} of {req.num_tokens} tokens computed "
        f"({req.num_prompt_tokens} of the prompt, ends at {req.max_total_tokens}), {req.num_placeholders} in flight"
        f"{again}, {now_s - req.times.arrived_s:.1f} s old"
    )


def batch_lines(plan: StepPlan, ids: Mapping[int, str]) -> list[str]:
    """The rows of a step; `ids` are the requests in slots now."""
    batch = plan.batch
    parts = ", ".join([*(type(part).__name__ for part in plan.parts), *plan.late])
    names = {**ids, **{row.slot: row.request_id for row in batch.new}}
    lines = [
        f"  batch: {batch.num_rows} rows, {batch.num_tokens} tokens, {len(batch.new)} new rows, "
        f"{len(plan.finished)} finished, {len(plan.preempted)} preempted{', with ' + parts if parts else ''}"
    ]
    columns = (batch.slots, batch.num_computed_tokens, batch.num_scheduled_tokens, batch.num_sampled_tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for slot, start, count, sampled in islice(rows, MAX_ROWS):
        yields = "samples" if sampled else "no sample"
        name = names.get(slot, "a request that is gone")
        lines.append(f"  row: slot {slot}, {name}: positions {start} to {start + count - 1}, {yields}")
    if batch.num_rows > MAX_ROWS:
        lines.append(f"  row: {batch.num_rows - MAX_ROWS} more")
    return lines
