"""Freed memory goes back."""

import ctypes
import subprocess
import sys

import pytest

from octavo.base.heap import give_back

PROGRAM = """
import sys
from pathlib import Path
from octavo.base.heap import give_back

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

pieces = [bytes([i % 256]) * 20_000 for i in range(2_000)]
kept = pieces[::100]  # the rest cannot leave from the end
del pieces[::100]
before = resident()
pieces.clear()
give_back()
assert resident() < before - (20 << 20), (before, resident())
assert all(set(piece) == {piece[0]} for piece in kept)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_freed_between_what_lives_goes_back() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("another C library than glibc")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_it_may_be_called_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back()
    monkeypatch.setattr(sys, "platform", "darwin")
    give_back()
