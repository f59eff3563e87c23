"""What the machine itself allows: streaming reads and the arithmetic of the widest product instructions, on all threads.

Promises: each figure is the best of several short passes at the level in use; memory lies in large pages, as weights do.
Does not know: what the figures are compared with.

    python -m octavo.ops.probe      prints one line of JSON
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import torch

from octavo.ops.native import core
from octavo.ops.pages import reserve

MEMORY_BYTES: Final = 512 << 20  # more than any cache that is one's own
PASS_S: Final = 0.005  # of arithmetic: long enough to wake the threads, short enough to fit between two others' turns


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """`read_gb_s`: 10^9 bytes a second. `bf16_gflop_s`, `int8_gop_s`: 10^9 operations a second, a multiplication and its
    addition counted as two, by the level's own instruction for products of bf16 (float32 where it has none) and int8."""

    read_gb_s: float
    bf16_gflop_s: float
    int8_gop_s: float
    level: str
    num_threads: int


class MachineProbe:
    """Measures the limits again and again, so that a benchmark can do it between its rounds.

    Owns: the memory that is read.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory = reserve(memory_bytes, "the memory probe")
        self._memory.random_(0, 256)  # touched, and no page is like another

    def read_gb_s(self, passes: int = 5) -> float:
        """Bytes a second of one pass over the memory by all threads, in 10^9."""
        at, size = self._memory.data_ptr(), len(self._memory)
        return size / min(_seconds(lambda: core.probe_read(at, size)) for _ in range(passes)) / 1e9

    def bf16_gflop_s(self, passes: int = 9) -> float:
        return _rate(core.probe_bf16, passes) / 1e9

    def int8_gop_s(self, passes: int = 9) -> float:
        return _rate(core.probe_int8, passes) / 1e9


def measure(memory_bytes: int = MEMORY_BYTES) -> MachineLimits:
    """All limits at once, within a second or two."""
    probe = MachineProbe(memory_bytes)
    return MachineLimits(
        read_gb_s=round(probe.read_gb_s(), 2),
        bf16_gflop_s=round(probe.bf16_gflop_s(), 1),
        int8_gop_s=round(probe.int8_gop_s(), 1),
        level=core.level(),
        num_threads=torch.get_num_threads(),
    )


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _rate(multiply: Callable[[int], float], passes: int) -> float:
    """Operations a second, the best of `passes`; their number of rounds is found first."""
    rounds, best = 1000, 0.0
    while passes:
        start = time.perf_counter()
        operations = multiply(rounds)
        seconds = time.perf_counter() - start
        if seconds < PASS_S:
            rounds = int(rounds * min(10.0, 1.3 * PASS_S / seconds)) + 1
            continue
        best = max(best, operations / seconds)
        passes -= 1
    return best


def main() -> int:
    """Print the limits as JSON."""
    sys.stdout.write(json.dumps(asdict(measure())) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
