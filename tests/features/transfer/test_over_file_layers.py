"""A hand-over layer by layer through a folder: the same bytes as whole prompts, whatever happens to the folder (PDX-3)."""

import contextlib
import os
import queue
import shutil
import threading
import time
from itertools import product

import numpy as np
import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.base.kvspec import FullAttentionSpec, SlidingWindowSpec
from octavo.features.transfer.data import over_file, over_file_layers
from octavo.features.transfer.data.peer_server import PeerListener
from octavo.features.transfer.data.regions import layers_of, regions_of
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.transport import Place, Pull, find_transport
from octavo.features.transfer.disagg import LeaseDrop, LeaseNews, LeaseWatch, PullJob, Save, TransferRole
from octavo.worker.memory import KVMemory, scratch_layout

LEASE = "a1b2"
IDENTITY = {"model": "m", "dtype": "d"}


class Rig:
    """A producer's and a consumer's memory, and the ends of one way between them."""

    def __init__(self, folder, *, by_layer=True, num_tokens=70, block_size=16, dtype="float32", mixed=True, layers=3):
        full = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_dim=8, dtype=dtype)
        window = SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_dim=16, dtype=dtype, window=32)
        specs = [window if mixed and i % 2 else full for i in range(layers)]
        self.layout = scratch_layout(specs, (num_tokens,) * 2)
        self.num_tokens, self.block_size, self.by_layer = num_tokens, block_size, by_layer
        self.there, self.here = (KVMemory(self.layout, torch.device("cpu")) for _ in range(2))
        self.there.buffer.copy_(
            torch.from_numpy(np.random.default_rng(7).integers(0, 256, self.layout.total_bytes, dtype=np.uint8))
        )
        count = -(-num_tokens // block_size)
        self.blocks = tuple(tuple(range(1 + g * count, 1 + (g + 1) * count)) for g in range(len(self.layout.groups)))
        self.producer = self.make(folder, TransferRole.PRODUCER, self.there)[0]
        self.consumer = self.make(folder, TransferRole.CONSUMER, self.here)[1]
        self.reports = queue.SimpleQueue()

    def make(self, folder, role, memory):
        regions = regions_of(memory, "--kv-role")
        seal = Seal(IDENTITY, [region.chunk_bytes for region in regions])
        layers = layers_of(memory) if self.by_layer else ()
        place = Place(
            role=role, address=str(folder), regions=regions, seal=seal, listener=PeerListener(None), layers=layers
        )
        return find_transport("file:///x", by_layer=self.by_layer)(place)

    def save(self, begin, end):
        """A step that computes these tokens; blocks of a group that are full then, or as full as they get, are saved."""
        size = self.block_size
        first, last = begin // size, -(-end // size) if end == self.num_tokens else end // size
        places = tuple(tuple(range(first, last)) for _ in self.blocks)
        blocks = tuple(row[first:last] for row in self.blocks)
        self.producer.begin_saves((Save(lease=LEASE, places=places, blocks=blocks),))
        for layer in range(len(self.layout.places)):
            self.producer.save_layer(layer)
        self.producer.wait_for_save()

    def grant(self):
        self.producer.open(LEASE, self.blocks)
        return news(self.producer, LEASE)

    def pull(self, *, in_step):
        places = tuple(tuple(range(len(row))) for row in self.blocks)
        blocks = tuple(row[::-1] for row in self.blocks)
        job = PullJob(job=1, lease=LEASE, places=places, blocks=blocks, in_step=in_step)
        return Pull(job, self._write, self.reports.put)

    def _write(self, job, group, at, body):
        regions_of(self.here, "")[group].write(job.blocks[group][at], np.frombuffer(body, dtype=np.uint8))

    def load(self, *, in_step=True):
        """What the consumer's report says, after a step, or beside the steps."""
        if not in_step:
            self.consumer.pull(self.pull(in_step=False))
            return self.reports.get(timeout=20)
        self.consumer.begin_loads([self.pull(in_step=True)])
        for layer in range(len(self.layout.places)):
            self.consumer.wait_for_layer(layer)
        self.consumer.end_loads()
        return self.reports.get_nowait()

    def content(self, memory, group, block):
        row = np.empty(regions_of(memory, "")[group].chunk_bytes, dtype=np.uint8)
        regions_of(memory, "")[group].read(block, row)
        return row.tobytes()

    def check(self, good):
        """What is said to be good is what the producer has."""
        at = 0
        for group, row in enumerate(self.blocks):
            for block, here in zip(row, row[::-1], strict=True):
                if good[at]:
                    assert self.content(self.here, group, here) == self.content(self.there, group, block)
                at += 1
        assert at == len(good)

    def stop(self):
        self.consumer.stop()
        self.producer.stop()


def news(end, lease, timeout_s=20.0):
    limit = time.monotonic() + timeout_s
    while not (seen := end.news()):
        assert time.monotonic() < limit
        time.sleep(0.005)
    assert [event.lease for event in seen] == [lease]
    return seen[0].news


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    made.stop()


def prompt(tmp_path):
    (found,) = tmp_path.glob(f"*/{LEASE}")
    return found


def test_each_layer_is_written_in_its_step_and_read_before_it_is_needed(rig, tmp_path):
    for begin, end in ((0, 33), (33, 64), (64, 70)):
        rig.save(begin, end)
    rig.there.buffer[: rig.layout.total_bytes // 2] = 0  # the blocks went to somebody else
    want = KVMemory(rig.layout, torch.device("cpu"))
    want.buffer.copy_(
        torch.from_numpy(np.random.default_rng(7).integers(0, 256, rig.layout.total_bytes, dtype=np.uint8))
    )
    rig.there = want
    assert rig.grant() is LeaseNews.DONE
    report = rig.load()
    assert all(report.good) and report.error is None
    assert report.num_bytes == sum(
        rig.layout.groups[p.group].spec.page_bytes * len(rig.blocks[p.group]) for p in rig.layout.places
    )
    rig.check(report.good)
    rig.consumer.drop(LeaseDrop(lease=LEASE, done=True))
    rig.consumer.stop()
    assert not list(tmp_path.glob("*/*"))


def compare(tmp_path, chunk, in_step, **shape):
    """Layer by layer against whole prompts: the same memory at the consumer."""
    seen = []
    for by_layer in (False, True):
        folder = tmp_path / str(by_layer)
        rig = Rig(folder, by_layer=by_layer, **shape)
        try:
            for begin in range(0, rig.num_tokens if by_layer else 0, chunk):
                rig.save(begin, min(begin + chunk, rig.num_tokens))
            assert rig.grant() is LeaseNews.DONE
            report = rig.load(in_step=in_step and by_layer)
            assert all(report.good)
            seen.append((rig.here.buffer.numpy().tobytes(), report.good, report.num_bytes))
        finally:
            rig.stop()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("in_step", [True, False])
def test_the_consumer_has_the_same_bytes_as_with_whole_prompts(tmp_path, in_step):
    compare(tmp_path, 24, in_step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "in_step", "num_tokens", "block_size", "dtype", "mixed"),
    list(product((1, 7, 64, 999), (True, False), (1, 16, 65, 1100), (16, 64), ("bfloat16", "int8"), (True, False))),
)
def test_the_same_over_a_grid(tmp_path, chunk, in_step, num_tokens, block_size, dtype, mixed):
    if num_tokens > 100 and chunk < 64:
        chunk *= 50
    compare(tmp_path, chunk, in_step, num_tokens=num_tokens, block_size=block_size, dtype=dtype, mixed=mixed)


def test_what_was_not_saved_in_the_steps_is_written_in_the_end(rig, monkeypatch):
    monkeypatch.setattr(over_file_layers, "MOST_HELD", 0)
    rig.save(0, 33)
    monkeypatch.setattr(over_file_layers, "MOST_HELD", 1 << 20)
    rig.save(33, 64)
    assert rig.grant() is LeaseNews.DONE
    report = rig.load()
    assert all(report.good)
    rig.check(report.good)


def test_a_folder_that_cannot_be_written_to_holds_up_no_step(rig, tmp_path, caplog):
    """PDX-3: wait_for_save waits for copies in memory only."""
    (folder,) = tmp_path.iterdir()
    (folder / f"{LEASE}.part").touch()  # no folder can be made here
    rig.save(0, 70)
    assert rig.grant() is LeaseNews.ABORTED and "could not be put there" in caplog.text


def test_a_prompt_whose_beginning_was_swept_away_is_whole_all_the_same(rig, tmp_path):
    rig.save(0, 64)
    rig.producer.forget("another")
    rig.producer.close("another")  # behind what was saved
    news(rig.producer, "another")
    shutil.rmtree(next(tmp_path.glob("*/*.part")))
    rig.save(64, 70)
    rig.grant()
    assert all(rig.load().good)


def test_a_prompt_that_is_not_kept_leaves_nothing(rig, tmp_path):
    rig.save(0, 64)
    rig.producer.forget(LEASE)
    rig.producer.close(LEASE)
    assert news(rig.producer, LEASE) is LeaseNews.CLOSED
    assert not list(tmp_path.glob("*/*"))


def test_damage_in_one_layer_is_damage_to_those_blocks_and_no_others(rig, tmp_path):
    """PDX-4: altered, cut off, missing."""
    rig.save(0, 70)
    rig.grant()
    altered, cut, gone = (prompt(tmp_path) / f"{layer}.kv" for layer in range(3))
    data = bytearray(altered.read_bytes())
    record = len(data) // 5
    data[2 * record - 1] ^= 1
    altered.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[: 3 * record - 1] if cut.stat().st_size == len(data) else cut.read_bytes()[:-1])
    good = rig.load().good
    assert good[:5] == (True, False, True, True, True) and not all(good[5:]) and good[5]
    rig.check(good)
    gone.unlink()
    report = rig.load()
    assert not any(report.good[:5]) and "No such file" in report.error


def test_a_layer_that_never_comes_holds_up_a_step_for_a_bounded_time_and_is_never_written_later(
    rig, tmp_path, monkeypatch
):
    """PDX-3, PDX-4: a folder that hangs in the middle of a step."""
    monkeypatch.setattr(over_file_layers, "STALL_S", 0.3)
    rig.save(0, 70)
    rig.grant()
    stuck = prompt(tmp_path) / "1.kv"
    content = stuck.read_bytes()
    stuck.unlink()
    os.mkfifo(stuck)  # to open it waits for who writes
    report = rig.load()
    assert all(report.good[:5]) and not any(report.good[5:]) and "gave nothing for 0.3 s" in report.error
    before = rig.here.buffer.clone()

    def write():
        with contextlib.suppress(BrokenPipeError):
            stuck.write_bytes(content[:100])

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(10)
    rig.consumer._team.submit(lambda: None).result(10)
    assert torch.equal(rig.here.buffer, before)
    rig.consumer.watch(LeaseWatch(lease=LEASE, address="file:///x", lease_s=30))
    time.sleep(0.1)
    assert rig.consumer.news() == (), "no step waits for this folder now"


def test_a_consumer_hears_when_a_prompt_is_there_or_does_not_come(rig, monkeypatch):
    rig.consumer.watch(LeaseWatch(lease=LEASE, address="file:///x", lease_s=30))
    assert rig.consumer.news() == ()
    rig.save(0, 70)
    assert rig.consumer.news() == (), "a prompt that is still written is not there"
    rig.grant()
    assert news(rig.consumer, LEASE) is LeaseNews.THERE
    monkeypatch.setattr(over_file_layers, "WAIT_S", 0.1)
    rig.consumer.watch(LeaseWatch(lease="never", address="file:///x", lease_s=30))
    assert news(rig.consumer, "never") is LeaseNews.LOST


def test_only_transports_that_can_hand_layers_over_are_taken(tmp_path):
    for text in ("tcp", "nixl", "some.module:make"):
        with pytest.raises(
            ConfigError, match=f"--kv-by-layer: --kv-transport {text} hands over whole prompts only; give"
        ):
            find_transport(text, by_layer=True)
    assert find_transport("file:///x", by_layer=True) is over_file_layers.make
    assert find_transport("file:///x") is over_file.make


def test_a_folder_that_was_deleted_is_made_again(rig, tmp_path):
    """F39, PDX-3: before, between and after what is saved."""
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder)
    rig.save(0, 32)
    rig.save(32, 70)
    while folder.exists():  # what is being written meanwhile may be in the way
        shutil.rmtree(folder, ignore_errors=True)
    assert rig.grant() is LeaseNews.DONE
    report = rig.load()
    assert all(report.good)
    rig.check(report.good)
