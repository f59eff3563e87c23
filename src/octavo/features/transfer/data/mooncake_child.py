"""The process that speaks to a Mooncake store for an engine (PDX-11); started by its file, beside the engine.

Promises: it ends when the engine does; each line serves one question after the other, and lines do not wait for each
other; values lie in memory that the line shares with the engine and go through no pipe.
Does not know: what a value is. It imports nothing of Octavo, so it is there in a tenth of a second.

It is a process of its own since Mooncake's client holds Python's lock while it looks for its master, which takes a
minute and a half when that is gone, and since nothing ends a call into it but the end of its process.
"""

import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from typing import Any, Final

QUESTION: Final = struct.Struct("<cIQ")  # what is asked, bytes of the names after it, bytes of the value
CODE: Final = struct.Struct("<q")
EXISTS, GET, PUT, REMOVE = b"E", b"G", b"P", b"R"
READY: Final = b"ready"
NO_METADATA: Final = "P2PHANDSHAKE"  # the master tells where things are; no other server is needed
LEAVE_TO_OTHERS: Final = 0  # bytes of memory that this process gives to the pool


def main() -> None:
    """`argv`: the engine's control socket and the settings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the engine, which ends this
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    try:
        store = _open(settings)
    except Exception as error:  # whatever it is, the engine is to hear of it
        control.send(str(error).encode()[:1000])
        return
    control.send(READY)
    while True:
        asked, files, _, _ = socket.recv_fds(control, 1, 2)
        if not asked:
            os._exit(0)  # the engine has ended; calls under way end with it
        threading.Thread(target=_serve, args=(store, *files, settings["room"]), daemon=True).start()


def _open(settings: dict[str, Any]) -> Any:
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415  (what it raises is said to the engine)

    store = MooncakeDistributedStore()
    master = settings["master"]
    code = store.setup(_own_address(master), NO_METADATA, LEAVE_TO_OTHERS, settings["buffer"], "tcp", "", master)
    if code:
        raise RuntimeError(f"its master {master} does not answer; see whether mooncake_master runs there (code {code})")
    return store


def _own_address(master: str) -> str:
    """This machine's address as the master sees it, as far as the system knows."""
    host, _, port = master.rpartition(":")
    try:
        family, kind, _, _, to = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(to)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return "127.0.0.1"


def _serve(store: Any, line_file: int, memory_file: int, room: int) -> None:
    """One line, until the engine hangs up."""
    memory = mmap.mmap(memory_file, room)
    os.close(memory_file)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with socket.socket(fileno=line_file) as line:
        registered = store.register_buffer(place, room)
        while head := _exactly(line, QUESTION.size):
            kind, length, size = QUESTION.unpack(head)
            names = _exactly(line, length).decode().split("\n")
            codes = [registered] * len(names) if registered else _answer(store, kind, names, place, size)
            line.sendall(b"".join(map(CODE.pack, codes)))
        store.unregister_buffer(place)


def _answer(store: Any, kind: bytes, names: list[str], place: int, size: int) -> list[int]:
    if kind == EXISTS:
        return list(store.batch_is_exist(names))
    if kind == GET:
        return [store.get_into(names[0], place, size)]
    if kind == PUT:
        return [store.put_from(names[0], place, size)]
    return [store.remove(names[0], True)]


def _exactly(line: socket.socket, size: int) -> bytes:
    """So many bytes; none when the engine hung up."""
    out = b""
    while len(out) < size:
        try:
            part = line.recv(size - len(out))
        except OSError:
            return b""
        if not part:
            return b""
        out += part
    return out


if __name__ == "__main__":
    main()
