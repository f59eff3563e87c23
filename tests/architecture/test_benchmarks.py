"""What benchmarks and scripts take from the package is there: no other test runs them."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts").glob("*.py")])


def imports(path):
    """Module and name of every import from the package, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "octavo":
            yield from ((node.module, alias.name) for alias in node.names)


def is_there(module, name):
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "octavo._native":
            return False
        pytest.skip("the package was built without the native core")
    if hasattr(found, name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_all_that_is_imported_is_there(path):
    assert [name for name in imports(path) if not is_there(*name)] == []


def test_the_check_finds_what_is_gone():
    assert not is_there("octavo.features.transfer.data.agent", "TIERS")
    assert is_there("octavo.features.transfer.data", "agent") and not is_there("octavo.nowhere", "anything")
