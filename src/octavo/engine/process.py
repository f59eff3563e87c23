"""The engine in a process of its own, and the client that talks to it.

Promises: the parent learns of the child's death within a second and the child of the parent's; a start that fails
gives the parent the error's own sentence; a thread that fails says so and ends what it was there for; a stop takes a
bounded time, whatever the child does; nothing is left behind (no process, no socket file).
Does not know: the scheduler, or text.

Protocol. The parent starts `python -m octavo.engine.child` (see `engine.spawn`) and writes one `Boot` message to its
standard input, which stays open: its end means that the parent is gone. Two ZeroMQ pairs over `ipc://` in a private folder carry
messages: parent PUSH -> child PULL (Submit, Abort, Admin, Bye) and child PUSH -> parent PULL (Log, Entered, Ready, Failed, Beat,
EngineOutputs, AdminReply). Frames are those of `base.codec`. A request that cannot be read on either side ends alone.
"""

import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.base.codec import MessageDecoder, MessageEncoder, lost_delta
from octavo.base.errors import ClientError, ConfigError, EngineDead, LoadError, OctavoError, ServerError
from octavo.base.outputs import EngineOutputs, RequestDelta
from octavo.base.phases import Enter
from octavo.base.requests import Abort, AdminReply, EngineRequest, Submit
from octavo.config.schema import EngineConfig
from octavo.engine.client import CallTable
from octavo.engine.dump import DUMP_SIGNAL
from octavo.engine.heartbeat import Heartbeat
from octavo.engine.messages import Boot, Bye, Down, Entered, Failed, Log, Ready, Up
from octavo.engine.spawn import Process, start_process
from octavo.engine.startup import StartupReport
from octavo.observe.log import get_logger

POLL_MS = 500
CONNECT_TRIES = 50  # of POLL_MS each
STOP_TIMEOUT_S = 20.0  # for one that shows that it is at it
SILENT_S = 3.0  # at a stop, of one that shows nothing
KILL_AFTER_S = 5.0
DUMP_S = 0.5  # for the stacks of a process that is about to be killed

logger = get_logger(__name__)

_ERRORS: dict[str, type[OctavoError]] = {"ConfigError": ConfigError, "LoadError": LoadError, "EngineDead": EngineDead}


def _ignore(_: object) -> None:
    """Stands where no callback was given yet."""


class SocketClient:
    """An engine process and the sockets to it. `process` is one that was started ahead; it is this client's then.

    Owns: the child, the socket folder, the receive thread, and the queue of messages to send (only the
    receive thread touches the sockets; others wake it through an in-process pair).
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None],
        *,
        sources: Mapping[str, str] | None = None,
        sample_vocab_size: int | None = None,
        plugins: tuple[str, ...] | None = (),
        debug: bool = False,
        process: Process | None = None,
        enter: Enter = _ignore,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-"))
        self._progress = progress
        self._enter = enter
        self._calls = CallTable()
        self._ready: Future[StartupReport] = Future()
        self._error: Exception | None = None
        self._closed = False
        self._on_outputs: Callable[[EngineOutputs], None] = _ignore
        self._on_death: Callable[[Exception], None] = _ignore
        self._heartbeat: Heartbeat | None = None
        self._heard_s = time.monotonic()
        self._given_up = False
        self._lost: list[RequestDelta] = []  # of the message being read
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._down = self._context.socket(zmq.PUSH)
        self._down.setsockopt(zmq.LINGER, 1000)
        self._down.setsockopt(zmq.SNDHWM, 0)  # so that a send never waits; what may wait is limited above
        self._down.bind(f"ipc://{self._folder}/down")
        self._up = self._context.socket(zmq.PULL)
        self._up.bind(f"ipc://{self._folder}/up")
        self._encoder = MessageEncoder()
        self._lock = threading.Lock()
        boot = Boot(
            config=config,
            folder=str(self._folder),
            sources=dict(sources or {}),
            sample_vocab_size=sample_vocab_size,
            plugins=plugins,
            debug=debug,
        )
        self._child = process or start_process()
        _tell(self._child, boot)
        self._receiver = threading.Thread(target=self._receive, name="octavo-receive", daemon=True)
        self._receiver.start()

    @property
    def pid(self) -> int:
        """The engine process."""
        return self._child.pid

    def wait_ready(self) -> StartupReport:
        """Wait for start-up; raises the error that ended it."""
        try:
            return self._ready.result()
        except BaseException:
            self.close()
            raise

    def start(self, on_outputs: Callable[[EngineOutputs], None], on_death: Callable[[Exception], None]) -> None:
        self._on_outputs, self._on_death = on_outputs, on_death

    def submit(self, requests: tuple[EngineRequest, ...]) -> None:
        self._send(Submit(requests))

    def abort(self, request_ids: tuple[str, ...]) -> None:
        with suppress(EngineDead):
            self._send(Abort(request_ids))

    def call(self, method: str, timeout_s: float = 30.0, **args: Any) -> Any:
        message, future = self._calls.open(method, args)
        self._send(message)
        return future.result(timeout_s)

    def alive(self) -> bool:
        return self._error is None and not self._closed

    def heartbeat(self) -> Heartbeat | None:
        return self._heartbeat

    def give_up(self, error: Exception) -> None:
        self._given_up = True
        with suppress(OSError):
            self._child.send_signal(DUMP_SIGNAL)  # where it hangs, to standard error
        self._died(error)

    def close(self) -> None:
        if self._closed:
            return
        serving = self._ready.done() and self._error is None
        if serving:
            with suppress(EngineDead):
                self._send(Bye())
        self._closed = True
        self._end_child(asked=serving)
        self._receiver.join(KILL_AFTER_S)
        self._calls.fail(EngineDead("the engine was closed"))
        with self._lock:
            self._down.close(linger=0)
        if not self._receiver.is_alive():  # else its socket is open, and this would wait for it without end
            self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: Down) -> None:
        with self._lock:
            if not self.alive():
                raise EngineDead(str(self._error) if self._error else "the engine is closed")
            # Nobody is connected in two cases: the child has only just said that it is ready, or it has ended
            # and the receive thread has not seen it yet.
            for _ in range(CONNECT_TRIES):
                if self._down.poll(POLL_MS, zmq.POLLOUT) or self._child.poll() is not None:
                    break
            if self._child.poll() is not None:  # the socket may take messages for a moment more
                raise EngineDead("the engine process has ended")
            try:
                self._down.send_multipart(self._encode(message), zmq.DONTWAIT, copy=False)
            except zmq.Again:
                raise EngineDead("the engine process has ended") from None

    def _encode(self, message: Down) -> Any:
        try:
            return self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
            raise ClientError(f"the request holds a value that cannot be sent to the engine: {error}") from None

    def _end_child(self, *, asked: bool) -> None:
        """Wait for a child that was asked to stop and is at it; push one that was not asked, or is not."""
        if self._given_up:
            time.sleep(DUMP_S)
            self._child.kill()
        elif asked:
            self._wait_for_child()
        else:
            self._child.terminate()
        try:
            self._child.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            with suppress(
                subprocess.TimeoutExpired
            ):  # the system itself holds it, in a call that cannot be interrupted
                self._child.wait(KILL_AFTER_S)
        if self._child.stdin:
            self._child.stdin.close()

    def _wait_for_child(self) -> None:
        """Until it has ended, or shows no more that it is about to. (It is heard twice a second, and so within the first
        one, also when this process did not run for a while.)"""
        began_s = time.monotonic()
        while self._child.poll() is None:
            now_s = time.monotonic()
            silent_s = now_s - max(self._heard_s, began_s + 1.0 - SILENT_S)
            if now_s > began_s + STOP_TIMEOUT_S or silent_s > SILENT_S:
                logger.warning("the engine process does not stop and is killed")
                self._child.kill()
                return
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(POLL_MS / 1000)

    def _receive(self) -> None:
        """The receive thread: it ends with the child, or with an error that everybody is told."""
        try:
            self._listen(MessageDecoder(Up, on_damaged=self._note_lost))
        except Exception as error:  # the edge of the thread: without it nobody hears anything any more
            logger.exception("the thread octavo-receive, which listens to the engine, failed")
            self._died(EngineDead(f"the thread octavo-receive, which listens to the engine, failed: {error}"))
        finally:
            self._up.close(linger=0)

    def _listen(self, decoder: MessageDecoder[Up]) -> None:
        while not self._closed or self._child.poll() is None:
            if self._up.poll(POLL_MS):
                message = decoder.decode(self._up.recv_multipart())
                self._heard_s = time.monotonic()
                self._take(message)
                self._end_lost()
            elif self._child.poll() is not None and not self._up.poll(0):
                if not self._closed:
                    self._died(_exit_error(self._child.returncode))
                return

    def _note_lost(self, request_id: str, why: str) -> None:
        logger.error("request %s: an answer of the engine cannot be read: %s", request_id, why)
        self._lost.append(lost_delta(request_id, f"cannot be read: {why}"))

    def _end_lost(self) -> None:
        """End the requests whose share of a message could not be read, here and in the engine."""
        if self._lost:
            lost, self._lost = tuple(self._lost), []
            self._on_outputs(EngineOutputs(deltas=lost))
            self.abort(tuple(delta.request_id for delta in lost))

    def _take(self, message: Up) -> None:
        if isinstance(message, EngineOutputs):
            self._on_outputs(message)
        elif isinstance(message, Heartbeat):
            self._heartbeat = message
        elif isinstance(message, AdminReply):
            self._calls.settle(message)
        elif isinstance(message, Log):
            self._progress(message.line)
        elif isinstance(message, Entered):
            self._enter(message.phase)
        elif isinstance(message, Ready):
            self._ready.set_result(message.report)
        elif isinstance(message, Failed):
            self._died(_ERRORS.get(message.kind, ServerError)(message.message))

    def _died(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        if not self._ready.done():
            self._ready.set_exception(error)
        else:
            self._calls.fail(error)
            self._on_death(error)


def _tell(child: Process, boot: Boot) -> None:
    data = msgspec.msgpack.encode(boot)
    if child.stdin is None:
        raise RuntimeError("the engine process was started without a pipe to its standard input")
    try:
        child.stdin.write(len(data).to_bytes(4, "little") + data)
        child.stdin.flush()
    except BrokenPipeError:
        pass  # it died at once; the receive thread will say so


def _exit_error(code: int | None) -> EngineDead:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return EngineDead(f"the engine process was ended by {name}{hint}.")
    return EngineDead(f"the engine process ended unexpectedly with exit code {code}.")
