"""Memory in large pages: aligned, untouched until used, given back."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.ops.pages import (
    HUGE_PAGE_BYTES,
    ModelMemory,
    PageArena,
    Populating,
    gives_huge_pages,
    populate,
    reserve,
    scratch,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
huge = pytest.mark.skipif(not gives_huge_pages(), reason="this system gives no large pages")


def smaps(tensor: torch.Tensor) -> dict[str, int]:
    """What the kernel says of the mapping that a tensor lies in: bytes by field."""
    inside, found = False, {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and rest and rest[-1] == "kB":
            found[first.rstrip(":")] = int(rest[0]) * 1024
    return found


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 17])
def test_memory_is_aligned_zero_and_of_the_size_asked_for(num_bytes: int) -> None:
    for _ in range(5):
        tensor = reserve(num_bytes, "a test")
        assert tensor.numel() == num_bytes and not tensor.any()
        assert num_bytes == 0 or tensor.data_ptr() % HUGE_PAGE_BYTES == 0
        tensor.fill_(1)


@linux
@huge
@pytest.mark.parametrize("num_bytes", [HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 12345])
def test_memory_that_is_touched_lies_in_large_pages_to_its_last_byte(num_bytes: int) -> None:
    tensor = reserve(num_bytes, "a test")
    tensor.fill_(1)
    pages = -(-num_bytes // HUGE_PAGE_BYTES)
    assert smaps(tensor)["AnonHugePages"] >= pages * HUGE_PAGE_BYTES


@linux
def test_memory_costs_nothing_until_touched_and_goes_back_with_its_last_view() -> None:
    tensor = reserve(512 << 20, "a test")
    size = smaps(tensor)["Size"]
    assert smaps(tensor)["Rss"] <= size - (500 << 20)
    view = tensor[100:200].view(10, 10)
    at = view.clone()
    address = view.data_ptr()
    del tensor
    gc.collect()
    assert smaps(view), "a view keeps it"
    del view
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in maps]
    covering = [high - low for low, high in ranges if low <= address < high]
    assert not covering or covering[0] < 512 << 20, "the mapping is gone"
    assert at.shape == (10, 10)


def test_more_than_the_system_has_is_refused_in_a_sentence() -> None:
    for num_bytes in (1 << 60, 1 << 70):
        with pytest.raises(ConfigError, match=r"the system refuses .* bytes for the moon"):
            reserve(num_bytes, "the moon")


def test_pieces_of_an_arena_lie_side_by_side_on_cache_lines_and_never_overlap() -> None:
    arena = PageArena(chunk_bytes=1 << 20)
    sizes = [1, 64, 65, 100_000, 0, 7, 600_000, 300_000, 3 << 20, 5]
    pieces = [arena.take(size) for size in sizes]
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert piece.numel() == size and (size == 0 or piece.data_ptr() % 64 == 0)
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces))
    assert pieces[1].data_ptr() - pieces[0].data_ptr() == 64
    assert pieces[9].data_ptr() - pieces[7].data_ptr() < 1 << 20, "a large piece between them did not end the chunk"


@linux
@huge
def test_what_a_model_keeps_lies_in_large_pages() -> None:
    memory = ModelMemory()
    first = memory.keep(torch.randn(3000, 1000))  # 12 MB
    small = [memory.keep(torch.full((7,), float(n))) for n in range(100)]
    assert smaps(first)["AnonHugePages"] >= 3000 * 1000 * 4 // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    assert all((tensor == n).all() for n, tensor in enumerate(small))
    assert smaps(small[0])["AnonHugePages"] >= HUGE_PAGE_BYTES


def test_shapes_and_types() -> None:
    memory = ModelMemory()
    for shape, dtype in (((3, 5), torch.bfloat16), ((), torch.float32), ((0, 4), torch.int8), ((7,), torch.float64)):
        made = memory.empty(shape, dtype)
        assert (tuple(made.shape), made.dtype, made.is_contiguous()) == (shape, dtype, True)
        temporary = scratch(shape, dtype)
        assert (tuple(temporary.shape), temporary.dtype) == (shape, dtype)


def resident_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")
def test_populated_memory_is_there_and_holds_what_it_held():
    memory = reserve(64 << 20, "test")
    memory[5 << 20] = 9
    before = resident_bytes()
    given = populate(memory, lambda: False)
    assert given in (0, 64 << 20), "a kernel older than 5.14 gives none"
    assert resident_bytes() - before >= (given - HUGE_PAGE_BYTES) * 0.9
    assert memory[5 << 20] == 9 and int(memory.count_nonzero()) == 1


def test_populating_ends_when_it_is_told_to():
    memory = reserve(16 << 20, "test")
    asked = []
    given = populate(memory, lambda: asked.append(0) or len(asked) > 2)
    assert given in (0, 2 * HUGE_PAGE_BYTES)
    thread = Populating(memory)
    thread.stop()
    assert not memory.any()
