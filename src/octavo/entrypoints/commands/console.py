"""What commands print while an engine starts.

Promises: progress goes to standard error, one line a stage; a command that somebody waits to talk to shows the stage
it is at on one line and wipes it, and keeps warnings; the summary says where, what, and how much fits.
Does not know: which command runs.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from octavo.engine.startup import StartupReport

KEPT: Final = ("warning: ", "fetching ")  # how lines begin that a quiet start shows, too
_WIPE: Final = "\r\x1b[K"


def progress(clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """A progress callback that stamps lines with seconds since now."""
    start = clock()

    def show(line: str) -> None:
        sys.stderr.write(f"octavo: [{clock() - start:6.2f} s] {line}\n")
        sys.stderr.flush()

    return show


@contextmanager
def quiet_progress(*, verbose: bool) -> Iterator[Callable[[str], None]]:
    """A progress callback for a start whose lines nobody wants to read afterwards; `verbose` shows them all."""
    if verbose:
        yield progress()
        return
    wipe = _WIPE if sys.stderr.isatty() else ""
    width = shutil.get_terminal_size().columns - 1

    def show(line: str) -> None:
        if line.startswith(KEPT):
            sys.stderr.write(f"{wipe}octavo: {line}\n")
        elif wipe:
            sys.stderr.write(wipe + f"octavo: {line}"[:width])
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(wipe)
        sys.stderr.flush()


def summary(report: StartupReport) -> list[str]:
    """The lines that end a start-up (OPS-5)."""
    stages = ", ".join(f"{name} {s:.2f} s" for name, s in report.seconds.items())
    lines = [
        f"model: {report.architecture} from {report.model}, {report.dtype}, {report.weight_bytes / 2**20:.0f} MiB of weights",
        f"runs on {report.device}, attention backend {report.attention_backend}, "
        + ("the next step is scheduled while one runs" if report.depth > 1 else "one step at a time"),
        f"KV cache: {report.num_kv_tokens:,} tokens ({report.num_kv_blocks:,} blocks of {report.block_size}, "
        f"{report.kv_bytes / 2**20:,.0f} MiB, touched as used)",
        f"context: {report.max_model_len:,} tokens; {report.concurrency:.1f} requests of that length fit at once",
        f"start-up: {stages}",
    ]
    return lines + [f"note: {note}" for note in report.notes]
