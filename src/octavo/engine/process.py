"""The engine in a process of its own: sockets and pipes around an `EngineLoop`, and the client that talks to it.

Promises: the parent learns of the child's death within a second and the child of the parent's; a start that fails
gives the parent the error's own sentence; nothing is left behind (no process, no socket file).
Does not know: the scheduler, or text.

Protocol. The parent starts `python -m octavo.engine.process` (see `engine.spawn`) and writes one `Boot` message to its
standard input, which stays open: its end means that the parent is gone. Two ZeroMQ pairs over `ipc://` in a private folder carry
messages: parent PUSH -> child PULL (Submit, Abort, Admin, Bye) and child PUSH -> parent PULL (Log, Ready, Failed,
EngineOutputs, AdminReply). Frames are those of `base.codec`.
"""

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.base.codec import Decoder, Encoder
from octavo.base.errors import ConfigError, EngineDead, LoadError, OctavoError, ServerError
from octavo.base.heap import give_back
from octavo.base.outputs import EngineOutputs
from octavo.base.requests import Abort, Admin, AdminReply, EngineRequest, Submit
from octavo.config.schema import EngineConfig
from octavo.engine.client import CallTable
from octavo.engine.loop import EngineLoop
from octavo.engine.spawn import Process, start_process
from octavo.engine.startup import StartupReport, build_core, executors
from octavo.plugins.general import load_general, load_required
from octavo.plugins.registry import load_target

POLL_MS = 200
CONNECT_TRIES = 50  # of POLL_MS each
STOP_TIMEOUT_S = 20.0
KILL_AFTER_S = 5.0


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a child is started with."""

    config: EngineConfig
    folder: str  # where the socket files are
    sources: dict[str, str] = {}
    sample_vocab_size: int | None = None
    plugins: tuple[str, ...] | None = ()
    debug: bool = False


class Bye(msgspec.Struct, frozen=True, tag=True):
    """Parent to child: stop."""


class Log(msgspec.Struct, frozen=True, tag=True):
    """Child to parent: a line of start-up progress."""

    line: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Child to parent: serving from now on."""

    report: StartupReport
    pid: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Child to parent: start-up failed, or the running engine did."""

    kind: str
    message: str


Down = Submit | Abort | Admin | Bye
Up = Log | Ready | Failed | EngineOutputs | AdminReply
_ERRORS: dict[str, type[OctavoError]] = {"ConfigError": ConfigError, "LoadError": LoadError, "EngineDead": EngineDead}


# ---- the child --------------------------------------------------------------------------------


class _Sender:
    """The child's outgoing socket, used by several threads in turn.

    Owns: the socket and its lock.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a front that is slow for a moment must not stop the step
        self._socket.connect(address)
        self._encoder = Encoder()
        self._lock = threading.Lock()

    def send(self, message: Up) -> None:
        with self._lock:
            self._socket.send_multipart(self._encoder.encode(message), copy=False)

    def close(self) -> None:
        with self._lock:
            self._socket.close()


def main() -> int:
    """Run an engine for the parent that started us."""
    faulthandler.register(signal.SIGUSR1)  # where every thread stands, to standard error (OPS-3)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; Ctrl-C reaches the whole group
    with suppress(Exception):  # slow, so it is done while the parent reads the model's files; told by `build_core`
        load_target("octavo.platforms.lean:import_torch")()
        executors().load("uni")
    if not (data := _read_boot()):
        return 0  # the parent is gone, or has no use for us
    boot = msgspec.msgpack.decode(data, type=Boot)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = _Sender(context, f"ipc://{boot.folder}/up")
    stop = threading.Event()
    threading.Thread(target=_watch_parent, args=(stop,), name="octavo-parent", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    code = 1
    try:
        required = boot.config.plugins.require_plugin or ()
        load_general(boot.plugins, required, lambda line: sender.send(Log(line)))
        load_required(required)
        started = build_core(
            boot.config,
            lambda line: sender.send(Log(line)),
            sources=boot.sources,
            sample_vocab_size=boot.sample_vocab_size,
            plugins=boot.plugins,
        )
        loop = EngineLoop(
            started.core,
            on_outputs=sender.send,
            on_reply=sender.send,
            on_death=lambda error: _report_death(sender, error, stop, boot.debug),
        )
        loop.start()
        give_back()
        sender.send(Ready(started.report, os.getpid()))
        _pump(context, f"ipc://{boot.folder}/down", loop, stop)
        loop.stop()
        code = 0
    except OctavoError as error:
        _debug(boot.debug)
        sender.send(Failed(type(error).__name__, str(error)))
    except Exception as error:  # the edge of the process: say it in one line, stack only on demand
        _debug(boot.debug)
        sender.send(Failed("ServerError", f"the engine could not start: {type(error).__name__}: {error}"))
    finally:
        sender.close()
        context.term()
    return code


def _debug(on: bool) -> None:
    if on:
        traceback.print_exc(file=sys.stderr)


def _report_death(sender: _Sender, error: Exception, stop: threading.Event, debug: bool) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    sender.send(Failed("EngineDead", str(error)))
    stop.set()


def _read_boot() -> bytes:
    stream = sys.stdin.buffer
    size = int.from_bytes(stream.read(4), "little")
    return stream.read(size)


def _watch_parent(stop: threading.Event) -> None:
    """Standard input ends when the parent does, however it died.

    Read by descriptor: a buffered reader would hold its lock at interpreter exit.
    """
    while os.read(0, 4096):
        pass
    stop.set()
    # A step may take long and native code cannot be interrupted: give it a moment, then go.
    threading.Timer(STOP_TIMEOUT_S, os._exit, args=(3,)).start()


def _pump(context: "zmq.Context[zmq.Socket[bytes]]", address: str, loop: EngineLoop, stop: threading.Event) -> None:
    """Input thread (this one): decode messages and hand them to the loop until told to stop."""
    socket = context.socket(zmq.PULL)
    socket.connect(address)
    decoder: Decoder[Down] = Decoder(Down)
    try:
        while not stop.is_set():
            if not socket.poll(POLL_MS):
                continue
            message = decoder.decode(socket.recv_multipart())
            if isinstance(message, Bye):
                return
            loop.put(message)
    finally:
        socket.close(linger=0)


# ---- the parent -------------------------------------------------------------------------------


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
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-"))
        self._progress = progress
        self._calls = CallTable()
        self._ready: Future[StartupReport] = Future()
        self._error: Exception | None = None
        self._closed = False
        self._on_outputs: Callable[[EngineOutputs], None] = _ignore
        self._on_death: Callable[[Exception], None] = _ignore
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._down = self._context.socket(zmq.PUSH)
        self._down.setsockopt(zmq.LINGER, 1000)
        self._down.setsockopt(zmq.SNDHWM, 0)  # so that a send never waits; what may wait is limited above
        self._down.bind(f"ipc://{self._folder}/down")
        self._up = self._context.socket(zmq.PULL)
        self._up.bind(f"ipc://{self._folder}/up")
        self._encoder = Encoder()
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

    def close(self) -> None:
        if self._closed:
            return
        serving = self._ready.done() and self._error is None
        if serving:
            with suppress(EngineDead):
                self._send(Bye())
        self._closed = True
        self._end_child(asked=serving)
        self._receiver.join(5)
        self._calls.fail(EngineDead("the engine was closed"))
        with self._lock:
            self._down.close()
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
            try:
                self._down.send_multipart(self._encoder.encode(message), zmq.DONTWAIT, copy=False)
            except zmq.Again:
                raise EngineDead("the engine process has ended") from None

    def _end_child(self, *, asked: bool) -> None:
        """Wait for a child that was asked to stop; push one that was not, or does not."""
        if not asked:
            self._child.terminate()
        for grace_s, push in ((STOP_TIMEOUT_S if asked else KILL_AFTER_S, self._child.kill), (KILL_AFTER_S, None)):
            try:
                self._child.wait(grace_s)
                break
            except subprocess.TimeoutExpired:
                if push is not None:
                    push()
        if self._child.stdin:
            self._child.stdin.close()

    def _receive(self) -> None:
        decoder: Decoder[Up] = Decoder(Up)
        while not self._closed or self._child.poll() is None:
            if self._up.poll(POLL_MS):
                self._take(decoder.decode(self._up.recv_multipart()))
            elif self._child.poll() is not None and not self._up.poll(0):
                if not self._closed:
                    self._died(_exit_error(self._child.returncode))
                break
        self._up.close(linger=0)

    def _take(self, message: Up) -> None:
        if isinstance(message, EngineOutputs):
            self._on_outputs(message)
        elif isinstance(message, AdminReply):
            self._calls.settle(message)
        elif isinstance(message, Log):
            self._progress(message.line)
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


if __name__ == "__main__":
    sys.exit(main())
