"""A hand-over over NIXL where NIXL itself goes wrong: an agent that does as it is told (PDX-9).

What it does when all is well is tested with the real package in `tests/e2e/test_disagg.py`.
"""

import queue
from contextlib import contextmanager

import numpy as np
import pytest

from octavo.base.errors import ConfigError
from octavo.features.transfer.data import one_sided, over_nixl, session
from octavo.features.transfer.data.guard import LeaseGuard
from octavo.features.transfer.data.one_sided import FarMemory
from octavo.features.transfer.data.over_nixl import NixlFetch, NixlProducerTransport
from octavo.features.transfer.data.over_tcp import TcpProducerTransport
from octavo.features.transfer.data.peer_server import PeerServer
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.session import Sessions
from octavo.features.transfer.data.transport import Pull
from octavo.features.transfer.disagg import LeaseWatch, PullJob
from tests.support.fake_nixl import Agent

SEAL = Seal({"model": "ours"}, [4096])


class Spans:
    """A group's memory, by shape what `regions.KVRegion` is."""

    chunk_bytes = 4096
    memory = np.arange(16 * 4096, dtype=np.uint32).astype(np.uint8)
    spans = ((memory.ctypes.data, 4096, 4096),)


class Rig:
    """Both sides of one lease, over a real socket."""

    def __init__(self, agent):
        self.guard = LeaseGuard(0.2)
        regions = [Spans()]
        self.giver = NixlProducerTransport(self.guard, regions, agent)
        self.server = PeerServer("127.0.0.1", 0, SEAL, [TcpProducerTransport(self.guard, regions, SEAL), self.giver])
        self.sessions = Sessions(SEAL, NixlFetch(regions, FarMemory(agent, 4096)))
        self.done = queue.SimpleQueue()
        self.blocks = {}
        self.guard.open("l", ((5, 6),))
        self.sessions.watch(LeaseWatch(lease="l", address=f"nixl://127.0.0.1:{self.server.port}", lease_s=30.0))

    def pull(self):
        job = PullJob(job=1, lease="l", places=((0, 1),), blocks=((1, 2),))
        self.sessions.pull(Pull(job, self.write, self.done.put))
        return self.done.get(timeout=10)

    def write(self, job, group, at, body):
        self.blocks[job.blocks[group][at]] = bytes(body)


@contextmanager
def rig(agent):
    made = Rig(agent)
    try:
        yield made
    finally:
        made.sessions.stop()
        made.server.close()


def block(number):
    return Spans.memory[number * 4096 :][:4096].tobytes()


def test_what_was_read_counts_when_the_lease_stood():
    agent = Agent()
    with rig(agent) as made:
        report = made.pull()
        assert report.good == (True, True) and report.error is None and agent.tried == 1
        assert made.blocks == {1: block(5), 2: block(6)}


def test_a_transfer_that_goes_on_after_its_time_is_reported_in_time_and_writes_to_no_block(monkeypatch):
    """PDX-9: a frozen producer that wakes writes to a landing that nobody has, and no more is read there before."""
    monkeypatch.setattr(session, "TIMEOUT_S", 0.2)
    agent = Agent(state="PROC")
    with rig(agent) as made:
        report = made.pull()
        assert report.good == (False, False) and "NIXL did not read everything in time" in report.error
        assert not agent.tried  # giving the handle back would not stop it
        report = made.pull()
        assert report.good == (False, False) and "has not ended an earlier read" in report.error
        agent.state = "DONE"
        agent.wake()
        assert made.blocks == {}
        assert made.pull().good == (True, True) and made.blocks == {1: block(5), 2: block(6)}


def test_a_transfer_that_cannot_be_released_keeps_its_memory(caplog):
    """PDX-9."""
    agent = Agent(refusals=2)
    with rig(agent) as made:
        assert made.pull().good == (False, False) and "its memory is kept" in caplog.text
        assert made.pull().good == (False, False) and made.blocks == {}
        assert made.pull().good == (True, True) and agent.tried == 4


@pytest.mark.parametrize("problem", [RuntimeError("no such memory"), "ERR"])
def test_a_read_that_fails_fails_the_fetch_and_makes_the_other_side_known_anew(problem):
    agent = Agent(begins=problem)
    with rig(agent) as made:
        report = made.pull()
        assert report.good == (False, False) and "NIXL" in report.error and made.blocks == {}
        assert not agent.known and agent.tried == 1  # its handle was given back all the same
        agent.begins = "PROC"
        assert made.pull().good == (True, True)


def test_nothing_of_nixl_s_work_goes_on_after_the_end():
    """TIR-19: the thread that lets it work is joined, too."""
    with rig(Agent()) as made:
        thread = made.giver._progress._thread
        made.pull()
    assert not thread.is_alive()


def test_without_the_package_the_start_says_what_to_install(monkeypatch):
    monkeypatch.setattr(one_sided, "nixl", None)
    with pytest.raises(ConfigError, match=r"--kv-transport nixl needs the package nixl: .*pip install"):
        one_sided.open_agent([], over_nixl.OPTION)
