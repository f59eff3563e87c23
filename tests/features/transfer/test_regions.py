"""Rows of host memory that another process reads (TIR-1)."""

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from octavo.features.transfer.data import regions
from octavo.features.transfer.data.regions import HostRegion, HostView, RegionPlace

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no nameless memory")

READER = """
import sys
import msgspec
from octavo.features.transfer.data.regions import HostView, RegionPlace
view = HostView(msgspec.json.decode(sys.argv[1], type=RegionPlace))
for line in sys.stdin:
    row = view[int(line)]
    print(int(row[0]), int(row[-1]), row.flags.writeable, flush=True)
"""
OWNER = """
import sys
import msgspec
from octavo.features.transfer.data.regions import HostRegion
host = HostRegion(6, 5000)
host[5][:] = 42
print(msgspec.json.encode(host.place).decode(), flush=True)
sys.stdin.read()
"""


def start(code, *args):
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(process, row):
    process.stdin.write(f"{row}\n")
    process.stdin.flush()
    return process.stdout.readline().split()


def test_another_process_sees_what_is_written_and_cannot_write():
    host = HostRegion(10, 6400)
    assert len(host) == 10
    host[3][:] = 7
    reader = start(READER, msgspec.json.encode(host.place).decode())
    try:
        assert ask(reader, 3) == ["7", "7", "False"]
        host[3][-1] = 9
        host[9][:] = 200
        assert ask(reader, 3) == ["7", "9", "False"] and ask(reader, 9) == ["200", "200", "False"]
    finally:
        reader.communicate(timeout=30)
    host.close()


def test_nothing_is_left_of_an_owner_that_was_killed_but_what_is_still_read():
    owner = start(OWNER)
    try:
        place = msgspec.json.decode(owner.stdout.readline(), type=RegionPlace)
        view = HostView(place)
        assert view[5][0] == 42
    finally:
        owner.kill()
        owner.communicate()
    assert view[5][4999] == 42
    with pytest.raises(OSError):
        HostView(place)


def test_rows_are_made_ready_before_they_are_used_and_keep_what_they_hold(monkeypatch):
    monkeypatch.setattr(regions, "READY_BYTES", 40 * 4096)
    asked = []
    monkeypatch.setattr(regions.spare, "populate", lambda memory: asked.append(len(memory)))
    host = HostRegion(100, 4096)
    host[60][:] = 7
    for row in range(100):
        if host.wants_ahead(row):
            assert row < 40 or sum(asked) >= (row + 1 - 40) * 4096
            host.make_ready()
    assert sum(asked) == 60 * 4096 and 1 < len(asked) < 10
    assert not host.wants_ahead(0) and not host.wants_ahead(99)
    assert host[60].min() == 7 and not host[61].any()
    host.close()


def test_the_memory_can_be_attached_to_until_it_is_closed_and_is_used_on():
    host = HostRegion(4, 4096)
    place = host.place
    view = HostView(place)
    host.close()
    host.close()
    host[1][:] = 5
    assert view[1][0] == 5 and host.place is None
    with pytest.raises(OSError):
        HostView(place)


def test_the_memory_keeps_its_size():
    host = HostRegion(4, 4096)
    with open(host.place.path, "r+b") as file, pytest.raises(OSError):
        file.truncate(100)
    with pytest.raises(ValueError):
        HostView(RegionPlace(path=host.place.path, num_rows=400, row_bytes=4096))
    host.close()


def test_a_descriptor_goes_with_a_region_that_nobody_closed():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        HostRegion(4, 4096)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_rows_are_where_they_were_said_to_be():
    host = HostRegion(3, 128)
    rows = np.random.default_rng(0).integers(0, 256, (3, 128), dtype=np.uint8)
    for i in range(3):
        host[i][:] = rows[i]
    view = HostView(host.place)
    assert all((view[i] == rows[i]).all() for i in range(3))
    host.close()
