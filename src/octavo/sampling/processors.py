"""Custom logits processors: which rows each of them changes, and what becomes of a row that one of them fails (OUT-5).

Promises: a processor sees the rows of those requests only that it said yes to; what it raises ends the requests it was
working on, with its name, and nobody else's.
Does not know: what a processor does, or which requests are served beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.base.params import SamplingParams
from octavo.base.step import RowError
from octavo.plugins.registry import Registry
from octavo.sampling.state import SamplingRows

PLUGIN_GROUP: Final = "octavo.logits_processors"  # entry points of packages that bring them
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """What a processor is made with: the ids that can be sampled are 0 .. `vocab_size` - 1, slots 0 .. `max_num_seqs` - 1."""

    vocab_size: int
    max_num_seqs: int
    device: torch.device


class LogitsProcessor(Protocol):
    """A custom station. With `keeps_argmax` it runs after the temperature, on scaled logits of drawn rows only.

    It is made once for each worker, as `Processor(context)`. A request may enter again after it has left: its tokens so
    far are in `rows.known`.
    """

    keeps_argmax: bool

    def enter(self, slot: int, request_id: str, params: SamplingParams) -> bool:
        """A request takes `slot`: whether its rows are to be changed."""

    def leave(self, slot: int) -> None:
        """A request that it said yes to is gone."""

    def apply(self, logits: Tensor, rows: SamplingRows, index: Rows) -> None:
        """Change float32 logits [n, V] in place; line j belongs to row `index[j]` of `rows`."""


def load_processors(
    targets: Sequence[str], plugins: tuple[str, ...] | None, context: ProcessorContext
) -> tuple[LogitsProcessor, ...]:
    """Those of installed packages (`plugins` are those in use, None: all), then those named as "module:Class".

    Raises `ConfigError` for one that cannot be imported or made.
    """
    registry: Registry[Callable[[ProcessorContext], LogitsProcessor]] = Registry("logits processor")
    registry.discover(PLUGIN_GROUP, plugins)
    for target in targets:
        registry.register(target, target, source="--logits-processors", replace=True)
    return tuple(_made(name, registry.load(name), context) for name in registry.names())


def _made(name: str, make: Callable[[ProcessorContext], LogitsProcessor], context: ProcessorContext) -> LogitsProcessor:
    try:
        processor = make(context)
    except Exception as error:
        raise ConfigError(f"logits processor {name!r} could not be made: {error!r}") from error
    missing = [what for what in ("keeps_argmax", "enter", "leave", "apply") if not hasattr(processor, what)]
    if missing:
        raise ConfigError(f"logits processor {name!r} has no {', '.join(missing)}; see octavo.sampling.processors")
    return processor


class Processors:
    """The processors of one worker.

    Owns: which slots each of them changes.
    """

    def __init__(self, given: Sequence[LogitsProcessor] = ()) -> None:
        self._given = tuple(given)
        self._slots: tuple[set[int], ...] = tuple(set() for _ in self._given)

    def __bool__(self) -> bool:
        return bool(self._given)

    def enter(self, slot: int, request_id: str, params: SamplingParams) -> None:
        """A request takes `slot`. What a processor raises is the caller's."""
        for processor, slots in zip(self._given, self._slots, strict=True):
            if processor.enter(slot, request_id, params):
                slots.add(slot)

    def leave(self, slot: int) -> None:
        """The slot's request is gone."""
        for processor, slots in zip(self._given, self._slots, strict=True):
            if slot in slots:
                slots.remove(slot)
                processor.leave(slot)

    def touched(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Whether some processor changes the row of each of these slots."""
        every: set[int] = set().union(*self._slots)
        return np.fromiter((slot in every for slot in slots.tolist()), dtype=np.bool_, count=len(slots))

    def apply(self, x: Tensor, rows: SamplingRows, index: Rows, *, keep_argmax: bool) -> tuple[RowError, ...]:
        """Run those that keep the argmax, or those that do not, on logits [n, V] of the rows `index`, in place.

        The errors are of rows whose processor failed; their logits are as it left them.
        """
        errors: list[RowError] = []
        numbers = rows.metadata.slots[index].tolist()
        for processor, slots in zip(self._given, self._slots, strict=True):
            lines = np.flatnonzero([slot in slots for slot in numbers])
            if processor.keeps_argmax is not keep_argmax or not lines.size:
                continue
            whole = len(lines) == len(numbers)
            at = torch.from_numpy(lines).to(x.device)
            mine = x if whole else x[at]
            try:
                processor.apply(mine, rows, index[lines])
            except Exception as error:  # somebody's code, for these requests: nobody else's answer depends on it
                name = type(processor).__name__
                errors += [RowError(int(row), f"logits processor {name} failed: {error!r}") for row in index[lines]]
            if not whole:
                x[at] = mine
        return tuple(errors)
