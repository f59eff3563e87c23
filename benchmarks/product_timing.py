"""Times a matrix product, its twin in torch and the machine's limits in turns; what the kernels_*linear.py share."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from octavo.ops.native import core
from octavo.ops.pages import reserve

CYCLED_BYTES = 256 << 20  # so that no cache holds what is read next
SLICE_BYTES = 16 << 20  # that the probe reads at once
MEMORY_ROWS = 16  # up to here the share of the memory's limit is shown
PROBE_ROUNDS = 20_000


@dataclass(frozen=True, slots=True)
class Timing:
    """Best seconds: of one native product and one of torch, of reading a byte, of one operation."""

    native: float
    twin: float
    read: float
    multiply: float

    def line(self, rows: int, num_bytes: int, work: int, unit: str) -> str:
        """Time, rates, the share of the limit that binds this many rows, and the ratio to torch."""
        if rows <= MEMORY_ROWS:
            limit = f"{num_bytes * self.read / self.native:4.0%} of {1 / self.read / 1e9:.0f} GB/s"
        else:
            limit = f"{work * self.multiply / self.native:4.0%} of {1 / self.multiply / 1e12:.1f} T{unit}"
        return (
            f"{rows:5} rows {self.native * 1e6:9.0f} us {num_bytes / self.native / 1e9:6.1f} GB/s "
            f"{work / self.native / 1e9:7.0f} G{unit}   {limit:20} {self.twin / self.native:6.2f}x torch"
        )


def stream() -> torch.Tensor:
    """Memory for the read probe."""
    return reserve(CYCLED_BYTES, "the probe").fill_(1)


def in_turns(
    native: Callable[[int], object],
    twin: Callable[[int], object],
    probe: Callable[[int], float],
    memory: torch.Tensor,
    seconds: float,
) -> Timing:
    """Best of the rounds that fit into `seconds`, four at least; `native` and `twin` get the round's number."""
    best = [float("inf")] * 4
    end, i = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or i < 4:
        at = memory.data_ptr() + i % (CYCLED_BYTES // SLICE_BYTES) * SLICE_BYTES
        marks = [time.perf_counter()]
        native(i)
        marks.append(time.perf_counter())
        twin(i)
        marks.append(time.perf_counter())
        core.probe_read(at, SLICE_BYTES)
        marks.append(time.perf_counter())
        operations = probe(PROBE_ROUNDS)
        marks.append(time.perf_counter())
        took = [after - before for before, after in pairwise(marks)]
        best = [min(pair) for pair in zip(best, took, strict=True)]
        i += 1
    return Timing(best[0], best[1], best[2] / SLICE_BYTES, best[3] / operations)
