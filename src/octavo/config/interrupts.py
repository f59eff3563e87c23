"""SIGTERM heard as Ctrl-C is, where a long wait would not end otherwise.

Promises: what is in the block ends at once and its `finally` parts run; a handler of somebody else is left alone.
Does not know: what the block does.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

EXIT_TERMINATED: Final = 128 + signal.SIGTERM  # as shells count


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises `SystemExit` in this block, which must be the main thread's to have any effect."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(*_: Any) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)
