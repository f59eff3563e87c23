"""The thread that owns an engine core: messages in, outputs out, idle without spinning.

Promises: only this thread touches the core; messages are handled in the order they came, between steps; an error
of the core ends the loop once, reported to `on_death`; how far it is can be seen from any thread (`heartbeat`).
Does not know: where messages come from (a queue is all it sees) or where outputs go.
"""

import queue
import threading
import time
from collections.abc import Callable

from octavo.base.errors import EngineDead, OctavoError
from octavo.base.outputs import EngineOutputs
from octavo.base.requests import Abort, Admin, AdminReply, Submit
from octavo.base.threads import cpu_seconds
from octavo.engine.core import EngineCore
from octavo.engine.heartbeat import Heartbeat

Message = Submit | Abort | Admin
_STOP = object()


class EngineLoop:
    """Runs a core on one thread.

    Owns: the thread, the inbox, and the count of what it has done. The core belongs to the thread from `start` on.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        on_outputs: Callable[[EngineOutputs], None],
        on_reply: Callable[[AdminReply], None],
        on_death: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._on_outputs = on_outputs
        self._on_reply = on_reply
        self._on_death = on_death
        self._clock = clock
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._done = 0  # steps and messages
        self._resting = False
        self._thread = threading.Thread(target=self._run, name="octavo-step", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, message: Message) -> None:
        """Hand over a message; from any thread."""
        self._inbox.put(message)

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End the loop after the step under way and stop the core; may be called again. False: it has not ended yet."""
        self._inbox.put(_STOP)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def heartbeat(self) -> Heartbeat:
        """How far it is; from any thread, whatever this one does."""
        now_s = self._clock()
        resting = self._resting and self._inbox.empty()
        healthy = self._thread.is_alive() and self._core.healthy()
        if resting:
            return Heartbeat(now_s, resting, self._done, healthy=healthy)
        steps, cpu_s = self._core.progress()
        return Heartbeat(now_s, resting, self._done + steps, cpu_s + cpu_seconds(self._thread.native_id or 0), healthy)

    def describe(self) -> list[str]:
        """What it is at, for people; from any thread, whatever this one does (OPS-3)."""
        rests = "rests" if self._resting else "works" if self._thread.is_alive() else "has ended"
        return [
            f"the engine {rests}; {self._done} steps and messages handled, {self._inbox.qsize()} messages wait",
            *self._core.describe(),
        ]

    def _run(self) -> None:
        try:
            while self._drain():
                outputs = self._core.step()
                self._done += 1
                if outputs is not None and (outputs.deltas or outputs.stats or outputs.cache):
                    self._on_outputs(outputs)
            self._core.settle()
        except Exception as error:  # the edge of the engine: everything ends here, and is said
            dead = error if isinstance(error, EngineDead) else EngineDead(f"the engine core failed: {error!r}")
            dead.__cause__ = error
            self._on_death(dead)
        finally:
            self._core.stop()

    def _drain(self) -> bool:
        """Handle all waiting messages; sleep for the first one when idle. False: stop."""
        message = self._first()
        while message is not None:
            if message is _STOP:
                return False
            self._handle(message)
            self._done += 1
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                message = None
        return True

    def _first(self) -> object | None:
        try:
            if self._core.busy:
                return self._inbox.get_nowait()
            deadline = self._core.next_deadline()
            self._resting = True
            if deadline is None:
                return self._inbox.get()
            return self._inbox.get(timeout=max(0.0, deadline - self._clock()))
        except queue.Empty:
            return None
        finally:
            self._resting = False

    def _handle(self, message: object) -> None:
        if isinstance(message, Submit):
            for request in message.requests:
                self._core.add(request)
        elif isinstance(message, Abort):
            self._core.abort(message.request_ids)
        elif isinstance(message, Admin):
            self._on_reply(self._answer(message))

    def _answer(self, call: Admin) -> AdminReply:
        try:
            return AdminReply(call.call_id, self._core.call(call.method, call.args))
        except (OctavoError, TypeError, ValueError) as error:
            return AdminReply(call.call_id, error=str(error))
