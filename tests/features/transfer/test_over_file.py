"""A hand-over through a folder: whole prompts or none, whatever happens to the folder (PDX-11)."""

import errno
import os
import queue
import shutil
import time

import numpy as np
import pytest

from octavo.base.errors import ConfigError
from octavo.features.transfer.data import over_file
from octavo.features.transfer.data.peer_server import PeerListener
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.transport import Place, Pull, find_transport
from octavo.features.transfer.disagg import LeaseDrop, LeaseEvent, LeaseNews, LeaseWatch, PullJob, TransferRole
from tests.features.transfer.test_disagg_data import IDENTITY, SIZES, Region, content

LEASE = "a1b2"
TABLES = ((7, 8, 9), (4, 5))


@pytest.fixture
def ends(tmp_path):
    def place(role, identity=IDENTITY):
        regions = (Region(0), Region(1))
        return Place(
            role=role, address=str(tmp_path), regions=regions, seal=Seal(identity, SIZES), listener=PeerListener(None)
        )

    made = []

    def make(role, **options):
        pair = find_transport("file:///x")(place(role, **options))
        made.extend(end for end in pair if end is not None)
        return pair

    yield make
    for end in made:
        end.stop()


def news(end, wanted, timeout_s=10.0):
    seen, limit = [], time.monotonic() + timeout_s
    while wanted not in seen:
        seen += end.news()
        assert time.monotonic() < limit, seen
        time.sleep(0.005)
    return seen


def start(consumer, places=((0, 1, 2), (0, 1)), lease=LEASE):
    done, got = queue.SimpleQueue(), {}
    job = PullJob(job=1, lease=lease, places=places, blocks=places)

    def write(job, group, at, body):
        got[group, at] = np.frombuffer(bytes(body), dtype=np.uint8)

    consumer.watch(LeaseWatch(lease=lease, address="file:///x", lease_s=30))
    consumer.pull(Pull(job, write, done.put))
    return done, got


def test_a_prompt_goes_through_the_folder_and_leaves_nothing_there(ends, tmp_path):
    (producer, none), (nothing, consumer) = ends(TransferRole.PRODUCER), ends(TransferRole.CONSUMER)
    assert none is None and nothing is None
    done, got = start(consumer)  # it comes before the prompt does
    producer.open(LEASE, TABLES)
    producer.close(LEASE)
    assert news(producer, LeaseEvent(LEASE, LeaseNews.CLOSED))[0] == LeaseEvent(LEASE, LeaseNews.DONE)
    report = done.get(timeout=10)
    assert report.good == (True,) * 5 and report.num_bytes == 3 * SIZES[0] + 2 * SIZES[1]
    assert all(
        (got[group, at] == content(group, block)).all() for group in (0, 1) for at, block in enumerate(TABLES[group])
    )
    consumer.drop(LeaseDrop(lease=LEASE, done=True))
    consumer.stop()
    assert not list(tmp_path.glob("*/*"))


def test_blocks_that_are_not_there_or_were_altered_are_not_good(ends, tmp_path):
    (producer, _), (_, consumer) = ends(TransferRole.PRODUCER), ends(TransferRole.CONSUMER)
    producer.open(LEASE, ((7, 0, 9), (4, 5)))
    news(producer, LeaseEvent(LEASE, LeaseNews.DONE))
    (path,) = tmp_path.glob("*/*/1-0.kv")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (path,) = tmp_path.glob("*/*/1-1.kv")
    path.write_bytes(path.read_bytes()[:-1])
    assert start(consumer)[0].get(timeout=10).good == (True, False, True, False, False)


def test_a_prompt_that_does_not_appear_fails_within_the_set_time(ends, monkeypatch):
    monkeypatch.setattr(over_file, "WAIT_S", 0.2)
    _, consumer = ends(TransferRole.CONSUMER)
    report = start(consumer)[0].get(timeout=10)
    assert not any(report.good) and report.error == "the prompt did not appear within 0.2 s"
    report = start(consumer, lease="../../etc")[0].get(timeout=10)
    assert not any(report.good) and "letters and digits" in report.error


def test_another_model_looks_elsewhere(ends, monkeypatch):
    monkeypatch.setattr(over_file, "WAIT_S", 0.2)
    (producer, _), (_, consumer) = ends(TransferRole.PRODUCER), ends(TransferRole.CONSUMER, identity={"model": "other"})
    producer.open(LEASE, TABLES)
    news(producer, LeaseEvent(LEASE, LeaseNews.DONE))
    assert not any(start(consumer)[0].get(timeout=10).good)


def test_a_folder_that_cannot_be_loses_prompts_frees_their_blocks_and_is_said_once(ends, tmp_path, caplog):
    """F39: not a line for each prompt."""
    producer, _ = ends(TransferRole.PRODUCER)
    folder = next(tmp_path.iterdir())
    shutil.rmtree(folder)
    folder.write_text("in the way")
    for number in range(5):
        producer.open(lease := f"{LEASE}{number}", TABLES)
        producer.close(lease)
        assert news(producer, LeaseEvent(lease, LeaseNews.CLOSED))[0] == LeaseEvent(lease, LeaseNews.ABORTED)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"file://{tmp_path}" in line and "could not be put there, and is computed again" in line


def test_a_folder_that_was_deleted_is_made_again(ends, tmp_path):
    """F39: it comes back, as that of the file tier does."""
    (producer, _), (_, consumer) = ends(TransferRole.PRODUCER), ends(TransferRole.CONSUMER)
    shutil.rmtree(next(tmp_path.iterdir()))
    producer.open(LEASE, TABLES)
    assert start(consumer)[0].get(timeout=10).good == (True,) * 5


def test_a_full_disk_costs_a_consumer_no_wait(ends, tmp_path, monkeypatch):
    """F39: what will not come is said in the folder, so that nobody waits for it."""
    (producer, _), (_, consumer) = ends(TransferRole.PRODUCER), ends(TransferRole.CONSUMER)
    monkeypatch.setattr(over_file, "WAIT_S", 120.0)

    def full(path, mode):
        if path.name == "0-2.kv":
            raise OSError(errno.ENOSPC, "No space left on device")
        return open(path, mode)

    monkeypatch.setattr(over_file, "open", full, raising=False)
    producer.open(LEASE, TABLES)
    assert start(consumer)[0].get(timeout=60).good == (False,) * 5
    assert not list(tmp_path.rglob("*.kv")) and not list(tmp_path.rglob("*.part"))
    consumer.drop(LeaseDrop(lease=LEASE, done=False))
    consumer.stop()
    assert not list(tmp_path.glob("*/*"))


def test_what_nobody_took_is_removed_in_the_end(ends, tmp_path):
    producer, _ = ends(TransferRole.PRODUCER)
    producer.open(LEASE, TABLES)
    news(producer, LeaseEvent(LEASE, LeaseNews.DONE))
    (prompt,) = tmp_path.glob("*/*")
    old = time.time() - over_file.KEEP_S - 1
    os.utime(prompt, (old, old))
    producer.open("c3", TABLES)
    news(producer, LeaseEvent("c3", LeaseNews.DONE))
    assert [path.name for path in tmp_path.glob("*/*")] == ["c3"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpc", "there is no transport named 'tpc'; did you mean 'tcp'"),
        ("nowhere.module:make", "--kv-transport nowhere.module:make cannot be imported: No module named 'nowhere'"),
    ],
)
def test_transports_are_found_by_name_or_import_path(text, said):
    assert find_transport("octavo.features.transfer.data.over_file:make") is over_file.make
    with pytest.raises(ConfigError, match=said):
        find_transport(text)


def test_prompts_that_never_appear_do_not_add_up(ends, monkeypatch):
    monkeypatch.setattr(over_file, "WAIT_S", 0.5)
    (_, consumer) = ends(TransferRole.CONSUMER)
    began = time.monotonic()
    waits = [start(consumer, lease=f"never{i}")[0] for i in range(20)]
    for done in waits:
        assert "did not appear" in done.get(timeout=10).error
    assert time.monotonic() - began < 1.5


def test_an_engine_that_ends_does_not_wait_for_prompts(ends):
    (_, consumer) = ends(TransferRole.CONSUMER)
    waits = [start(consumer, lease=f"never{i}")[0] for i in range(9)]
    began = time.monotonic()
    consumer.stop()
    assert time.monotonic() - began < 2
    assert all(done.get_nowait().error for done in waits)


def test_a_block_that_cannot_be_put_anywhere_is_reported(ends):
    (producer, _), (_, consumer) = ends(TransferRole.PRODUCER), ends(TransferRole.CONSUMER)
    producer.open(LEASE, TABLES)
    done = queue.SimpleQueue()
    job = PullJob(job=1, lease=LEASE, places=((0,), ()), blocks=((0,), ()))
    consumer.pull(Pull(job, lambda *_: 1 // 0, done.put))
    assert "division" in done.get(timeout=10).error


@pytest.mark.parametrize("ahead_s", [-7200, 7200])
def test_a_clock_that_is_wrong_removes_nobody_s_prompt_and_keeps_none(ends, tmp_path, monkeypatch, ahead_s):
    """PDX-8: a machine's clock that jumps, or is not that of the folder."""
    (producer, _), (_, consumer) = ends(TransferRole.PRODUCER), ends(TransferRole.CONSUMER)
    producer.open(LEASE, TABLES)
    producer.open("old", TABLES)
    news(producer, LeaseEvent("old", LeaseNews.DONE))
    past = time.time() - over_file.KEEP_S - 1
    os.utime(next(tmp_path.glob("*/old")), (past, past))
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + ahead_s)
    producer.open("c3", TABLES)
    news(producer, LeaseEvent("c3", LeaseNews.DONE))
    assert start(consumer)[0].get(timeout=10).good == (True,) * 5
    assert not list(tmp_path.glob("*/old"))
