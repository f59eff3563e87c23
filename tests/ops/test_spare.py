"""What is done in spare time gives what `os` and `zlib` give, with the native core and without it."""

import errno
import mmap
import os
import random
import zlib

import numpy as np
import pytest

from octavo.ops import spare


@pytest.fixture(params=["native", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(spare, "core", None)
    elif spare.core is None:
        pytest.skip("the package was built without the native core")
    return request.param


def some_bytes(count):
    return random.Random(count).randbytes(count)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 31, 33, 4095, 65_537, 1_000_003])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_a_checksum_is_that_of_zlib(way, count, start):
    data = some_bytes(count + start)
    assert spare.crc32(memoryview(data)[start:]) == zlib.crc32(data[start:])
    assert spare.crc32(memoryview(bytearray(data))[start:]) == zlib.crc32(data[start:])


@pytest.mark.parametrize("count", [0, 1, 65_536, 65_537, 1_000_003])
def test_what_is_written_is_in_the_file(way, tmp_path, count):
    data = some_bytes(count)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        assert spare.write(file.fileno(), memoryview(data)) == count
        assert spare.write(file.fileno(), memoryview(b"end")) == 3
    assert (tmp_path / "file").read_bytes() == data + b"end"


def test_a_write_that_cannot_be_says_why(way, tmp_path):
    (tmp_path / "file").write_bytes(b"here")
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError) as caught:
        spare.write(file.fileno(), memoryview(b"bytes"))
    assert caught.value.errno == errno.EBADF and str(caught.value).endswith(os.strerror(errno.EBADF))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no disk that is always full")
def test_a_full_disk_says_so(way):
    file = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError) as caught:
            spare.write(file, memoryview(some_bytes(100_000)))
    finally:
        os.close(file)
    assert caught.value.errno == errno.ENOSPC


def test_a_disk_that_fills_up_takes_what_it_can(way, tmp_path):
    resource = pytest.importorskip("resource")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            with (tmp_path / "file").open("wb", buffering=0) as file:
                status = 0 if spare.write(file.fileno(), memoryview(bytes(300_000))) == 100_000 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "file").stat().st_size == 100_000


def test_what_memory_holds_stays_when_it_is_populated(way):
    mapping = mmap.mmap(-1, 1 << 20)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    memory[5000:6000] = 7
    done = spare.populate(memory[4500:900_000])
    assert done in ((True, False) if way == "native" else (False,))
    assert memory[5000:6000].min() == 7 and not memory[:5000].any() and not memory[6000:].any()
