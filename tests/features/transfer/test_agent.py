"""The data half's end: everything is told to stop, whatever one tier does, and memory in use stays (TIR-21)."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from octavo.base.kvspec import FullAttentionSpec, KVGroup, KVLayout, LayerPlace
from octavo.features.transfer.data import agent, tier_threads
from octavo.features.transfer.data.agent import TransferAgent
from octavo.features.transfer.data.peer_server import PeerListener
from octavo.features.transfer.plan import TierJob, TierJobKind, TransferPlan, TransferReport

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=8, dtype="float32")
LAYOUT = KVLayout(
    groups=(KVGroup(index=0, spec=SPEC, layers=(0,)),),
    places=(LayerPlace(layer=0, group=0, offset=0, block_stride=SPEC.page_bytes),),
    num_blocks=8,
    block_bytes=SPEC.page_bytes,
    total_bytes=8 * SPEC.page_bytes,
)
KEY = bytes(36)


class Odd:
    """A tier that hangs or fails, by its address.

    Owns: what it was told.
    """

    def __init__(self, address, events):
        self.place, self.events = address.place, events
        self.rows = []

    def find(self, keys):
        if "fails" in self.place:
            raise OSError("out of order")
        return [False] * len(keys)

    def read(self, keys, rows):
        self.rows = rows
        if "hangs" in self.place and self.events.get("hangs", True):
            self.events["let go"].wait(30)
        rows[0][:] = 7
        return [True] * len(keys)

    def write(self, keys, rows):
        if "slow" in self.place:
            self.events["let go"].wait(30)
        return [True] * len(keys)

    def close(self):
        self.events["closed"].append(self.place)
        if "fails" in self.place:
            raise OSError("it does not close")


@pytest.fixture
def made(monkeypatch):
    events, tiers = {"closed": [], "let go": threading.Event()}, []

    def make(address, seal, health):
        tiers.append(Odd(address, events))
        return tiers[-1]

    monkeypatch.setattr(tier_threads, "TIERS", {"file": "anything"})
    monkeypatch.setattr(tier_threads, "load_target", lambda target: make)
    monkeypatch.setattr(agent, "CLOSE_S", 0.3)
    monkeypatch.setattr(agent, "measure", lambda *_: {})
    part = TransferAgent(
        ("host?size=64KiB", "file:///fails", "file:///hangs", "file:///slow"), {"a": "b"}, PeerListener(None)
    )
    part.bind(SimpleNamespace(layout=LAYOUT, buffer=torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8)))
    yield part, tiers, events
    events["let go"].set()


def plan(*jobs):
    return SimpleNamespace(
        part=lambda kind: TransferPlan(tier_jobs=jobs) if kind is TransferPlan else None,
        batch=SimpleNamespace(blocks_to_zero=()),
    )


def job(number, tier, kind, row=3):
    return TierJob(job=number, tier=tier, kind=kind, keys=(KEY,), rows=() if kind is TierJobKind.FIND else (row,))


def reports(part, count):
    found, end = [], time.monotonic() + 10
    while len(found) < count:
        report = part.report()
        found += [] if report is None else report.jobs
        assert isinstance(report, TransferReport | None) and time.monotonic() < end
        time.sleep(0.005)
    return {each.job: each for each in found}


def test_a_tier_that_fails_or_hangs_holds_up_no_other_and_is_reported(made):
    part, _, _ = made
    part.prepare(plan(job(1, 0, TierJobKind.FIND), job(2, 1, TierJobKind.READ), job(3, 2, TierJobKind.FIND)), None)
    found = reports(part, 2)
    assert set(found) == {1, 3}
    assert found[1].good == (False,) and found[1].error == "OSError: out of order"
    assert found[3].good == (False,) and found[3].error is None
    part.close()


def test_at_the_end_every_tier_is_closed_but_one_that_is_still_busy_whose_memory_stays(made):
    part, tiers, events = made
    part.prepare(plan(job(1, 1, TierJobKind.READ)), None)
    end = time.monotonic() + 10
    while not (hanging := [tier for tier in tiers if tier.rows]):
        assert time.monotonic() < end
        time.sleep(0.005)
    began = time.monotonic()
    part.close()
    assert time.monotonic() - began < 3
    each = tier_threads.FINDERS + tier_threads.READERS + tier_threads.WRITERS
    assert events["closed"] == ["/fails"] * each + ["/hangs"] * (each - 1) + ["/slow"] * each
    events["let go"].set()  # it writes to its row now, which must still be there
    reports(part, 1)
    assert (hanging[0].rows[0] == 7).all()


def test_what_is_asked_of_a_tier_does_not_wait_for_what_is_written_to_it(made):
    part, _, events = made
    part.prepare(plan(job(1, 2, TierJobKind.WRITE), job(2, 2, TierJobKind.READ), job(3, 2, TierJobKind.FIND)), None)
    assert set(reports(part, 2)) == {2, 3}
    events["let go"].set()
    assert reports(part, 1)[1].good == (True,)
    part.close()


def test_neither_a_lookup_nor_another_read_waits_for_a_read_that_takes_long(made):
    """F37: lookups queued behind reads, and reads behind those of others."""
    part, _, events = made
    part.prepare(plan(job(1, 1, TierJobKind.READ)), None)
    part.prepare(plan(job(2, 1, TierJobKind.FIND)), None)
    assert set(reports(part, 1)) == {2}
    events["hangs"] = False  # what is read from now on comes at once
    part.prepare(plan(job(3, 1, TierJobKind.READ, row=4)), None)
    assert reports(part, 1)[3].good == (True,)
    events["let go"].set()
    assert reports(part, 1)[1].good == (True,)
    part.close()


def test_when_all_that_could_read_hang_what_is_asked_fails_at_once_and_the_tier_comes_back(made, monkeypatch, caplog):
    """F36: a folder of a network that is gone holds whoever calls it; F39: one line."""
    part, tiers, events = made
    monkeypatch.setattr(tier_threads, "STUCK_S", 0.1)
    count = tier_threads.READERS
    part.prepare(plan(*(job(n, 1, TierJobKind.READ, row=n) for n in range(1, count + 1))), None)
    end = time.monotonic() + 10
    while sum(bool(tier.rows) for tier in tiers) < count:
        assert time.monotonic() < end
        time.sleep(0.005)
    time.sleep(0.15)
    began = time.monotonic()
    for number in range(11, 31):
        part.prepare(plan(job(number, 1, TierJobKind.READ)), None)
        part.prepare(plan(job(number + 100, 1, TierJobKind.FIND)), None)
    found = reports(part, 40)
    assert not any(any(each.good) for each in found.values()) and time.monotonic() - began < 5
    assert len([r for r in caplog.records if "has not ended" in r.getMessage()]) == 1
    events["let go"].set()
    assert set(reports(part, count)) == set(range(1, count + 1))
    part.prepare(plan(job(50, 1, TierJobKind.READ)), None)
    assert reports(part, 1)[50].good == (True,)
    part.close()


def test_a_tier_that_raises_each_time_is_named_in_the_log_and_not_each_time(made, caplog):
    """F39: a line for each of its jobs, without its name."""
    part, _, _ = made
    part.prepare(plan(*(job(number, 0, TierJobKind.FIND) for number in range(40))), None)
    reports(part, 40)
    part.close()
    (line,) = [text for record in caplog.records if "out of order" in (text := record.getMessage())]
    assert "file:///fails" in line and "OSError" in line
