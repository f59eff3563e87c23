"""A few threads that do small calls side by side, for a store that is slow to answer and quick to give.

Promises: a call that never returns holds up nobody for longer than a set time, keeps its thread, and is remembered;
what came back is handed over on the caller's thread, and nothing is after the caller was told that it was given up.
Does not know: what is called.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


class Crew:
    """Owns: the threads, their queue, and the calls that were given up and still run."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._left: set[Future[Any]] = set()
        for _ in range(size):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_free(self) -> bool:
        """False while a call that was given up is still under way."""
        self._left = {future for future in self._left if not future.done()}
        return not self._left

    def each(self, calls: Iterable[Callable[[], T]], take: Callable[[int, T], None], patience_s: float) -> None:
        """Make the calls, as many at a time as there are threads, and `take` what each gave, with its number.

        A call is asked for when it is about to be made. Raises what one of them raised, or `TimeoutError` when none
        has come back for `patience_s`; the others are given up then.
        """
        flight: dict[Future[T], int] = {}
        try:
            for number, call in enumerate(calls):
                future: Future[T] = Future()
                flight[future] = number
                self._jobs.put((future, call))
                if len(flight) == self._size:
                    self._settle(flight, take, patience_s)
            while flight:
                self._settle(flight, take, patience_s)
        except BaseException:
            self._left |= {future for future in flight if not future.cancel()}
            raise

    def _settle(self, flight: dict[Future[T], int], take: Callable[[int, T], None], patience_s: float) -> None:
        done, _ = wait(flight, patience_s, FIRST_COMPLETED)
        if not done:
            raise TimeoutError(f"no answer within {patience_s:g} s")
        for future in done:
            take(flight.pop(future), future.result())

    def stop(self) -> None:
        """No call comes after this; the threads end with what they are at."""
        for _ in range(self._size):
            self._jobs.put(None)

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
