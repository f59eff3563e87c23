"""The only language between scheduler and worker: one plan down, one result up.

Promises: frozen; per-row data are read-only numpy arrays, not objects; features add parts, never fields.
Does not know: tensors, text, or who executes the plan.

Words: a *row* is a request's line in this step's batch; a *slot* is its fixed place in the
worker's tables, given by the scheduler when the request starts running and taken back when it
finishes or is preempted. Row order is the order of `BatchPlan.slots`.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.base.params import SamplingParams

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Ragged(msgspec.Struct, frozen=True):
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]` (CSR form)."""

    offsets: Ints  # [rows + 1], starts at 0
    values: Ints  # [offsets[-1]]

    def row(self, i: int) -> Ints:
        """Row `i` as a view."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1


def ragged(rows: "list[list[int]] | list[tuple[int, ...]]") -> Ragged:
    """Build a `Ragged` from lists."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(r) for r in rows], out=offsets[1:])
    values = np.fromiter((v for r in rows for v in r), dtype=np.int32, count=int(offsets[-1]))
    return Ragged(offsets, values)


class PlanPart(msgspec.Struct, frozen=True, tag=True):
    """One feature's share of a plan. Features subclass it; `base` does not grow."""


class ResultPart(msgspec.Struct, frozen=True, tag=True):
    """One feature's share of a result."""


if TYPE_CHECKING:
    PlanParts = tuple[PlanPart, ...]
    ResultParts = tuple[ResultPart, ...]
else:  # decoded loosely; `base.codec` revives them by tag, so that features can add their own
    PlanParts = ResultParts = tuple[Any, ...]


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that enters (or re-enters) a slot in this step.

    `tokens` are all tokens known so far, prompt first; after a preemption they include outputs.
    Its blocks come through `BatchPlan.new_blocks` like everybody's (the first append to an empty table).
    """

    slot: int
    request_id: str
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    sample_index: int = 0
    resumed: bool = False


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens run in this step; one entry a row in every array.

    Row i computes positions `num_computed_tokens[i] .. num_computed_tokens[i] + num_scheduled_tokens[i] - 1` of its request.
    `num_sampled_tokens[i]` is how many tokens it yields: 0 for a prompt chunk that is not the last, else 1
    (plus up to `num_draft_tokens[i]` with speculation).
    `new_blocks[g].row(i)` is appended to the row's block table of KV group g.
    """

    new: tuple[NewRow, ...]
    slots: Ints
    num_computed_tokens: Ints
    num_scheduled_tokens: Ints
    num_sampled_tokens: Ints
    num_draft_tokens: Ints
    new_blocks: tuple[Ragged, ...]
    blocks_to_zero: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of requests in the batch."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed in this step."""
        return int(self.num_scheduled_tokens.sum())


P = TypeVar("P", bound=PlanPart)
R = TypeVar("R", bound=ResultPart)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one step will do. Order for the worker: drop `finished` and `preempted`, then enter `batch.new`.

    `finished` and `preempted` are slots; a slot freed here may be given to a new row in the same plan.
    `late` names the part types that follow through the step handle before sampling.
    A plan without rows still carries parts, so that transfers move while nothing runs.
    """

    seq: int
    batch: BatchPlan
    finished: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    parts: PlanParts = ()
    late: tuple[str, ...] = ()

    def part(self, kind: type[P]) -> P | None:
        """The part of this type, if the plan has one."""
        return next((p for p in self.parts if isinstance(p, kind)), None)


class LogprobArrays(msgspec.Struct, frozen=True):
    """Log-probabilities of sampled tokens, one line a sampled token in row order.

    Column 0 is the chosen token; columns 1.. are the top-k in falling order. `width[i]` columns of
    line i are meant (0: this row asked for none), since rows ask for different k.
    """

    token_ids: Ints  # [lines, 1 + k]
    logprobs: Floats  # [lines, 1 + k]
    ranks: Ints  # [lines], rank of the chosen token, 1 is the most likely
    width: Ints  # [lines], 0 or 1 + this row's k


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens at positions `start ..` of the request in `slot`.

    Line j scores the prompt token at position `start + j` given everything before it; `start` is at least 1.
    """

    slot: int
    start: int
    token_ids: Ints  # [lines, 1 + k], column 0 is the prompt's own token
    logprobs: Floats
    ranks: Ints


class RowError(msgspec.Struct, frozen=True):
    """This row failed in this step; its request ends with an error, the others go on."""

    row: int
    message: str


class StepTimings(msgspec.Struct, frozen=True):
    """Seconds spent by the worker, by stage."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came back from step `seq`; `tokens.row(i)` are the ids sampled for row i of the plan."""

    seq: int
    tokens: Ragged
    logprobs: LogprobArrays | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    drafts: Ragged | None = None
    errors: tuple[RowError, ...] = ()
    parts: ResultParts = ()
    timings: StepTimings = StepTimings()

    def part(self, kind: type[R]) -> R | None:
        """The part of this type, if the result has one."""
        return next((p for p in self.parts if isinstance(p, kind)), None)


def empty_batch(num_groups: int) -> BatchPlan:
    """A batch without rows, for plans that only move transfers or finish requests."""
    none = np.zeros(0, dtype=np.int32)
    empty = Ragged(np.zeros(1, dtype=np.int32), none)
    return BatchPlan(
        new=(),
        slots=none,
        num_computed_tokens=none,
        num_scheduled_tokens=none,
        num_sampled_tokens=none,
        num_draft_tokens=none,
        new_blocks=(empty,) * num_groups,
    )


def as_ints(values: Any) -> Ints:
    """A read-only int32 array."""
    out = np.asarray(values, dtype=np.int32)
    out.flags.writeable = False
    return out
