"""What a process writes to standard error on SIGUSR1: where every thread stands, and what its engine is at (OPS-3).

Promises: the stacks come first, from the signal's handler itself, whatever the threads are stuck in, the interpreter's
lock included; then what `describe` says, which needs that lock but no thread of the engine. Nothing is changed by
looking, and no word of a prompt is shown.
Does not know: what is described.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

DUMP_SIGNAL: Final = signal.SIGUSR1
TRIES: Final = 20  # to look at what another thread is changing

Lines = Callable[[], Sequence[str]]


def _nothing() -> Sequence[str]:
    return ("the engine has not started yet",)


class HangDump:
    """Writes on the signal, from its making on. `child`: a process that is to write, too. To be made on the main thread.

    Owns: the signal's handler, who writes, and what there is to describe.
    """

    def __init__(self, what: str, *, child: "subprocess.Popen[bytes] | None" = None) -> None:
        self._what = what
        self._child = child
        self._by_thread = False
        self.describe: Lines = _nothing
        signal.signal(DUMP_SIGNAL, self._on_signal)
        with suppress(RuntimeError, ValueError, AttributeError, OSError):  # a standard error that is no file
            faulthandler.register(DUMP_SIGNAL, chain=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {DUMP_SIGNAL})

    def write_from_a_thread(self) -> None:
        """From now on a thread of its own writes, so that a main thread that is stuck holds up nothing. It takes the
        signals' wake-up descriptor, which an event loop needs for itself."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        self._by_thread = True
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, args=(woken,), name="octavo-dump", daemon=True).start()

    def _wait(self, woken: int) -> None:
        while numbers := os.read(woken, 64):
            if DUMP_SIGNAL in numbers:
                self.write()

    def _on_signal(self, *_: Any) -> None:
        if not self._by_thread:
            self.write()

    def write(self) -> None:
        """Write what there is to say, and have the child do the same."""
        lines = [f"process {os.getpid()} ({self._what}), whose stacks stand above:", *looked_at(self.describe)]
        text = "".join(f"octavo: dump: {line}\n" for line in lines)
        with suppress(OSError, AttributeError, ValueError):  # by descriptor: a thread may be within a write of its own
            os.write(sys.stderr.fileno(), text.encode("utf-8", "replace"))
        if self._child is not None:
            with suppress(OSError):
                self._child.send_signal(DUMP_SIGNAL)


def looked_at(describe: Lines) -> Sequence[str]:
    """What `describe` says of something that goes on changing: it is asked again when it stumbled over a change."""
    error: Exception | None = None
    for _ in range(TRIES):
        try:
            return describe()
        except Exception as stumbled:  # whatever a half-made change looks like
            error = stumbled
    return (f"it cannot be described: {error!r}",)


@contextmanager
def held_back() -> Iterator[None]:
    """A process started within keeps the signal until it has made its `HangDump`, and is not ended by it before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {DUMP_SIGNAL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
