"""One step in ten stages, none of which names a feature.

Promises: the stages run in the order written; a failure that belongs to one row is a `RowError`; anything else
that is raised means the step, and the worker with it, cannot go on.
Does not know: who made the plan, which features are installed, or on which thread it runs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.attention.api import MetadataBuilder
from octavo.base.step import PlanPart, Ragged, ResultPart, RowError, StepPlan, StepResult, StepTimings, as_ints
from octavo.forward.context import ForwardContext, GroupPlan, LayerTable
from octavo.worker.batch import InputBatch, InputBatcher
from octavo.worker.choose import Chosen, SampleChooser
from octavo.worker.memory import KVMemory
from octavo.worker.seams import DataPart, Drafter, ForwardRunner, LateParts, WorkerModel
from octavo.worker.table import RequestTable


class ContextBuilder:
    """Makes each step's forward context (EXE-19).

    Owns: nothing.
    """

    def __init__(self, builders: Sequence[MetadataBuilder], layers: LayerTable) -> None:
        self._builders = tuple(builders)
        self._layers = layers

    def build(self, batch: InputBatch) -> ForwardContext:
        """The backend's plan and the slots of every group."""
        groups = tuple(
            GroupPlan(plan=builder.plan(group), slot_mapping=slots)
            for builder, group, slots in zip(self._builders, batch.groups, batch.slot_mappings, strict=True)
        )
        return ForwardContext(shape=batch.shape, groups=groups, layers=self._layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What a runner is composed of."""

    model: WorkerModel
    memory: KVMemory
    table: RequestTable
    batcher: InputBatcher
    contexts: ContextBuilder
    forward: ForwardRunner
    chooser: SampleChooser
    drafter: Drafter
    parts: tuple[DataPart, ...] = ()


class ModelRunner:
    """Runs plans on the model.

    Owns: nothing of its own; `RequestTable` and `SampleChooser` hold what lasts from step to step.
    """

    def __init__(self, made_of: RunnerParts, clock: Callable[[], float] = time.perf_counter) -> None:
        self._of = made_of
        self._clock = clock

    def step(self, plan: StepPlan, late: LateParts) -> StepResult:
        """Compute the plan. Waits for its late parts after the forward pass, before sampling."""
        of, began = self._of, self._clock()
        failed = of.table.apply(plan, of.memory.zero)  # 1
        batch = of.batcher.build(plan.batch, of.table)  # 2
        for part in of.parts:  # 3
            part.prepare(plan, batch)
        if not batch.num_rows:
            return self._without_rows(plan, late)
        context = of.contexts.build(batch)  # 4
        prepared = self._clock()
        hidden = of.forward.run(of.model, batch, context)  # 5
        for part in of.parts:  # 6
            part.after_forward(batch, hidden)
        forwarded = self._clock()
        arrived = late.wait(plan.late) if plan.late else ()  # 7
        waited = self._clock()
        masks = self._masks(plan, batch, arrived)
        chosen = of.chooser.choose(of.model, hidden, batch, of.table, masks, failed)  # 8
        drafts = of.drafter.propose(batch, hidden, chosen.tokens)  # 9
        timings = StepTimings(prepared - began, forwarded - prepared, self._clock() - waited)
        return self._result(plan, chosen, drafts, failed, timings)  # 10

    def _masks(self, plan: StepPlan, batch: InputBatch, arrived: Sequence[PlanPart]) -> "list[Callable[..., None]]":
        return [mask for part in self._of.parts if (mask := part.mask(plan, batch, arrived)) is not None]

    def _without_rows(self, plan: StepPlan, late: LateParts) -> StepResult:
        """A plan that only moves transfers or frees slots; its late parts are taken off the handle all the same."""
        if plan.late:
            late.wait(plan.late)
        empty = Ragged(as_ints([0]), as_ints([]))
        return StepResult(seq=plan.seq, tokens=empty, parts=self._reports())

    def _reports(self) -> tuple[ResultPart, ...]:
        return tuple(report for part in self._of.parts if (report := part.report()) is not None)

    def _result(
        self, plan: StepPlan, chosen: Chosen, drafts: Ragged | None, failed: tuple[RowError, ...], timings: StepTimings
    ) -> StepResult:
        return StepResult(
            seq=plan.seq,
            tokens=chosen.tokens,
            logprobs=chosen.logprobs,
            prompt_logprobs=chosen.prompt_logprobs,
            drafts=drafts,
            errors=failed + chosen.errors,
            parts=self._reports(),
            timings=timings,
        )
