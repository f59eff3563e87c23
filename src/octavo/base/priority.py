"""Threads that let everybody else go first.

Promises: affects the calling thread only; does nothing where the system has no priorities for threads.
Does not know: what the thread does.
"""

import os
import threading
from contextlib import suppress


def go_last() -> None:
    """Give this thread the lowest priority: for work that nobody waits for."""
    with suppress(OSError, AttributeError):  # Linux only: elsewhere a thread has no number that this takes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
