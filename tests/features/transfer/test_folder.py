"""A folder that several engines fill: one limit, and what goes wrong with folders (F39, TIR-30)."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from octavo.features.transfer.data import folder
from octavo.features.transfer.data.folder import LEDGER, RESCAN_S, SharedFolder
from octavo.features.transfer.data.health import REST_S, TierHealth
from octavo.features.transfer.data.seal import HEADER, Seal
from octavo.features.transfer.data.tier_file import FileTier

LENGTH = 5000
SIZE = HEADER.size + 64 + 36 + LENGTH
SEAL = Seal({"model": "ours"}, [LENGTH])
PREAMBLE = f"""
import sys
sys.path.insert(0, {os.getcwd()!r})
from tests.features.transfer.test_folder import *
"""


def key(number):
    return number.to_bytes(32, "big") + bytes(4)


def keys(*numbers):
    return [key(number) for number in numbers]


def chunks(*numbers):
    return [np.full(LENGTH + 64, number % 251, dtype=np.uint8) for number in numbers]


class Rig:
    """A tier with a clock of its own."""

    def __init__(self, root, limit=None):
        self.now = 0.0
        clock = lambda: self.now  # noqa: E731
        self.tier = FileTier(root, SEAL, TierHealth(f"file://{root}", clock=clock), limit=limit, clock=clock)

    def write(self, *numbers):
        return self.tier.write(keys(*numbers), chunks(*numbers))

    def read(self, *numbers):
        rows = [np.zeros(LENGTH + 64, dtype=np.uint8) for _ in numbers]
        good = self.tier.read(keys(*numbers), rows)
        for number, row, fine in zip(numbers, rows, good, strict=True):
            assert not fine or (row[:LENGTH] == number % 251).all()
        return good


def held(root):
    return sum(path.stat().st_size for path in root.rglob("*.kv"))


def run(code, *before):
    """Python in a process of its own; what it prints last, as JSON."""
    done = subprocess.run(
        [*before, sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_engines_that_fill_a_folder_at_once_keep_to_its_limit_together(tmp_path):
    """F39: with one limit of 2 MiB two servers held 3.9 MiB, until the next count."""
    limit = 40 * SIZE
    code = (
        PREAMBLE
        + f"""
rig = Rig(Path({str(tmp_path)!r}), limit={limit})
print("ready", flush=True)
sys.stdin.readline()
first = int(sys.argv[1])
for number in range(first, first + 150):
    rig.write(number)
"""
    )
    code = code.replace("from tests", "from pathlib import Path\nfrom tests")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    others = [subprocess.Popen([sys.executable, "-c", code, str(first)], **pipes) for first in (0, 1000)]
    try:
        for other in others:
            assert other.stdout.readline() == "ready\n"
        for other in others:
            other.stdin.write("go\n")
            other.stdin.flush()
        for other in others:
            other.wait(60)
    finally:
        for other in others:
            other.kill()
            other.communicate()
    assert all(other.returncode == 0 for other in others)
    assert limit - 2 * SIZE <= held(tmp_path) <= limit


def test_what_was_removed_by_other_hands_is_counted_off_in_time(tmp_path):
    rig = Rig(tmp_path, limit=3 * SIZE)
    assert rig.write(1, 2, 3) == [True] * 3
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    assert rig.write(4, 5) == [True] * 2
    rig.now = RESCAN_S + 1
    assert rig.write(6) == [True] and rig.read(4, 5, 6) == [True] * 3


def test_a_folder_that_is_deleted_under_the_tier_is_made_again(tmp_path, caplog):
    """F39: 522 lines, and a tier that never came back."""
    root = tmp_path / "kv"
    rig = Rig(root, limit=10 * SIZE)
    assert rig.write(*range(10)) == [True] * 10
    shutil.rmtree(root)
    assert rig.read(1, 2) == [False, False]
    good = [rig.write(number) for number in range(20, 40)]
    rig.now += REST_S + 1
    assert rig.write(*range(40, 45)) == [True] * 5 and rig.read(42) == [True]
    assert held(root) <= 10 * SIZE and good
    assert len(caplog.records) <= 2


def test_a_disk_that_is_full_is_said_once_and_used_again_when_there_is_room(tmp_path):
    """F39: a real file system of 1 MiB."""
    outside = ["unshare", "-rm"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*outside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no mount of one's own here")
    got = run(
        f"""
import logging
from pathlib import Path
root = Path({str(tmp_path)!r})
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(root)], check=True)
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("octavo").addHandler(handler)
logging.getLogger("octavo").propagate = False
ballast = root / "ballast"
ballast.write_bytes(bytes(1000 << 10))
rig = Rig(root)
full = [rig.write(number) for number in range(200)]
kept = [number for number, good in enumerate(full) if good == [True]]
for _ in range(5):
    rig.now += REST_S + 1
    rig.write(900)
readable = rig.read(*kept)
parts = len(list(root.rglob("*.part")))
said = len(lines)
ballast.unlink()
resting = rig.write(300)
rig.now += REST_S + 1
print(json.dumps([kept, readable, parts, said, lines, resting, rig.write(301), rig.read(301)]))
""",
        *outside,
    )
    kept, readable, parts, said, lines, resting, after, read = got
    assert 0 < len(kept) < 200 and all(readable) and not parts
    assert said == 1 and "No space left on device" in lines[0]
    assert resting == [False] and after == read == [True]


def test_a_folder_that_cannot_be_written_to_still_gives(tmp_path):
    """F39: read-only: stores are lost, reads are not, and one line says so."""
    outside = ["unshare", "-rm"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*outside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no mount of one's own here")
    got = run(
        f"""
import logging
from pathlib import Path
root = Path({str(tmp_path)!r})
subprocess.run(["mount", "-t", "tmpfs", "none", str(root)], check=True)
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("octavo").addHandler(handler)
logging.getLogger("octavo").propagate = False
rig = Rig(root, limit=100 * SIZE)
rig.write(1, 2)
subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
lost = [rig.write(number) for number in range(10, 30)]
kept = rig.read(1, 2)
said = len(lines)
subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
rig.now += REST_S + 1
print(json.dumps([any(map(any, lost)), kept, said, lines, rig.write(31)]))
""",
        *outside,
    )
    assert got[:3] == [False, [True, True], 1] and "Read-only file system" in got[3][0] and got[4] == [True]


def test_files_whose_bits_have_flipped_are_said_once_and_counted(tmp_path, caplog):
    """F39."""
    rig = Rig(tmp_path, limit=100 * SIZE)
    rig.write(*range(30))
    for path in tmp_path.rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert rig.read(*range(30)) == [False] * 30 and not held(tmp_path)
    assert len(caplog.records) == 1 and "is not a chunk of ours or was altered" in caplog.text
    assert rig.write(*range(30)) == [True] * 30 and rig.read(*range(30)) == [True] * 30


def test_a_lock_that_somebody_keeps_costs_a_store_and_no_more(tmp_path, monkeypatch):
    """F39: another engine that was stopped while it had the lock."""
    monkeypatch.setattr(folder, "LOCK_S", 0.1)
    rig = Rig(tmp_path, limit=10 * SIZE)
    assert rig.write(1) == [True]
    with open(tmp_path / LEDGER, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        assert rig.write(*range(2, 9)) == [False] * 7 and rig.read(1) == [True]
        assert time.monotonic() - began < 5
    rig.now += REST_S + 1
    assert rig.write(2) == [True]


def test_without_locks_each_engine_keeps_to_the_limit_alone(tmp_path, monkeypatch):
    def none(descriptor, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(folder.fcntl, "flock", none)
    made = SharedFolder(tmp_path, 3 * 100)
    for number in range(9):
        assert made.take(100)
        path = tmp_path / f"{number}.kv"
        path.write_bytes(bytes(100))
        made.wrote(path, 100)
    assert sorted(path.name for path in tmp_path.glob("*.kv")) == ["6.kv", "7.kv", "8.kv"]
    assert not made.take(301)
