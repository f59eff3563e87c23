"""How features and runners join a step, and the null objects that stand where none is installed.

Promises: a feature needs no edit in `runner.step`; the hooks of one part are called in the order written below.
Does not know: any feature.

Order for a `DataPart`: `bind` once after the memory was allocated -> `handshake` once -> per step: `leave` and `enter` as
slots change, `prepare`, `wants_layers` if the part watches layers, and if it does in this step `before_layer` and
`after_layer` for each layer -> `after_forward`, `mask`, `report` -> `close` once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from octavo.attention.layer import Attention
from octavo.base.step import NewRow, PlanPart, Ragged, ResultPart, StepPlan
from octavo.forward.context import ForwardContext, entered
from octavo.sampling.sampler import Mask
from octavo.worker.batch import InputBatch
from octavo.worker.memory import KVMemory


class WorkerModel(Protocol):
    """What the worker needs of a model, by shape."""

    @property
    def attention_layers(self) -> tuple[Attention, ...]:
        """The attention layers by layer id."""

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, hidden] of tokens [T] int64 at positions [T] int64, inside a forward context."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocabulary] of hidden states [N, hidden]."""


class DataPart(Protocol):
    """The data half of a feature."""

    name: str
    watches_layers: bool  # False keeps every layer's call free of this part, always

    def bind(self, memory: KVMemory) -> None:
        """KV memory exists now."""

    def handshake(self) -> Mapping[str, Any]:
        """What another engine needs to know of this one (layout, types, identity), in plain values; it
        reaches this feature's control half before the first request."""

    def enter(self, row: NewRow) -> None:
        """A request takes a slot. What is raised here fails that request only."""

    def leave(self, slot: int) -> None:
        """The slot's request finished or was preempted."""

    def prepare(self, plan: StepPlan, batch: InputBatch) -> None:
        """The batch was built, nothing was computed. Also called for plans without rows."""

    def wants_layers(self) -> bool:
        """Asked of parts that watch layers: is this one to be called around each layer of this step? A step that nobody
        wants so is run from what was recorded, which knows no layers."""

    def before_layer(self, layer: int) -> None:
        """Attention layer `layer` is about to write and read KV."""

    def after_layer(self, layer: int) -> None:
        """Attention layer `layer` is done."""

    def after_forward(self, batch: InputBatch, hidden: Tensor) -> None:
        """Hidden states [T, hidden] are there; nothing was sampled."""

    def mask(self, plan: StepPlan, batch: InputBatch, late: Sequence[PlanPart]) -> Mask | None:
        """What to do to float32 logits [N, vocabulary] before sampling, if anything. `late` are the late parts."""

    def report(self) -> ResultPart | None:
        """This part's share of the result."""

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """Administrative calls that it answers between steps, by name."""

    def close(self) -> None:
        """The worker stops."""


class NullDataPart:
    """The part that does nothing: where no feature is installed.

    Owns: nothing.
    """

    name = "null"
    watches_layers = False

    def bind(self, memory: KVMemory) -> None:
        return None

    def handshake(self) -> Mapping[str, Any]:
        return {}

    def enter(self, row: NewRow) -> None:
        return None

    def leave(self, slot: int) -> None:
        return None

    def prepare(self, plan: StepPlan, batch: InputBatch) -> None:
        return None

    def wants_layers(self) -> bool:
        return self.watches_layers

    def before_layer(self, layer: int) -> None:
        return None

    def after_layer(self, layer: int) -> None:
        return None

    def after_forward(self, batch: InputBatch, hidden: Tensor) -> None:
        return None

    def mask(self, plan: StepPlan, batch: InputBatch, late: Sequence[PlanPart]) -> Mask | None:
        return None

    def report(self) -> ResultPart | None:
        return None

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        return {}

    def close(self) -> None:
        return None


class LateParts(Protocol):
    """Where a step waits for the parts that its plan announced."""

    def wait(self, names: Sequence[str]) -> tuple[PlanPart, ...]:
        """Parts of these types (class names), once all are there. Raises `EngineDead` when none will come."""


class ForwardRunner(Protocol):
    """How the model is run: eagerly, or from what was captured."""

    @property
    def held_bytes(self) -> int:
        """Memory that it keeps from step to step, once it has run."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how it runs."""

    def forget(self) -> None:
        """KV memory and step buffers are going away: let go of them."""

    def run(self, model: WorkerModel, batch: InputBatch, context: ForwardContext) -> Tensor:
        """Hidden states [T, hidden] of the batch."""


class EagerForward:
    """Calls the model as it is.

    Owns: nothing.
    """

    held_bytes = 0
    notes: tuple[str, ...] = ()

    def forget(self) -> None:
        return None

    def run(self, model: WorkerModel, batch: InputBatch, context: ForwardContext) -> Tensor:
        """Hidden states [T, hidden] of the batch."""
        with entered(context):
            return model(batch.token_ids, batch.positions)


class Drafter(Protocol):
    """Guesses tokens for the next step."""

    def propose(self, batch: InputBatch, hidden: Tensor, tokens: Ragged) -> Ragged | None:
        """Guesses by row; None from a drafter that never guesses."""


class NullDrafter:
    """Guesses nothing.

    Owns: nothing.
    """

    def propose(self, batch: InputBatch, hidden: Tensor, tokens: Ragged) -> Ragged | None:
        return None


class WatchedForward:
    """Another runner's pass; in a step in which parts want to be called around layers, an eager one with those calls.

    Profile and warm-up go without it.

    Owns: the parts of the watched pass under way.
    """

    def __init__(self, inner: ForwardRunner, layers: Sequence[nn.Module], parts: Sequence[DataPart]) -> None:
        self._parts = tuple(part for part in parts if part.watches_layers)
        self._inner = inner
        self._eager = EagerForward()
        self._on: tuple[DataPart, ...] = ()
        if self._parts:
            for layer, module in enumerate(layers):
                module.register_forward_pre_hook(partial(self._before, layer))
                module.register_forward_hook(partial(self._after, layer))

    @property
    def held_bytes(self) -> int:
        """Memory that is kept from step to step."""
        return self._inner.held_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know."""
        return self._inner.notes

    def forget(self) -> None:
        """Let go of KV memory and step buffers."""
        self._inner.forget()

    def run(self, model: WorkerModel, batch: InputBatch, context: ForwardContext) -> Tensor:
        """Hidden states [T, hidden] of the batch."""
        self._on = tuple(part for part in self._parts if part.wants_layers())
        if not self._on:
            return self._inner.run(model, batch, context)
        try:
            return self._eager.run(model, batch, context)
        finally:
            self._on = ()

    def _before(self, layer: int, *_: object) -> None:
        for part in self._on:
            part.before_layer(layer)

    def _after(self, layer: int, *_: object) -> None:
        for part in self._on:
            part.after_layer(layer)
