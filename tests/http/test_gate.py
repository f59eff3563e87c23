"""Admission, draining and cutting (OPS-10)."""

import asyncio

import pytest

from octavo.base.errors import EngineDead
from octavo.http.errors import ServerStopping
from octavo.http.gate import Gate


def test_nothing_is_let_in_after_stop() -> None:
    async def main() -> None:
        gate = Gate()
        ticket = gate.enter()
        gate.stop()
        assert gate.stopping and gate.num_active == 1
        with pytest.raises(ServerStopping):
            gate.enter()
        gate.leave(ticket)
        gate.leave(ticket)
        assert gate.num_active == 0

    asyncio.run(main())


def test_drained_tells_whether_all_ended_in_time() -> None:
    async def main() -> None:
        gate = Gate()
        assert await gate.drained(0)
        first, second = gate.enter(), gate.enter()
        assert not await gate.drained(0.01)
        gate.leave(first)
        asyncio.get_running_loop().call_later(0.01, gate.leave, second)
        assert await gate.drained(1)

    asyncio.run(main())


def test_cut_tells_each_open_ticket_once() -> None:
    async def main() -> None:
        gate = Gate()
        tickets = [gate.enter() for _ in range(3)]
        gate.leave(tickets[0])
        assert gate.cut(EngineDead("gone")) == 2
        assert gate.cut() == 2
        assert not tickets[0].cut.done()
        assert all(isinstance(t.cut.result(), EngineDead) for t in tickets[1:])

    asyncio.run(main())
