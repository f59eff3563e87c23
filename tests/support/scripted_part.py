"""A data part that writes down every hook, and can delay, fail and mask on request."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from octavo.base.step import NewRow, PlanPart, ResultPart, StepPlan
from octavo.sampling.sampler import Mask
from octavo.worker.batch import InputBatch
from octavo.worker.memory import KVMemory


class ForbidPlan(PlanPart, frozen=True):
    """Tokens that no row may get in this step."""

    tokens: tuple[int, ...] = ()


class HeardReport(ResultPart, frozen=True):
    """How many hooks were called so far."""

    hooks: int = 0


class ScriptedPart:
    """Owns: what it heard."""

    name = "scripted"

    def __init__(self, *, watches_layers: bool = True, fail_at: str = "") -> None:
        self.watches_layers = watches_layers
        self.layered = True  # in the next steps
        self.heard: list[Any] = []
        self._fail_at = fail_at

    def _hear(self, *what: Any) -> None:
        self.heard.append(what if len(what) > 1 else what[0])
        if what[0] == self._fail_at:
            raise ValueError(f"scripted failure at {what[0]}")

    def bind(self, memory: KVMemory) -> None:
        self._hear("bind")

    def enter(self, row: NewRow) -> None:
        self._hear("enter", row.slot)

    def leave(self, slot: int) -> None:
        self._hear("leave", slot)

    def prepare(self, plan: StepPlan, batch: InputBatch) -> None:
        self._hear("prepare", plan.seq, batch.num_rows)

    def calls(self) -> dict[str, Any]:
        return {"heard": lambda: len(self.heard)}

    def handshake(self) -> dict[str, Any]:
        return {"heard": len(self.heard)}

    def wants_layers(self) -> bool:
        return self.watches_layers and self.layered

    def before_layer(self, layer: int) -> None:
        self._hear("before_layer", layer)

    def after_layer(self, layer: int) -> None:
        self._hear("after_layer", layer)

    def after_forward(self, batch: InputBatch, hidden: Tensor) -> None:
        self._hear("after_forward", hidden.shape[0])

    def mask(self, plan: StepPlan, batch: InputBatch, late: Sequence[PlanPart]) -> Mask | None:
        self._hear("mask", len(late))
        banned = [t for part in late if isinstance(part, ForbidPlan) for t in part.tokens]
        if not banned:
            return None

        def forbid(logits: Tensor) -> None:
            logits[:, banned] = -float("inf")

        return forbid

    def report(self) -> ResultPart | None:
        return HeardReport(len(self.heard))

    def close(self) -> None:
        self._hear("close")
