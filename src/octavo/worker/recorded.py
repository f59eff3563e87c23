"""The model's forward pass as a list of native calls, written down once and replayed each step (CMP-10).

Promises: the same bits as calling the model; no Python runs between two operators of a step; a model that computes
with anything else than native operators runs as it is, and a note says which call stood in the way.
Does not know: any model or operator, or what a step holds.

How: the model is run once, with the step's buffers at their full size, while a `Tape` writes its native calls down
instead of running them. Everything a call reads or writes has an address that stays: the step's input buffers, the
plans of the attention backend, weights, KV memory; and what the model makes with `torch.empty` comes from a pool that
gives the same memory to one tensor after another. Rows lie one after the other from the beginning of each tensor, so
the same calls serve every number of rows up to the full size.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.forward.context import BatchShape, ForwardContext, GroupPlan, LayerTable, entered
from octavo.ops.pages import reserve
from octavo.worker.batch import InputBatch, StepInputs
from octavo.worker.seams import EagerForward, WorkerModel

ALIGNMENT: Final = 64
STAGGER: Final = 13 * ALIGNMENT  # tensors of one size would else fall into the same places of a cache
HELD_BY_US: Final = 2  # references to an array that is not out: the loan's, and the argument of getrefcount
CHUNK_BYTES: Final = 64 << 20
CHECKED_RUNS: Final = 2  # first runs of a recording are compared with the model's own

aten = torch.ops.aten


class Tape(Protocol):
    """What `octavo.ops.native` has for writing calls down."""

    def start(self) -> None:
        """From now on this thread's native calls are written down and not run."""

    def stop(self) -> None:
        """Native calls run again."""

    def replay(self, rows: int) -> None:
        """Run the calls for this many rows; other Python threads may run meanwhile."""

    def timed_replay(self, rows: int) -> list[float]:
        """As `replay`; the seconds that each call took."""

    def names(self) -> list[str]:
        """The calls' names, in order."""


class NotRecordable(Exception):
    """The model did something that cannot be replayed."""


@dataclass(frozen=True, slots=True)
class _Loan:
    """Memory that is out: a tensor's storage holds `array`, a view made for it alone.

    Owns: the array.
    """

    start: int
    end: int
    array: npt.NDArray[np.uint8]

    def is_out(self) -> bool:
        return sys.getrefcount(self.array) > HELD_BY_US


class _Chunk:
    """One range of memory, lent out piece by piece.

    Owns: its loans, by place, and how far it was ever used.
    """

    def __init__(self, size: int) -> None:
        self._memory = reserve(size, "a step's intermediate values").numpy()
        self._loans: list[_Loan] = []
        self.most = 0

    def lend(self, num_bytes: int) -> npt.NDArray[np.uint8] | None:
        """The beginning of the first gap that is large enough; None when there is none."""
        room = -(-num_bytes // ALIGNMENT) * ALIGNMENT + STAGGER
        self._loans = [loan for loan in self._loans if loan.is_out()]
        starts = (0, *(loan.end for loan in self._loans))
        ends = (*(loan.start for loan in self._loans), len(self._memory))
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end - start >= room:
                loan = _Loan(start, start + room, self._memory[start : start + num_bytes])
                self._loans.insert(number, loan)
                self.most = max(self.most, loan.end)
                return loan.array
        return None


class BufferPool:
    """Memory for tensors that come and go in the order of a recording, and lasts as long as it.

    A tensor gets the first gap that holds it, so that together they take little more than the most that live at once;
    what is never lent out is never touched.

    Owns: its chunks.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    @property
    def num_bytes(self) -> int:
        """How much was ever out at once, gaps included."""
        return sum(chunk.most for chunk in self._chunks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in memory that no living tensor uses."""
        count = prod(shape)
        memory = self._lend(max(1, count) * dtype.itemsize)  # the tensor must hold this array and no view of it
        return torch.from_numpy(memory).view(dtype)[:count].view(tuple(shape))

    def _lend(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        for chunk in self._chunks:
            if (memory := chunk.lend(num_bytes)) is not None:
                return memory
        self._chunks.append(_Chunk(max(2 * num_bytes, CHUNK_BYTES)))
        return self._lend(num_bytes)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, new tensors come from the pool, views are made, and any other torch call is refused.

    Owns: nothing.
    """

    def __init__(self, pool: BufferPool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its whole compiler (74 MiB, a second) to keep it from looking in here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "cpu":
            if func is aten.empty.memory_format:
                return self._pool.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
            if func is aten.new_empty.default:
                return self._pool.empty(args[1], kwargs.get("dtype") or args[0].dtype)
            if func is aten.empty_like.default and args[0].is_contiguous():
                return self._pool.empty(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if _gives_views(func):
            out = func(*args, **kwargs)
            if all(_same_memory(one, args[0]) for one in (out if isinstance(out, (list, tuple)) else (out,))):
                return out
        raise NotRecordable(str(func))


def _gives_views(func: Any) -> bool:
    results = func._schema.returns
    return bool(results) and all(r.alias_info is not None and not r.alias_info.is_write for r in results)


def _same_memory(one: Any, other: Any) -> bool:
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


class Recording:
    """One model's calls on one set of buffers.

    Owns: the tape, the pool that its calls use, and the number of runs that were compared.
    """

    def __init__(
        self, make_tape: Callable[[], Tape], model: WorkerModel, batch: InputBatch, context: ForwardContext
    ) -> None:
        """Raises `NotRecordable`."""
        self.tape = make_tape()
        self.pool = BufferPool()
        self.runs = 0
        self._model, self._inputs, self._layers = model, batch.inputs, context.layers
        self._plans = tuple(group.plan for group in context.groups)
        self._hidden = self._record(model, batch.inputs, context.layers)

    def _record(self, model: WorkerModel, inputs: StepInputs, layers: LayerTable) -> Tensor:
        groups = tuple(
            GroupPlan(plan=plan, slot_mapping=slots)
            for plan, slots in zip(self._plans, inputs.slot_mappings, strict=True)
        )
        shape = BatchShape(num_tokens=len(inputs.token_ids))
        with entered(ForwardContext(shape=shape, groups=groups, layers=layers)), _Recorder(self.pool):
            self.tape.start()
            try:
                hidden = model(inputs.token_ids, inputs.positions)
            finally:
                self.tape.stop()
        return hidden

    def is_for(self, model: WorkerModel, batch: InputBatch, context: ForwardContext) -> bool:
        """True when a step with these would read and write the addresses that were recorded."""
        return self.is_on(model, batch, context) and all(
            group.plan is plan for group, plan in zip(context.groups, self._plans, strict=True)
        )

    def is_on(self, model: WorkerModel, batch: InputBatch, context: ForwardContext) -> bool:
        """True for the model, buffers and memory that were recorded, whatever the plans."""
        return self._model is model and self._inputs is batch.inputs and self._layers is context.layers

    def replay(self, num_tokens: int) -> Tensor:
        """Hidden states [num_tokens, hidden]; valid until the next replay."""
        self.tape.replay(num_tokens)
        return self._hidden[:num_tokens]

    def timed_replay(self, num_tokens: int) -> tuple[Tensor, list[float]]:
        """As `replay`, with the seconds that each of the tape's calls took."""
        seconds = self.tape.timed_replay(num_tokens)
        return self._hidden[:num_tokens], seconds


class RecordedForward:
    """Replays a recording where there can be one, else calls the model.

    The first step on new memory is recorded, then compared with the model's own pass, bit by bit.

    Owns: the recording, and why there is none.
    """

    def __init__(self, make_tape: Callable[[], Tape]) -> None:
        self._make_tape = make_tape
        self._eager = EagerForward()
        self._recording: Recording | None = None
        self._refused: str | None = None

    @property
    def held_bytes(self) -> int:
        """Memory that is kept from step to step."""
        return self._recording.pool.num_bytes if self._recording is not None else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Why the model runs call by call; nothing when it is replayed, or has not run yet."""
        return () if self._refused is None else (f"the model runs operator by operator: {self._refused}",)

    @property
    def recording(self) -> Recording | None:
        """What is replayed, for those who measure it."""
        return self._recording

    def forget(self) -> None:
        """Let go of the buffers and memory of the last steps; the next step records again."""
        self._recording = None

    def run(self, model: WorkerModel, batch: InputBatch, context: ForwardContext) -> Tensor:
        """Hidden states [T, hidden] of the batch; valid until the next run."""
        recording = self._recording
        if recording is not None and recording.is_for(model, batch, context):
            if recording.runs >= CHECKED_RUNS:
                return recording.replay(batch.num_tokens)
            return self._checked(recording, model, batch, context)
        if self._refused is not None:
            return self._eager.run(model, batch, context)
        if recording is not None and recording.is_on(model, batch, context):
            self._refuse("its attention backend makes another plan each step")
            return self._eager.run(model, batch, context)
        try:
            self._recording = Recording(self._make_tape, model, batch, context)
        except NotRecordable as error:
            self._refuse(f"{error} is no native operator")
            return self._eager.run(model, batch, context)
        return self._checked(self._recording, model, batch, context)

    def _checked(self, recording: Recording, model: WorkerModel, batch: InputBatch, context: ForwardContext) -> Tensor:
        """What is written to KV memory is written twice, and the same."""
        recording.runs += 1
        want = self._eager.run(model, batch, context)
        got = recording.replay(batch.num_tokens)
        if not _same_bits(got, want):
            self._refuse("its recording gave other values than the model itself")
            return want
        return got

    def _refuse(self, why: str) -> None:
        self._recording, self._refused = None, why


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal, NaN included."""
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )
