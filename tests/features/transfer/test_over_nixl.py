"""A hand-over over NIXL where NIXL itself goes wrong: an agent that does as it is told (PDX-9).

What it does when all is well is tested with the real package in `tests/e2e/test_handover.py`.
"""

import queue
import threading
import time
from contextlib import contextmanager

import pytest

from octavo.base.errors import ConfigError
from octavo.features.transfer.data import over_nixl, session
from octavo.features.transfer.data.guard import LeaseGuard
from octavo.features.transfer.data.over_nixl import NixlFetch, NixlGiver
from octavo.features.transfer.data.over_tcp import LeaseGiver
from octavo.features.transfer.data.peer_server import PeerServer
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.session import Sessions
from octavo.features.transfer.data.transport import Pull
from octavo.features.transfer.handover import LeaseEvent, LeaseNews, PullJob, Watch

SEAL = Seal({"model": "ours"}, [4096])


class Spans:
    """A group's memory, by shape what `regions.KVRegion` is."""

    chunk_bytes = 4096
    spans = ((1 << 20, 4096, 4096),)


class Agent:
    """NIXL, by shape. Owns: what it was told to do, and did."""

    def __init__(self, *, state="DONE", begins="DONE", refusals=0):
        self.state, self.begins, self.refusals = state, begins, refusals
        self.released, self.tried, self.known = threading.Event(), 0, []

    def get_agent_metadata(self):
        return b"me"

    def get_new_notifs(self):
        return {}

    def add_remote_agent(self, metadata):
        self.known.append(metadata)
        return "them"

    def remove_remote_agent(self, name):
        self.known.clear()

    def get_xfer_descs(self, parts, memory):
        return parts

    def initialize_xfer(self, *what):
        return what

    def transfer(self, handle):
        if isinstance(self.begins, Exception):
            raise self.begins
        return self.begins

    def check_xfer_state(self, handle):
        return self.state

    def release_xfer_handle(self, handle):
        self.tried += 1
        if self.tried <= self.refusals:
            raise RuntimeError("the transfer is still under way")
        self.released.set()


class Rig:
    """Both sides of one lease, over a real socket."""

    def __init__(self, agent):
        self.guard = LeaseGuard(0.2)
        regions = [Spans()]
        self.giver = NixlGiver(self.guard, regions, agent)
        self.server = PeerServer("127.0.0.1", 0, SEAL, [LeaseGiver(self.guard, regions, SEAL), self.giver])
        self.sessions = Sessions(SEAL, NixlFetch(regions, agent))
        self.done = queue.SimpleQueue()
        self.guard.open("l", ((5, 6),))
        self.sessions.watch(Watch(lease="l", address=f"nixl://127.0.0.1:{self.server.port}", lease_s=30.0))

    def pull(self):
        job = PullJob(job=1, lease="l", places=((0, 1),), blocks=((1, 2),))
        self.sessions.pull(Pull(job, lambda *_: None, self.done.put))


@contextmanager
def rig(agent):
    made = Rig(agent)
    try:
        yield made
    finally:
        made.sessions.stop()
        made.server.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(over_nixl, "CANCEL_S", 0.05)


def test_what_was_read_counts_when_the_lease_stood():
    agent = Agent()
    with rig(agent) as made:
        made.pull()
        report = made.done.get(timeout=10)
        assert report.good == (True, True) and report.error is None and agent.tried == 1


@pytest.mark.parametrize("agent", [Agent(state="PROC", begins="PROC", refusals=4), Agent(begins="ERR", refusals=4)])
def test_a_transfer_that_cannot_be_released_keeps_its_handle_and_the_blocks_on_both_sides(agent, monkeypatch, caplog):
    """PDX-9: nothing is reported, and so no block given to anybody else, while something may still write to it; the
    producer's blocks stay fenced as long, too."""
    monkeypatch.setattr(session, "TIMEOUT_S", 0.2)
    with rig(agent) as made:
        made.pull()
        end = time.monotonic() + 10
        while not agent.tried:
            assert time.monotonic() < end
            time.sleep(0.005)
        made.guard.close("l")
        while not agent.released.is_set():
            assert made.done.empty()
            assert LeaseEvent("l", LeaseNews.CLOSED) not in made.guard.news()
            assert time.monotonic() < end
            time.sleep(0.005)
        report = made.done.get(timeout=10)
        assert report.good == (False, False) and "NIXL" in report.error
        assert agent.tried == 5 and "its blocks are kept" in caplog.text
        news = list(made.guard.news())
        while LeaseEvent("l", LeaseNews.CLOSED) not in news:
            assert time.monotonic() < end + 5
            news += made.guard.news()
            time.sleep(0.005)


def test_a_read_that_cannot_begin_fails_the_fetch_and_makes_the_other_side_known_anew():
    agent = Agent(begins=RuntimeError("no such memory"))
    with rig(agent) as made:
        made.pull()
        report = made.done.get(timeout=10)
        assert report.good == (False, False) and "NIXL cannot read there: no such memory" in report.error
        assert not agent.known and agent.tried == 1  # its handle was given back all the same


def test_nothing_of_nixl_s_work_goes_on_after_the_end():
    """TIR-19: the thread that lets it work is joined, too."""
    with rig(Agent()) as made:
        thread = made.giver._progress._thread
        made.pull()
        made.done.get(timeout=10)
    assert not thread.is_alive()


def test_without_the_package_the_start_says_what_to_install(monkeypatch):
    monkeypatch.setattr(over_nixl, "nixl", None)
    with pytest.raises(ConfigError, match="needs the package nixl"):
        over_nixl.open_agent([])
