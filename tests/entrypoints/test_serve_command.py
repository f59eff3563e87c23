"""The address that `octavo serve` holds."""

import asyncio
import contextlib
import re
import socket
import time

import pytest

from octavo.base.errors import ConfigError
from octavo.entrypoints.commands.serve import bind
from octavo.http.life import stopping
from tests.support import checkpoints
from tests.support.http_server import wait_until
from tests.support.live import spawn


async def accepted_option(listener: socket.socket) -> int:
    """TCP_NODELAY of a connection that asyncio accepted from the listener."""
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(connected, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        result = await asyncio.wait_for(found, 10)
        writer.close()
    return result


def test_an_answer_in_several_writes_does_not_wait_for_acknowledgements():
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        assert asyncio.run(accepted_option(listener)) != 0


def test_a_port_in_use_is_named():
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


def test_a_server_tells_requests_and_figures_and_is_silent_when_idle():
    """F53: the access log is on, figures come while there is work and stop with it."""
    with spawn(str(checkpoints.tiny_llama()), "--max-model-len", "128", "--stats-interval-s", "0.2") as server:
        server.http.get("/health")
        server.complete([5, 6, 7], max_tokens=100, ignore_eos=True)
        figures = r"running \d+, waiting \d+, prompt \d+\.\d tok/s, generation \d+\.\d tok/s, KV \d+\.\d%"
        assert wait_until(lambda: any(re.search(figures, line) for line in server.lines), 10), server.lines
        told = r'"POST /v1/completions" 200 prompt 3, completion 100, first token'
        assert wait_until(lambda: any(re.search(told, line) for line in server.lines), 10), server.lines
        assert not any("/health" in line for line in server.lines)
        told = len(server.lines)
        time.sleep(1.0)
        assert len(server.lines) <= told + 1  # the last figures


def test_the_access_log_and_the_figures_can_be_turned_off():
    """F53."""
    options = ("--max-model-len", "128", "--stats-interval-s", "0", "--disable-access-log")
    with spawn(str(checkpoints.tiny_llama()), *options) as server:
        told = len(server.lines)
        server.complete([5, 6, 7], max_tokens=60, ignore_eos=True)
        time.sleep(0.5)
        assert server.lines[told:] == []


def test_a_stop_says_what_it_waits_for():
    assert stopping(0, 15) == "stopping; no request is running"
    assert stopping(1, 15).startswith("stopping; 1 request may take up to 15 s")
    assert "2 requests" in stopping(2, 0.5) and "Ctrl-C" in stopping(2, 0.5)
