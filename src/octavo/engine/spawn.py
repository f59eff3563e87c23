"""Starting an engine's process before anything is known of the engine.

Promises: light, so that a command can start the process first and import everything else while the process imports
what it needs; a process that is not wanted after all is gone at once.
Does not know: what the process is told (see `engine.process`).
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from octavo.base.interpreter import interrupts_held, module_command
from octavo.config.env import compute_environment
from octavo.engine.dump import held_back

Process = subprocess.Popen[bytes]


def start_process() -> Process:
    """A new engine process; it imports what it needs and waits to be told what to run."""
    with interrupts_held(), held_back():
        return subprocess.Popen(
            module_command("octavo.engine.child"),
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
            env=compute_environment(),
        )


@contextmanager
def process_ahead(wanted: bool) -> Iterator[Process | None]:
    """A process started early, or None when none is wanted. It is ended when the block fails before giving it work."""
    process = start_process() if wanted else None
    try:
        yield process
    except BaseException:
        if process is not None:
            end_process(process)
        raise


def end_process(process: Process) -> None:
    """End a process, whatever it is doing; may be called for one that has ended."""
    process.kill()
    process.wait()
    if process.stdin:
        process.stdin.close()


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, AttributeError, ValueError):
        return False
    return True
