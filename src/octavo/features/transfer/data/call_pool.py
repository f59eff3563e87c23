"""A few threads that do small calls side by side, for a store that is slow to answer and quick to give.

Promises: a call that never returns holds up nobody for longer than a set time, keeps its thread, and is remembered;
what came back is handed over on the caller's thread, and nothing is after the caller was told that it was given up.
Does not know: what is called.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final, TypeVar

T = TypeVar("T")
STOP_S: Final = 0.2


class CallPool:
    """Owns: the threads, their queue, and the calls that were given up and still run."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._left: set[Future[Any]] = set()

    @property
    def is_free(self) -> bool:
        """False while a call that was given up is still under way."""
        self._left = {future for future in self._left if not future.done()}
        return not self._left

    def each(self, calls: Iterable[Callable[[], T]], take: Callable[[int, T], None], patience_s: float) -> None:
        """Make the calls, as many at a time as there are threads, and `take` what each gave, with its number.

        A call is asked for when it is about to be made. Raises what one of them raised, or `TimeoutError` when not all
        have come back within `patience_s`; the others are given up then.
        """
        flight: dict[Future[T], int] = {}
        until = time.monotonic() + patience_s
        try:
            for number, call in enumerate(calls):
                future: Future[T] = Future()
                flight[future] = number
                self._jobs.put((future, call))
                self._start(len(flight))
                if len(flight) == self._size:
                    self._settle(flight, take, until, patience_s)
            while flight:
                self._settle(flight, take, until, patience_s)
        except BaseException:
            self._left |= {future for future in flight if not future.cancel()}
            raise

    def _settle(
        self, flight: dict[Future[T], int], take: Callable[[int, T], None], until: float, patience_s: float
    ) -> None:
        done, _ = wait(flight, max(0.0, until - time.monotonic()), FIRST_COMPLETED)
        if not done:
            raise TimeoutError(f"no answer within {patience_s:.3g} s")
        for future in done:
            take(flight.pop(future), future.result())

    def _start(self, count: int) -> None:
        """Have so many threads at least; those that are not needed are never started."""
        while len(self._threads) < min(count + len(self._left), self._size):
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, patience_s: float = STOP_S) -> None:
        """No call comes after this; the threads end with what they are at, and those that do so soon are waited for."""
        for _ in self._threads:
            self._jobs.put(None)
        until = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # it is the caller's to judge
                future.set_exception(error)
            del job, future, call
