"""Plans that nobody asked for: to measure a step, and to warm up.

Promises: they use slots and blocks from the first on, and a last plan frees the slots.
Does not know: what is measured.
"""

from collections.abc import Sequence

from octavo.base.kvspec import KVLayout
from octavo.base.params import SamplingParams
from octavo.base.step import BatchPlan, NewRow, StepPlan, as_ints, empty_batch, ragged


def prompt_plan(layout: KVLayout, lengths: Sequence[int], sampling: SamplingParams) -> StepPlan:
    """Compute whole prompts of these lengths, one a slot, each with blocks of its own."""
    rows = range(len(lengths))
    new = tuple(
        NewRow(
            slot=i,
            request_id=f"dummy-{i}",
            tokens=(0,) * length,
            num_prompt_tokens=length,
            sampling=sampling,
        )
        for i, length in enumerate(lengths)
    )
    return _plan(new, rows, [0] * len(lengths), lengths, first_blocks(layout, lengths))


def decode_plan(layout: KVLayout, lengths: Sequence[int]) -> StepPlan:
    """One further token for each of the rows that `prompt_plan` entered; it needs room in their last blocks."""
    none: list[list[list[int]]] = [[[] for _ in lengths] for _ in layout.groups]
    return _plan((), range(len(lengths)), lengths, [1] * len(lengths), none)


def free_plan(layout: KVLayout, count: int) -> StepPlan:
    """Free the first `count` slots."""
    return StepPlan(seq=0, batch=empty_batch(len(layout.groups)), finished=tuple(range(count)))


def first_blocks(layout: KVLayout, lengths: Sequence[int]) -> list[list[list[int]]]:
    """Blocks from 1 on, by group and row, with room for one token more than the length."""
    out, free = [], 1
    for group in layout.groups:
        rows = []
        for length in lengths:
            count = -(-(length + 1) // group.spec.block_size)
            rows.append(list(range(free, free + count)))
            free += count
        out.append(rows)
    return out


def blocks_used(layout: KVLayout, lengths: Sequence[int]) -> int:
    """How many blocks, the null block included, plans for these lengths touch."""
    return 1 + sum(len(row) for group in first_blocks(layout, lengths) for row in group)


def _plan(
    new: tuple[NewRow, ...],
    slots: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    blocks: list[list[list[int]]],
) -> StepPlan:
    batch = BatchPlan(
        new=new,
        slots=as_ints(list(slots)),
        num_computed_tokens=as_ints(starts),
        num_scheduled_tokens=as_ints(counts),
        num_sampled_tokens=as_ints([1] * len(slots)),
        num_draft_tokens=as_ints([0] * len(slots)),
        new_blocks=tuple(ragged(rows) for rows in blocks),
    )
    return StepPlan(seq=0, batch=batch)
