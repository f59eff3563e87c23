"""A canned server: answers every request with a stream made beforehand, to measure the client alone.

Promises: runs in a process of its own, without torch; the process ends with the block that started it.
Does not know: what is asked, but for how many tokens.

`python -m octavo.bench.canned PAUSE_S TOGETHER` prints its port and serves until its standard input ends.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

from octavo.base.interpreter import module_command

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1760000000,'
    b'"model":"canned","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
USAGE = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1760000000,'
    b'"model":"canned","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%d,"total_tokens":%d}}\n\n'
)
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens":(\d+)')


@contextlib.contextmanager
def canned_server(*, pause_s: float, together: int) -> Iterator[str]:
    """The URL of a canned server that sends `together` events at once, then waits `pause_s` seconds."""
    command = module_command("octavo.bench.canned", str(pause_s), str(together))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        line = process.stdout.readline() if process.stdout else b""
        if not line:
            raise RuntimeError("the canned server did not start")
        yield f"http://127.0.0.1:{int(line)}"
    finally:
        process.kill()
        process.communicate()


def chunk(payload: bytes) -> bytes:
    """A payload in HTTP's chunked framing."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float, together: int) -> None:
    event = chunk(EVENT)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            wanted = _TOKENS.search(body)
            num_tokens = int(wanted[1]) if wanted else 16
            writer.write(HEAD)
            for start in range(0, num_tokens, together):
                writer.write(event * min(together, num_tokens - start))
                await writer.drain()
                await asyncio.sleep(pause_s)
            writer.write(chunk(USAGE % (num_tokens, 3 + num_tokens)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    writer.close()


async def _serve(pause_s: float, together: int) -> None:
    server = await asyncio.start_server(lambda r, w: _answer(r, w, pause_s, together), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]), int(sys.argv[2])))
