"""Work beside the steps: a thread that does one thing after the other, and a box for what threads have to tell.

Promises: work is done in the order it was put; what is told is read once, in order, without waiting.
Does not know: what the work is; it must not raise.
"""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class WorkerThread:
    """One thread, which starts with its first job, and its jobs.

    Owns: the thread and the queue.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._begun = False

    def put(self, job: Callable[[], None]) -> None:
        """Do it after all that was put before. One thread puts and stops."""
        self._jobs.put(job)
        if not self._begun:
            self._begun = True
            self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """True when all that was put is done, within that time."""
        if not self._begun:
            return True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class Outbox(Generic[T]):
    """What any thread tells and one reads.

    Owns: what was told and not yet read.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        """Tell it."""
        self._items.put(item)

    def take(self) -> tuple[T, ...]:
        """All that was told since the last call, in order."""
        out: list[T] = []
        while True:
            try:
                out.append(self._items.get_nowait())
            except queue.Empty:
                return tuple(out)
