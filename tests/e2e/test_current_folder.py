"""Files of the current folder that are named as modules of Python are not run by our processes (F50)."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from octavo.base.interpreter import module_command
from tests.support import checkpoints
from tests.support.live import spawn

TRAPS = ("queue.py", "json.py", "random.py", "numpy.py", "msgspec.py")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder full of traps; each writes down that it was run, and ends who ran it."""
    for name in TRAPS:
        (tmp_path / name).write_text(
            f"import os\nos.close(os.open({str(tmp_path / 'sprung')!r}, os.O_CREAT))\nraise SystemExit(7)\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def test_a_server_and_its_engine_run_their_own_modules(folder):
    """F50: the engine's process ran `queue.py`."""
    with spawn(str(checkpoints.tiny_llama()), "--dtype", "float32", "--num-threads", "1", "--num-kv-blocks", "64") as s:
        assert s.text("hello", max_tokens=2)
    assert not (folder / "sprung").exists()


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("octavo.entrypoints.cli", ("--version",)),
        ("octavo.entrypoints.cli", ("route", "--help")),
        ("octavo.ops.probe", ("--help",)),
        ("octavo.bench.canned", ("0", "1")),
        ("octavo.inputs.tokenizer_hf", ("nowhere",)),
        ("octavo.engine.child", ()),
        ("pip", ("--version",)),
    ],
)
def test_other_children_do_too(folder, module, arguments):
    """F50: what the bench, a slow tokenizer and a pull start."""
    subprocess.run(
        module_command(module, *arguments), stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
    )
    assert not (folder / "sprung").exists()


def test_the_traps_are_traps(folder):
    """Without `-P` they are sprung: the tests above can fail."""
    subprocess.run([sys.executable, "-m", "octavo.engine.child"], stdin=subprocess.DEVNULL, capture_output=True)
    assert (folder / "sprung").exists()


def test_every_python_child_is_started_in_the_one_way():
    """F50: a new command `[sys.executable, ...]` anywhere would be the next hole; messages may name the interpreter."""
    root = Path(octavo.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.List | ast.Tuple) and "sys.executable" in map(ast.unparse, node.elts)
    }
    assert found == {os.path.join("base", "interpreter.py")}
