"""How fast tiers give is known before the first lookup, and costs the start little, whatever a tier does (TIR-33)."""

import threading
import time

import numpy as np
import pytest

from octavo.features.transfer.address import parse_tiers
from octavo.features.transfer.data import probe, tier_threads
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.tier_file import FileTier
from octavo.features.transfer.data.tier_threads import TierThreads
from tests.features.transfer.test_offload import TURNS, plain, run  # noqa: F401

SEAL = Seal({"a": "b"}, [1 << 16])


class Shelf:
    """A tier whose reads take a while, by its address: `hangs` for ever, `fails`, `slow` 20 ms a chunk.

    Owns: what it holds.
    """

    def __init__(self, place, let_go):
        self.place, self.let_go, self.held = place, let_go, {}

    def find(self, keys):
        return [key in self.held for key in keys]

    def read(self, keys, rows):
        if "hangs" in self.place:
            self.let_go.wait(30)
        if "slow" in self.place:
            time.sleep(0.02 * len(keys))
        return [key in self.held for key in keys]

    def write(self, keys, rows):
        if "fails" in self.place:
            raise OSError("out of order")
        self.held.update(dict.fromkeys(keys))
        return [True] * len(keys)

    def close(self):
        return None


@pytest.fixture
def shelves(monkeypatch):
    let_go, made = threading.Event(), {}

    def make(address, seal, health):
        return made.setdefault(address.place, Shelf(address.place, let_go))

    monkeypatch.setattr(tier_threads, "TIERS", {"file": "anything"})
    monkeypatch.setattr(tier_threads, "load_target", lambda target: make)
    yield made
    let_go.set()


def measured(*texts):
    addresses = parse_tiers(texts)[1:]
    threads = [TierThreads(address, SEAL) for address in addresses]
    began = time.monotonic()
    found = probe.measure(addresses, threads, SEAL)
    took = time.monotonic() - began
    for each in threads:
        each.stop()
    return found, took


def test_each_tier_s_speed_is_measured_beside_those_that_hang_or_fail(shelves, monkeypatch):
    monkeypatch.setattr(probe, "PROBE_S", 1.0)
    found, took = measured("file:///hangs", "file:///fails", "file:///slow", "file:///quick")
    assert set(found) == {"file:///slow", "file:///quick"} and took < 5
    assert found["file:///slow"] < (1 << 16) / 0.02 < found["file:///quick"]


def test_a_tier_that_holds_little_is_not_filled_with_probes(shelves):
    found, _ = measured(f"file:///tiny?size={8 << 16}", f"file:///small?size={32 << 16}", "file:///large")
    assert set(found) == {"file:///small", "file:///large"}
    assert {place: len(shelf.held) for place, shelf in shelves.items()} == {"/tiny": 0, "/small": 2, "/large": 8}


def test_a_probe_of_files_is_read_from_the_disk_and_leaves_nothing(tmp_path):
    found, _ = measured(f"file://{tmp_path}")
    assert found[f"file://{tmp_path}"] > 0
    assert list(tmp_path.rglob("*.kv")) == []
    tier = tier_threads.TierThreads(parse_tiers((f"file://{tmp_path}",))[1], SEAL)
    tier.stop()


def test_files_can_be_cooled_and_removed(tmp_path):
    done = []
    threads = TierThreads(parse_tiers((f"file://{tmp_path}",))[1], SEAL)
    key, row = bytes(36), np.arange(1 << 16, dtype=np.uint32).view(np.uint8)[: 1 << 16].copy()

    def work(tier):
        assert isinstance(tier, FileTier) and isinstance(tier, probe.OnDisk)
        there = np.zeros_like(row)
        tier.write([key], [row])
        tier.cool([key])
        done.append(tier.read([key], [there]) == [True] and (there == row).all())
        tier.remove([key])
        done.append(tier.find([key]) == [False])

    threads.put(tier_threads.TierJobKind.READ, work)
    end = time.monotonic() + 20
    while len(done) < 2:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert done == [True, True]
    threads.stop()


def test_a_tier_that_is_slower_than_computing_is_not_asked_even_once(plain, tmp_path, monkeypatch):  # noqa: F811
    """Not tried first and learnt after: what is there is known to be too slow from the start."""
    tiers = ("host?size=4MiB", f"file://{tmp_path}")
    name = tiers[1]
    run(TURNS[:1], kv_tier=tiers)
    real = FileTier.read

    def slowly(self, keys, rows):
        time.sleep(0.05 * len(keys))
        return real(self, keys, rows)

    monkeypatch.setattr(FileTier, "read", slowly)
    texts, sources, stats = run(TURNS[:1], kv_tier=tiers, try_again=64)
    assert texts == plain[:1] and sources == [{}]
    assert stats[f"{name}.lookups"] == 0 and stats[f"{name}.not_worth"] == 1
