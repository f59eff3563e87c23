"""A packed file is read as it was written, or told to be of no use; a folder of them is shared and stays small."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from octavo.models.packed import (
    PARTIAL,
    SECTION_BYTES,
    DamagedError,
    NotWrittenError,
    PackedFolder,
    Writing,
    open_packed,
    write_packed,
)
from octavo.ops.pages import gives_huge_pages, large_share

KEY = "ab" * 32


def never() -> bool:
    return False


def tensors(num_bytes: int = 5 << 20, seed: int = 0) -> dict[str, torch.Tensor]:
    """Of several types and odd sizes, one of them across sections."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "a:weight": random(3, 7),
        "b:packed": torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8),
        "b:bias": random(5),
        "c:weight": random(33, 65).bfloat16(),
        "d:empty": torch.zeros(0),
        "e:scalar": torch.tensor(3),
        "f:strided": random(8, 6).T,
    }


@pytest.fixture
def folder(tmp_path: Path) -> PackedFolder:
    return PackedFolder(tmp_path / "packed", 1 << 30)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left.values(), right.values(), strict=True)
    )


# ---- one file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 100, SECTION_BYTES - 64, SECTION_BYTES, 3 * SECTION_BYTES + 13])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_was_written_is_read(folder: PackedFolder, num_bytes: int, num_threads: int) -> None:
    written = tensors(num_bytes)
    folder.store(KEY, written, never)
    found = folder.find(KEY)
    assert found is not None
    for read in (found.tensors(num_threads, 1 << 40), found.tensors(num_threads, 0)):
        assert same(read, written)
        assert all(t.data_ptr() % 64 == 0 for t in read.values() if t.numel())
    assert [p.name for p in folder.folder.iterdir()] == [folder.path(KEY).name]


def test_a_file_that_is_not_there_is_none(folder: PackedFolder) -> None:
    assert folder.find(KEY) is None


def test_a_file_made_for_something_else_is_refused(folder: PackedFolder) -> None:
    folder.store(KEY, tensors(), never)
    other = KEY[:32] + "cd" * 16  # shares the name
    with pytest.raises(DamagedError, match="made for something else"):
        folder.find(other)


@pytest.mark.parametrize("keep", [0, 5, 16, 100, 0.5, -1])
def test_a_file_cut_short_is_told(folder: PackedFolder, keep: float) -> None:
    folder.store(KEY, tensors(), never)
    path = folder.path(KEY)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(DamagedError, match=r"header|begin|bytes instead of"):
        folder.find(KEY)


def test_a_longer_file_is_told(folder: PackedFolder) -> None:
    folder.store(KEY, tensors(), never)
    with folder.path(KEY).open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedError, match="bytes instead of"):
        folder.find(KEY)


def test_a_flipped_bit_anywhere_is_told(folder: PackedFolder) -> None:
    folder.store(KEY, tensors(SECTION_BYTES + 999), never)
    path = folder.path(KEY)
    good = path.read_bytes()
    start = open_packed(path, KEY).start
    unused = range(good.index(b"}", 16) + 1, start)  # between header and data
    for offset in [*range(16), 20, start - 1, start, start + 1, start + SECTION_BYTES - 1, start + SECTION_BYTES, len(good) - 100]:  # fmt: skip
        if offset in unused:
            continue
        bad = bytearray(good)
        bad[offset] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(DamagedError):
            found = folder.find(KEY)
            assert found is not None
            found.tensors(2, 1 << 40)


def test_zeroed_and_stale_pages_are_told(folder: PackedFolder) -> None:
    """What a file system may leave after a crash."""
    folder.store(KEY, tensors(), never)
    path = folder.path(KEY)
    start = open_packed(path, KEY).start
    good = path.read_bytes()
    for page in (bytes(4096), good[start + 8192 : start + 12288]):
        path.write_bytes(good[: start + 4096] + page + good[start + 8192 :])
        found = folder.find(KEY)
        assert found is not None
        with pytest.raises(DamagedError, match="content was changed"):
            found.tensors(1, 1 << 40)


def test_a_file_that_shrinks_while_it_is_read_is_told(folder: PackedFolder) -> None:
    folder.store(KEY, tensors(), never)
    found = folder.find(KEY)
    assert found is not None
    os.truncate(folder.path(KEY), found.start + 1000)
    with pytest.raises(DamagedError, match="cut short"):
        found._read(2)


# ---- writers ------------------------------------------------------------------------------------


def test_a_stopped_writer_leaves_nothing(folder: PackedFolder) -> None:
    calls = iter([False, False, True])
    with pytest.raises(NotWrittenError, match="stopped"):
        folder.store(KEY, tensors(), lambda: next(calls))
    assert list(folder.folder.iterdir()) == []


def test_a_writer_that_is_killed_leaves_no_file_and_the_next_one_writes_it(folder: PackedFolder) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        import torch
        from octavo.models.packed import PackedFolder
        calls = 0
        def stop():
            global calls
            calls += 1
            if calls == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        PackedFolder(Path(sys.argv[1]), 1 << 30).store(sys.argv[2], {"a": torch.ones(4 << 20)}, stop)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(folder.folder), KEY], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert [p.suffix for p in folder.folder.iterdir()] == [PARTIAL]
    assert folder.find(KEY) is None
    folder.store(KEY, tensors(), never)
    found = folder.find(KEY)
    assert found is not None and same(found.tensors(1, 1 << 40), tensors())
    assert [p.name for p in folder.folder.iterdir()] == [folder.path(KEY).name]


def test_what_dead_writers_of_other_files_left_is_removed(folder: PackedFolder) -> None:
    folder.folder.mkdir()
    (folder.folder / f"{'0' * 32}{PARTIAL}").write_bytes(b"left")
    folder.store(KEY, tensors(), never)
    assert [p.name for p in folder.folder.iterdir()] == [folder.path(KEY).name]


def test_of_two_writers_one_writes_and_the_other_says_so(folder: PackedFolder) -> None:
    outcomes: list[str] = []

    def second() -> bool:
        """While the first is at its first section."""
        if not outcomes:
            outcomes.append("begun")
            with pytest.raises(NotWrittenError, match="another process is writing it"):
                folder.store(KEY, tensors(), never)
        return False

    folder.store(KEY, tensors(), second)
    found = folder.find(KEY)
    assert outcomes and found is not None and same(found.tensors(1, 1 << 40), tensors())


def test_many_writers_and_readers_at_once_see_whole_files(folder: PackedFolder) -> None:
    """Threads have their own file descriptors, so their locks are as those of processes."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def work(seed: int) -> None:
        while not stop.is_set():
            try:
                if seed % 2:
                    folder.store(KEY, tensors(3 << 20), never)
                elif (found := folder.find(KEY)) is not None:
                    assert same(found.tensors(2, 1 << 40), tensors(3 << 20))
            except NotWrittenError:
                continue
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert [p.name for p in folder.folder.iterdir()] == [folder.path(KEY).name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(NotWrittenError, match="Permission denied"):
        PackedFolder(closed / "packed", 1 << 30).store(KEY, tensors(), never)


def test_a_folder_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "packed").write_text("")
    with pytest.raises(NotWrittenError, match="packed: "):
        PackedFolder(tmp_path / "packed", 1 << 30).store(KEY, tensors(), never)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 3 MiB: the system's answer is as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_fills_up_leaves_nothing(folder: PackedFolder) -> None:
    with pytest.raises(NotWrittenError, match="File too large"):
        folder.store(KEY, tensors(), never)
    assert list(folder.folder.iterdir()) == []


def test_a_disk_without_room_is_seen_before_writing(folder: PackedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.models.packed.shutil.disk_usage", lambda _: type("Usage", (), {"free": 6 << 20}))
    with pytest.raises(NotWrittenError, match="has no room for 5 MiB"):
        folder.store(KEY, tensors(), never)


def test_a_failed_rewrite_keeps_the_old_file(folder: PackedFolder) -> None:
    folder.store(KEY, tensors(), never)
    with pytest.raises(NotWrittenError):
        folder.store(KEY, tensors(seed=1), lambda: True)
    found = folder.find(KEY)
    assert found is not None and same(found.tensors(1, 1 << 40), tensors())


# ---- the folder's size --------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    folder = PackedFolder(tmp_path, 17 << 20)  # three files of five
    keys = [f"{n}{'0' * 63}" for n in range(4)]
    for number, key in enumerate(keys[:3]):
        folder.store(key, tensors(), never)
        os.utime(folder.path(key), (number, number))
    assert folder.find(keys[0]) is not None, "looking it up is using it"
    folder.store(keys[3], tensors(), never)
    assert [folder.path(key).exists() for key in keys] == [True, False, True, True]


def test_a_file_larger_than_the_folder_may_be_is_not_written(tmp_path: Path) -> None:
    folder = PackedFolder(tmp_path, 4 << 20)
    with pytest.raises(NotWrittenError, match="--weight-cache-size"):
        folder.store(KEY, tensors(), never)
    assert list(tmp_path.iterdir()) == []


# ---- in the background --------------------------------------------------------------------------


def test_writing_goes_on_beside_and_can_be_waited_for(folder: PackedFolder) -> None:
    lines: list[str] = []
    Writing(folder, KEY, tensors(), lines.append).stop(60)
    found = folder.find(KEY)
    assert found is not None and same(found.tensors(1, 1 << 40), tensors()) and lines == []


def test_writing_that_is_given_up_leaves_nothing_and_says_nothing(folder: PackedFolder) -> None:
    lines: list[str] = []
    writing = Writing(folder, KEY, {"a": torch.ones(64 << 20)}, lines.append)
    writing.stop(0)
    assert folder.find(KEY) is None or not lines
    assert not list(folder.folder.glob(f"*{PARTIAL}")) and lines == []


def test_writing_that_fails_says_so_in_one_line(tmp_path: Path) -> None:
    lines: list[str] = []
    Writing(PackedFolder(tmp_path, 1), KEY, tensors(), lines.append).stop(60)
    assert len(lines) == 1 and "not kept for the next start" in lines[0] and "--weight-cache-size" in lines[0]


def test_a_lock_that_was_won_after_the_file_was_finished_is_worth_nothing(tmp_path: Path) -> None:
    """The loser must not write into what has become the winner's finished file."""
    path = tmp_path / "x.packed"
    moved: list[Callable[[], bool]] = []

    def race() -> bool:
        if not moved:
            moved.append(never)
            path.with_suffix(PARTIAL).rename(path)  # as a finished writer does
            with pytest.raises(NotWrittenError):
                write_packed(path, KEY, tensors(), lambda: True)
        return False

    with pytest.raises(FileNotFoundError):
        write_packed(path, KEY, tensors(), race)


@pytest.mark.skipif(not gives_huge_pages(), reason="this system gives no large pages")
def test_what_is_read_lies_in_large_pages(folder: PackedFolder) -> None:
    """The file's own where the kernel keeps it so, or memory of ours."""
    folder.store(KEY, {"a": torch.ones(16 << 20)}, never)
    found = folder.find(KEY)
    assert found is not None
    read = found.tensors(2, 1 << 40)["a"]
    assert large_share(read) > 0.8
