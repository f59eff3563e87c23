"""How a front reaches an engine core: in this process, or over a socket.

Promises: one protocol, two implementations (`InprocClient` here, `engine.process.SocketClient`); requests go in,
`EngineOutputs` come out in order.
Does not know: text, HTTP, or the scheduler.
"""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from octavo.base.errors import EngineDead, OctavoError
from octavo.base.outputs import EngineOutputs
from octavo.base.requests import Abort, Admin, AdminReply, EngineRequest, Submit
from octavo.engine.core import EngineCore
from octavo.engine.heartbeat import Heartbeat
from octavo.engine.loop import EngineLoop

GIVEN_UP_S = 1.0  # for the thread of an engine that was given up


class EngineClient(Protocol):
    """The engine as the front sees it. Every method may be called from any thread."""

    def start(self, on_outputs: Callable[[EngineOutputs], None], on_death: Callable[[Exception], None]) -> None:
        """Begin delivery. Both callbacks run on a thread of the client's own."""

    def submit(self, requests: tuple[EngineRequest, ...]) -> None:
        """Send requests; raises `EngineDead` if the engine is gone."""

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Stop requests; each that was alive yields a last delta with FinishReason.ABORT."""

    def call(self, method: str, timeout_s: float = 30.0, **args: Any) -> Any:
        """An administrative call (`reset_prefix_cache`, `stats`, ...), blocking."""

    def alive(self) -> bool:
        """False once the engine is gone."""

    def heartbeat(self) -> Heartbeat | None:
        """The latest that the engine has said of how far it is; None when it has said nothing yet."""

    def give_up(self, error: Exception) -> None:
        """The engine hangs: from now on it is dead, for this reason, and `close` does not wait for it."""

    def close(self) -> None:
        """Stop the engine and free everything, within a bounded time; may be called twice."""


class CallTable:
    """Administrative calls that wait for their answers.

    Owns: the pending futures by call id. Thread-safe.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    def open(self, method: str, args: dict[str, Any]) -> tuple[Admin, "Future[Any]"]:
        """A message to send and the future of its answer."""
        future: Future[Any] = Future()
        with self._lock:
            call_id = next(self._ids)
            self._pending[call_id] = future
        return Admin(call_id, method, args), future

    def settle(self, reply: AdminReply) -> None:
        """An answer came."""
        with self._lock:
            future = self._pending.pop(reply.call_id, None)
        if future is None:
            return
        if reply.error is not None:
            future.set_exception(OctavoError(reply.error))
        else:
            future.set_result(reply.value)

    def fail(self, error: Exception) -> None:
        """No answer will come any more."""
        with self._lock:
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(error)


def _ignore(_: object) -> None:
    """Stands where no callback was given yet."""


class InprocClient:
    """The engine core on a thread of this process: breakpoints work, no socket is needed (OPS-4).

    Owns: the loop and the flag that says it is alive.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls = CallTable()
        self._loop: EngineLoop | None = None
        self._error: Exception | None = None
        self._closed = False
        self._on_death: Callable[[Exception], None] = _ignore

    def start(self, on_outputs: Callable[[EngineOutputs], None], on_death: Callable[[Exception], None]) -> None:
        self._on_death = on_death
        self._loop = EngineLoop(self._core, on_outputs=on_outputs, on_reply=self._calls.settle, on_death=self.give_up)
        self._loop.start()

    def submit(self, requests: tuple[EngineRequest, ...]) -> None:
        self._living().put(Submit(requests))

    def abort(self, request_ids: tuple[str, ...]) -> None:
        if self.alive():
            self._living().put(Abort(request_ids))

    def call(self, method: str, timeout_s: float = 30.0, **args: Any) -> Any:
        loop = self._living()
        message, future = self._calls.open(method, args)
        loop.put(message)
        return future.result(timeout_s)

    def alive(self) -> bool:
        return self._loop is not None and self._error is None and not self._closed

    def heartbeat(self) -> Heartbeat | None:
        return None if self._loop is None else self._loop.heartbeat()

    def describe(self) -> list[str]:
        """What the engine is at, for people; from any thread."""
        return ["the engine has not started yet"] if self._loop is None else self._loop.describe()

    def give_up(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._calls.fail(error)
            self._on_death(error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._loop is None:
            self._core.stop()
        elif self._error is None:
            self._loop.stop()
        else:
            self._loop.stop(GIVEN_UP_S)
        self._calls.fail(EngineDead("the engine was closed"))

    def _living(self) -> EngineLoop:
        if self._loop is None or not self.alive():
            raise EngineDead(str(self._error) if self._error else "the engine is closed")
        return self._loop
