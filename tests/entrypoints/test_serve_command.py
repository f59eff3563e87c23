"""The address that `octavo serve` holds."""

import asyncio
import contextlib
import socket

import pytest

from octavo.base.errors import ConfigError
from octavo.entrypoints.commands.serve import bind


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
