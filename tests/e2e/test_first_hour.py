"""A first hour, from the clone to the router, as somebody types it (shows that F54, F55, F58 and F59 hold together)."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "first_hour.py"


@pytest.mark.slow
def test_a_first_hour_ends_every_command_as_it_should(tmp_path: Path) -> None:
    """F55: what README names works after its commands, in a clean home and a clean environment."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "hour")], capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert done.stdout.strip().splitlines()[-1].startswith("0 things were wrong")
