"""The engine's process, seen from inside: sockets and pipes around an `EngineLoop`.

Promises: it never outlives its parent for long, and then leaves nothing behind; a thread that fails is named and ends
the process; what one request brings that cannot be read, or gets that cannot be sent, ends that request.
Does not know: the scheduler, or text. The protocol is that of `process`.
"""

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress

import msgspec
import zmq

from octavo.base.codec import MessageDecoder, MessageEncoder, encode_outputs
from octavo.base.errors import EngineDead, OctavoError
from octavo.base.heap import give_back
from octavo.base.interpreter import leave_interrupts
from octavo.base.outputs import EngineOutputs, RequestDelta
from octavo.base.requests import Abort, AdminReply
from octavo.base.types import FinishReason
from octavo.engine.dump import HangDump
from octavo.engine.heartbeat import HEARTBEAT_S
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Boot, Bye, Down, Entered, Failed, Log, Ready, Up
from octavo.engine.startup import build_core, executor_class
from octavo.observe.log import configure_logging
from octavo.plugins.general import load_general, load_required
from octavo.plugins.registry import load_target

POLL_MS = 500
STOP_TIMEOUT_S = 20.0


class _Sender:
    """The outgoing socket, used by several threads in turn.

    Owns: the socket and its lock.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a front that is slow for a moment must not stop the step
        self._socket.connect(address)
        self._encoder = MessageEncoder()
        self._lock = threading.Lock()

    def send(self, message: Up) -> None:
        with self._lock:
            self._socket.send_multipart(self._encoder.encode(message), copy=False)

    def send_outputs(self, outputs: EngineOutputs) -> tuple[str, ...]:
        """Send what one step gave; the ids of requests whose share cannot be sent, and who were told so."""
        with self._lock:
            frames, lost = encode_outputs(self._encoder, outputs)
            self._socket.send_multipart(frames, copy=False)
        return lost

    def reply(self, reply: AdminReply) -> None:
        """Answer a call; with an error when its value is nothing that can be sent."""
        try:
            self.send(reply)
        except Exception as error:  # whatever a feature answers
            self.send(AdminReply(reply.call_id, error=f"the answer cannot be sent: {error}"))

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class _Life:
    """What ends the process, or a request before it began.

    Owns: whether it was told to stop, and whether its parent is gone.
    """

    def __init__(self, sender: _Sender, debug: bool) -> None:
        self._sender = sender
        self._debug = debug
        self.stop = threading.Event()
        self.orphaned = False

    def died(self, error: BaseException) -> None:
        """The engine cannot go on."""
        if self._debug:
            traceback.print_exception(error, file=sys.stderr)
        self._sender.send(Failed("EngineDead", str(error)))
        self.stop.set()

    def refuse(self, request_id: str, why: str) -> None:
        """A request came that cannot be read: it is told so."""
        error = f"the engine cannot read this request: {why}"
        delta = RequestDelta(request_id=request_id, finish=FinishReason.ERROR, error=error)
        self._sender.send(EngineOutputs(deltas=(delta,)))

    def thread_failed(self, args: threading.ExceptHookArgs) -> None:
        """A thread ended by an error that nobody had foreseen: it is gone, so all is over."""
        if args.exc_type is SystemExit or self.stop.is_set():
            return
        if args.exc_value is not None:
            traceback.print_exception(args.exc_value, file=sys.stderr)
        name = args.thread.name if args.thread is not None else "?"
        self.died(EngineDead(f"the engine's thread {name} failed: {args.exc_value!r}"))

    def watch_parent(self) -> None:
        """Standard input ends when the parent does, however it died.

        Read by descriptor: a buffered reader would hold its lock at interpreter exit.
        """
        with suppress(OSError):  # a pipe that cannot be read has no parent at its end either
            while os.read(0, 4096):
                pass
        self.orphaned = True
        self.stop.set()
        # A step may take long and native code cannot be interrupted: give it a moment, then go.
        threading.Timer(STOP_TIMEOUT_S, os._exit, args=(3,)).start()


def main() -> int:
    """Run an engine for the parent that started us."""
    dump = HangDump("engine")
    dump.write_from_a_thread()
    leave_interrupts()
    with suppress(Exception):  # slow, so it is done while the parent reads the model's files; told by `build_core`
        load_target("octavo.platforms.lean:import_torch")()
        executor_class()
    if not (data := _read_boot()):
        return 0  # the parent is gone, or has no use for us
    boot = msgspec.msgpack.decode(data, type=Boot)
    configure_logging("warning")  # a tier that fails, say: with the time and the process, as the parent's lines are
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = _Sender(context, f"ipc://{boot.folder}/up")
    life = _Life(sender, boot.debug)
    threading.excepthook = life.thread_failed
    threading.Thread(target=life.watch_parent, name="octavo-parent", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: life.stop.set())
    code = 1
    try:
        _serve(boot, context, sender, life, dump)
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
        if life.orphaned:
            shutil.rmtree(boot.folder, ignore_errors=True)
    return code


def _serve(boot: Boot, context: "zmq.Context[zmq.Socket[bytes]]", sender: _Sender, life: _Life, dump: HangDump) -> None:
    """Start the engine, and let it run until told to stop."""
    required = boot.config.plugins.require_plugin or ()
    load_general(boot.plugins, required, lambda line: sender.send(Log(line)))
    load_required(required)
    started = build_core(
        boot.config,
        lambda line: sender.send(Log(line)),
        sources=boot.sources,
        sample_vocab_size=boot.sample_vocab_size,
        plugins=boot.plugins,
        enter=lambda phase: sender.send(Entered(phase)),
    )

    def tell(outputs: EngineOutputs) -> None:
        if lost := sender.send_outputs(outputs):
            loop.put(Abort(lost))

    loop = EngineLoop(started.core, on_outputs=tell, on_reply=sender.reply, on_death=life.died)
    loop.start()
    dump.describe = loop.describe
    give_back()
    sender.send(Ready(started.report, os.getpid()))
    heartbeats = _Heartbeats(sender, loop)
    _pump(context, f"ipc://{boot.folder}/down", loop, heartbeats, life)
    end_s = time.monotonic() + STOP_TIMEOUT_S
    while not loop.stop(HEARTBEAT_S) and time.monotonic() < end_s:
        heartbeats.send()


def _debug(on: bool) -> None:
    if on:
        traceback.print_exc(file=sys.stderr)


def _read_boot() -> bytes:
    stream = sys.stdin.buffer
    size = int.from_bytes(stream.read(4), "little")
    return stream.read(size)


class _Heartbeats:
    """Tells the parent how far the engine is.

    Owns: when the next beat is due.
    """

    def __init__(self, sender: _Sender, loop: EngineLoop) -> None:
        self._sender = sender
        self._loop = loop
        self._due_s = 0.0

    def send_if_due(self) -> None:
        """A beat, if the last one is old enough."""
        if time.monotonic() >= self._due_s:
            self.send()

    def send(self) -> None:
        """A beat."""
        self._due_s = time.monotonic() + HEARTBEAT_S
        self._sender.send(self._loop.heartbeat())


def _pump(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, loop: EngineLoop, heartbeats: _Heartbeats, life: _Life
) -> None:
    """Input thread (this one): decode messages and hand them to the loop until told to stop."""
    socket = context.socket(zmq.PULL)
    socket.connect(address)
    decoder: MessageDecoder[Down] = MessageDecoder(Down, on_damaged=life.refuse)
    try:
        while not life.stop.is_set():
            heartbeats.send_if_due()
            if not socket.poll(POLL_MS):
                continue
            message = decoder.decode(socket.recv_multipart())
            if isinstance(message, Bye):
                return
            loop.put(message)
    finally:
        socket.close(linger=0)


if __name__ == "__main__":
    sys.exit(main())
