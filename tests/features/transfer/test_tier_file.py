"""Chunks as files: whole or absent, ours or a miss, never more than the limit (TIR-30)."""

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest

from octavo.base.errors import ConfigError
from octavo.features.transfer.data.folder import FRESH_S, RESCAN_S
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.seal import HEADER, Seal
from octavo.features.transfer.data.tier_file import FileTier

IDENTITY = {"model": "ours"}
SPACE = Seal(IDENTITY, (5000, 300)).space
LENGTH = 5000
HEAD = HEADER.size + 64 + 36


def key(number, group=0):
    return bytes([number]) * 32 + group.to_bytes(4, "big")


def chunk(number, length=LENGTH):
    row = np.zeros(8192, dtype=np.uint8)
    row[:length] = np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8)
    return row


def tier(folder, limit=None, identity=IDENTITY, lengths=(LENGTH, 300), clock=lambda: 0.0):
    return FileTier(folder, Seal(identity, lengths), TierHealth("files", clock=clock), limit=limit, clock=clock)


def read(made, *keys):
    rows = [np.full(8192, 7, dtype=np.uint8) for _ in keys]
    return made.read(keys, rows), rows


def files(folder):
    return sorted(folder.rglob("*.kv"))


def test_what_was_written_is_found_and_read_also_by_the_next_process(tmp_path):
    keys = [key(1), key(2), key(1, group=1)]
    assert tier(tmp_path).write(keys, [chunk(1), chunk(2), chunk(3, 300)]) == [True] * 3
    again = tier(tmp_path)
    assert again.find([*keys, key(9)]) == [True, True, True, False]
    good, rows = read(again, *keys, key(9))
    assert good == [True, True, True, False]
    assert (rows[0][:LENGTH] == chunk(1)[:LENGTH]).all() and (rows[2][:300] == chunk(3)[:300]).all()
    assert (rows[2][300:] == 7).all()


def test_another_model_s_chunks_are_not_found(tmp_path):
    tier(tmp_path).write([key(1)], [chunk(1)])
    other = tier(tmp_path, identity={"model": "theirs"})
    assert other.find([key(1)]) == [False] and read(other, key(1))[0] == [False]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: HEAD - 3],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
        lambda data: data[:-50] + bytes([data[-50] ^ 0x80]) + data[-49:],
        lambda data: b"OctavoXX" + data[8:],
        lambda data: data[:8] + b"\2\0\0\0" + data[12:],
        lambda data: data[: HEADER.size] + b"cd" * 32 + data[HEADER.size + 64 :],
    ],
    ids=["one short", "cut in the head", "empty", "one more", "a bit of the head", "a bit of the chunk", "magic", "version", "foreign"],
)  # fmt: skip
def test_a_file_that_is_not_as_it_was_written_is_a_miss_and_is_removed(tmp_path, damage):
    made = tier(tmp_path)
    made.write([key(1), key(2)], [chunk(1), chunk(2)])
    path = next(p for p in files(tmp_path) if p.name.startswith("0101"))
    path.write_bytes(damage(path.read_bytes()))
    good, rows = read(made, key(1), key(2))
    assert good == [False, True] and (rows[1][:LENGTH] == chunk(2)[:LENGTH]).all()
    assert not path.exists() and made.find([key(1)]) == [False]
    assert made.write([key(1)], [chunk(1)]) == [True] and read(made, key(1))[0] == [True]


def test_one_file_under_another_s_name_is_a_miss(tmp_path):
    made = tier(tmp_path)
    made.write([key(1), key(2)], [chunk(1), chunk(2)])
    one, two = files(tmp_path)
    one.write_bytes(two.read_bytes())
    assert read(made, key(1))[0] == [False]


def test_the_folder_keeps_to_its_limit_and_what_was_used_last_stays(tmp_path):
    size = HEAD + LENGTH
    made = tier(tmp_path, limit=3 * size + 10)
    for number in (1, 2, 3):
        made.write([key(number)], [chunk(number)])
    assert read(made, key(1))[0] == [True]
    made.write([key(4)], [chunk(4)])
    assert made.find([key(n) for n in (1, 2, 3, 4)]) == [True, False, True, True]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 3 * size + 10
    assert tier(tmp_path / "small", limit=100).write([key(1)], [chunk(1)]) == [False]


def test_what_another_has_read_since_stays(tmp_path):
    """An engine's own reader is another one, too: it works in another thread."""
    size = HEAD + LENGTH
    writer, reader = tier(tmp_path, limit=3 * size + 10), tier(tmp_path, limit=3 * size + 10)
    for number in (1, 2, 3):
        writer.write([key(number)], [chunk(number)])
    assert read(reader, key(1))[0] == [True] and read(reader, key(3))[0] == [True]
    writer.write([key(4)], [chunk(4)])
    writer.write([key(5)], [chunk(5)])
    assert writer.find([key(n) for n in (1, 2, 3, 4, 5)]) == [False, False, True, True, True]


def test_a_restart_counts_what_is_there_the_oldest_goes_first(tmp_path):
    size = HEAD + LENGTH
    first = tier(tmp_path)
    first.write([key(n) for n in (1, 2, 3)], [chunk(n) for n in (1, 2, 3)])
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (1000 + age, 1000 + age))
    second = tier(tmp_path, limit=3 * size)
    second.write([key(4)], [chunk(4)])
    assert second.find([key(n) for n in (1, 2, 3, 4)]) == [False, True, True, True]


def test_two_engines_share_a_folder_and_its_limit(tmp_path):
    size, now = HEAD + LENGTH, [0.0]
    one, two = (tier(tmp_path, limit=4 * size, clock=lambda: now[0]) for _ in range(2))
    for number in range(1, 4):
        one.write([key(number)], [chunk(number)])
        two.write([key(number + 10)], [chunk(number)])
    now[0] = RESCAN_S + 1
    one.write([key(20)], [chunk(20)])
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 4 * size
    assert one.find([key(20)]) == two.find([key(20)]) == [True]


def test_what_dead_processes_left_half_written_is_cleared_away(tmp_path):
    made = tier(tmp_path)
    folder = tmp_path / SPACE / "01"
    folder.mkdir(parents=True)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    dead, mine = folder / f".{pid}.1.part", folder / f".{os.getpid()}.99.part"
    elsewhere = folder / f".{pid}.2.part"  # of a process that cannot be seen from here, for all one knows
    for path in (dead, mine, elsewhere):
        path.write_bytes(b"half")
    old = time.time() - FRESH_S - 1
    os.utime(dead, (old, old))
    made.write([key(1)], [chunk(1)])
    assert not dead.exists() and mine.exists() and elsewhere.exists()


def test_a_disk_that_cannot_be_written_to_loses_stores_and_nothing_else(tmp_path, monkeypatch):
    now = [0.0]
    made = tier(tmp_path, clock=lambda: now[0])
    made.write([key(1)], [chunk(1)])
    calls = []

    def full(file, piece):
        calls.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("octavo.features.transfer.data.tier_file._write_all", full)
    assert made.write([key(2)], [chunk(2)]) == [False]
    assert made.write([key(2)], [chunk(2)]) == [False] and len(calls) == 1  # it rests
    assert read(made, key(1))[0] == [True] and not list(tmp_path.rglob("*.part"))
    monkeypatch.undo()
    now[0] = 6.0
    assert made.write([key(2)], [chunk(2)]) == [True]


def test_a_folder_that_cannot_be_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-tier file://.*: the folder cannot be made: "):
        tier(tmp_path / "file" / "folder")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_folder_that_may_not_be_looked_into_is_a_miss_and_said_once(tmp_path, monkeypatch, caplog, number):
    """F39: permission lost, a disk that dies, a share that was taken away."""
    made = tier(tmp_path)
    made.write([key(1)], [chunk(1)])

    def lost(path, **_):
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lost)
        for _ in range(20):
            assert made.find([key(1), key(2)]) == [False] * 2
            assert made.write([key(3)], [chunk(3)]) == [False]
    looks = [record.getMessage() for record in caplog.records if "looked at" in record.getMessage()]
    assert len(looks) == 1 and os.strerror(number) in looks[0] and str(tmp_path) in looks[0]
    assert made.find([key(1)]) == [True]


def test_a_file_that_gets_its_name_while_the_folder_is_counted_is_counted(tmp_path, monkeypatch):
    """F39: two engines on one folder held a block more than its limit."""
    made = tier(tmp_path, limit=2 * (HEAD + LENGTH))
    made.write([key(1)], [chunk(1)])
    (path,) = files(tmp_path)
    part = path.with_name(f".{os.getpid()}.7.part")
    path.rename(part)
    walk = os.walk

    def late(root):
        for folder, below, names in walk(root):
            yield folder, below, names if not part.exists() or part.name not in names else (part.rename(path), names)[1]

    monkeypatch.setattr(os, "walk", late)
    again = tier(tmp_path, limit=2 * (HEAD + LENGTH))
    assert again.write([key(2), key(3)], [chunk(2), chunk(3)]) == [True] * 2
    assert not part.exists() and len(files(tmp_path)) == 2
