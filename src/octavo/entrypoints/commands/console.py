"""What commands print while an engine starts.

Promises: progress goes to standard error, one line a stage; a line that passes is written over on a terminal, and
elsewhere one in ten seconds is shown; a command that somebody waits to talk to shows the stage it is at on one line
and wipes it, and keeps warnings; the summary says where, what, and how much fits.
Does not know: which command runs.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from octavo.base.phases import Phases
from octavo.config.meter import Passing
from octavo.engine.startup import StartupReport

KEPT: Final = ("warning: ", "fetching ", "stopped; ")  # how lines begin that a quiet start shows, too
PLAIN_S: Final = 10.0  # between two passing lines where nothing can be written over
_WIPE: Final = "\r\x1b[K"


def progress(clock: Callable[[], float] = time.monotonic, began_s: float | None = None) -> Callable[[str], None]:
    """A progress callback that stamps lines with seconds since `began_s`, or now."""
    return Show(sys.stderr, clock, began_s)


class Show:
    """Lines on a terminal or in a log.

    Owns: whether the last line may be written over, and when a passing one was shown last.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float], began_s: float | None = None) -> None:
        self._out = out
        self._clock = clock
        self._shown = clock()
        self._start = self._shown if began_s is None else began_s
        self._over = False

    def __call__(self, line: str) -> None:
        """Show one line."""
        now, passing = self._clock(), isinstance(line, Passing)
        terminal = self._out.isatty()
        if passing and not terminal and now - self._shown < PLAIN_S:
            return
        text = f"octavo: [{now - self._start:6.2f} s] {line}"
        start = _WIPE if self._over else ""
        self._over = passing and terminal
        self._shown = now if passing else self._shown
        if self._over:
            text = text[: shutil.get_terminal_size().columns - 1]  # one that wraps could not be written over
        self._out.write(start + text + ("" if self._over else "\n"))
        self._out.flush()


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


def summary(report: StartupReport, phases: Phases) -> list[str]:
    """The lines that end a start-up, with all the time from the process's beginning on (OPS-5)."""
    total_s = phases.now().total_s
    stages = ", ".join(f"{name} {s:.2f} s" for name, s in phases.seconds().items())
    lines = [
        f"model: {report.architecture} from {report.model}, {report.dtype}, {report.weight_bytes / 2**20:.0f} MiB of weights",
        f"runs on {report.device}, attention backend {report.attention_backend}, "
        + ("the next step is scheduled while one runs" if report.depth > 1 else "one step at a time"),
        f"KV cache: {report.num_kv_tokens:,} tokens ({report.num_kv_blocks:,} blocks of {report.block_size}, "
        f"{report.kv_bytes / 2**20:,.0f} MiB, touched as used)",
        f"context: {report.max_model_len:,} tokens; {report.concurrency:.1f} requests of that length fit at once",
        f"start-up in {total_s:.2f} s: {stages}",
    ]
    return lines + [f"note: {note}" for note in report.notes]
