"""How a Python process of ours is started.

Promises: a file in the current folder never takes the place of a module that the process imports (`queue.py`, `json.py`);
a Ctrl-C, which a terminal sends to every process of a command, can be left to the parent from the child's first moment on.
Does not know: which module is run, or why.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def python_command(*arguments: str) -> list[str]:
    """The command that runs a file, or code after `-c`, with this interpreter, without the current folder on its path
    (`-P`)."""
    return [sys.executable, "-P", *arguments]


def module_command(module: str, *arguments: str) -> list[str]:
    """The same for a module."""
    return python_command("-m", module, *arguments)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """What this thread starts in the block hears no Ctrl-C until it calls `leave_interrupts`; ours comes after the block.

    A child that only ignored it would still die, with a stack, while it imports what it needs.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_interrupts() -> None:
    """In a child: Ctrl-C is the parent's to hear, and it says what is to be done; one that came before is dropped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
