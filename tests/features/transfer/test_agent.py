"""The data half's end: everything is told to stop, whatever one tier does, and memory in use stays (TIR-21)."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from octavo.base.kvspec import FullAttentionSpec, KVGroup, KVLayout, LayerPlace
from octavo.features.transfer.data import agent, tier_threads
from octavo.features.transfer.data.agent import TransferAgent
from octavo.features.transfer.data.peer_server import PeerDoor
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
        if "hangs" in self.place:
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

    def make(address, seal):
        tiers.append(Odd(address, events))
        return tiers[-1]

    monkeypatch.setattr(tier_threads, "TIERS", {"file": "anything"})
    monkeypatch.setattr(tier_threads, "load_target", lambda target: make)
    monkeypatch.setattr(agent, "CLOSE_S", 0.3)
    part = TransferAgent(
        ("host?size=64KiB", "file:///fails", "file:///hangs", "file:///slow"), {"a": "b"}, PeerDoor(None)
    )
    part.bind(SimpleNamespace(layout=LAYOUT, buffer=torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8)))
    yield part, tiers, events
    events["let go"].set()


def plan(*jobs):
    return SimpleNamespace(
        part=lambda kind: TransferPlan(tier_jobs=jobs) if kind is TransferPlan else None,
        batch=SimpleNamespace(blocks_to_zero=()),
    )


def job(number, tier, kind):
    return TierJob(job=number, tier=tier, kind=kind, keys=(KEY,), rows=() if kind is TierJobKind.FIND else (3,))


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
    hanging = tiers[2]  # each tier's reader, then its writer
    while not hanging.rows:
        time.sleep(0.005)
    began = time.monotonic()
    part.close()
    assert time.monotonic() - began < 3
    assert events["closed"] == ["/fails", "/fails", "/hangs", "/slow", "/slow"]
    events["let go"].set()  # it writes to its row now, which must still be there
    reports(part, 1)
    assert (hanging.rows[0] == 7).all()


def test_what_is_asked_of_a_tier_does_not_wait_for_what_is_written_to_it(made):
    part, _, events = made
    part.prepare(plan(job(1, 2, TierJobKind.WRITE), job(2, 2, TierJobKind.READ), job(3, 2, TierJobKind.FIND)), None)
    assert set(reports(part, 2)) == {2, 3}
    events["let go"].set()
    assert reports(part, 1)[1].good == (True,)
    part.close()
