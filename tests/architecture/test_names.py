"""One meaning a word: a public class name stands once, and what the guides name is there (frame 8)."""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "octavo"
PAGES = ("docs/life-of-a-request.md", "docs/glossary.md")
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}


def public_classes():
    """Every public class of the package, with the modules that define one of that name."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def names(text):
    """`folder.module` and `folder.module.symbol` of the package that a page speaks of."""
    dotted = re.findall(r"`((?:\w+\.)+\w+)(?:\([^`]*\))?`", text)
    return [name for name in dotted if name.split(".")[0] in FOLDERS]


def is_there(name):
    """Whether it is a module, something in one, or a method of a class in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["octavo", *parts[:count]]))
        except ModuleNotFoundError:
            continue
        return has(found, parts[count:])
    return False


def has(module, rest):
    if not rest:
        return True
    places = [module, *(value for _, value in inspect.getmembers(module, inspect.isclass))]
    return any(
        hasattr(place, rest[0]) and (len(rest) == 1 or hasattr(getattr(place, rest[0]), rest[1])) for place in places
    )


def test_a_public_class_name_stands_once():
    assert {name: where for name, where in public_classes().items() if len(where) > 1} == {}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    assert [name for name in names((ROOT / page).read_text(encoding="utf-8")) if not is_there(name)] == []


def test_requirement_ids_lead_to_the_page():
    page = set(
        re.findall(
            r"^\| ([A-Z]{3}-\d+) \|", (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    prefixes = {name[:3] for name in page}
    cited = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"\b[A-Z]{3}-[1-9]\d*\b", path.read_text(encoding="utf-8"))
        if name[:3] in prefixes
    }
    assert len(page) == 226 and cited - page == set()


def test_the_check_finds_names_and_misses_none():
    assert names("a `scheduler.scheduler.add(x)`, the `engine.core`, `octavo.LLM` and `x.y`") == [
        "scheduler.scheduler.add", "engine.core",
    ]  # fmt: skip
    assert is_there("scheduler.scheduler") and is_there("scheduler.scheduler.Scheduler.add")
    assert not is_there("scheduler.scheduler.nothing") and not is_there("scheduler.gone")
