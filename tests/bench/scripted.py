"""A server that answers by a script, so that a client's reading and accounting can be checked to the byte.

Promises: answers are what the script says, byte for byte, in the pieces it says; every request is kept.
Does not know: HTTP beyond what it takes to read a request.
"""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@dataclass
class Request:
    """One request, as it came."""

    head: bytes
    body: dict[str, Any]
    connection: int


Script = Callable[[Request], AsyncIterator[bytes | None]]  # bytes to send; None closes the connection


@dataclass
class Scripted:
    """The server's address and what it has seen.

    Owns: requests, and how many were open at once.
    """

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    max_open: int = 0


def chunk(payload: bytes) -> bytes:
    """HTTP's chunked framing."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(value: Any) -> bytes:
    """A server-sent event."""
    return (
        b"data: " + (value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()) + b"\n\n"
    )


def token(text: str, **more: Any) -> bytes:
    """A completion's event."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}], **more})


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    """The event with the usage."""
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return event({"choices": [], "usage": found})


def plain(status: int, value: Any, extra: bytes = b"") -> bytes:
    """A whole answer."""
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b" % (
        status, extra, len(body), body,
    )  # fmt: skip


async def words(request: Request) -> AsyncIterator[bytes | None]:
    """As many tokens as were asked for, then the usage."""
    num = request.body["max_tokens"]
    yield STREAM_HEAD
    for i in range(num):
        yield chunk(token(f" w{i}"))
        await asyncio.sleep(0)
    yield chunk(usage(7, num)) + chunk(event(b"[DONE]")) + END


@contextlib.contextmanager
def scripted(script: Script = words) -> Iterator[Scripted]:
    """Serve by this script on 127.0.0.1 in a thread of its own."""
    state = Scripted()
    ready, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = state.num_connections
        state.num_connections += 1
        try:
            while await answer(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        """One request; False when the script ends the connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        request = Request(head, json.loads(await reader.readexactly(int(length[1]))), number)
        state.requests.append(request)
        state.num_open += 1
        state.max_open = max(state.max_open, state.num_open)
        try:
            async for piece in script(request):
                if piece is None:
                    return False
                writer.write(piece)
                await writer.drain()
        finally:
            state.num_open -= 1
        return True

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()
        await asyncio.sleep(0.01)  # a connection that is just being accepted becomes a task
        while tasks := [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="scripted", daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield state
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(20)
    assert not thread.is_alive()
