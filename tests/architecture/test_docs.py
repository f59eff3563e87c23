"""What the pages about the source name is there: modules, classes and their members, functions, options and files.

Read are the life of a request, the glossary, the guide to plugins and the decision records; a name is what stands between
backticks and looks like one.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "octavo"
PAGES = [
    *(ROOT / "docs" / name for name in ("life-of-a-request.md", "glossary.md", "plugins.md")),
    *sorted((ROOT / "docs" / "adr").glob("*.md")),
]
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./*<>-]+(/|\.(py|md|toml|h|cpp))")
DOTTED = re.compile(r"(octavo\.)?[a-z]\w*(\.\w+)+")
CLASS = re.compile(r"[A-Z][a-z]\w*[A-Z]?\w*(\.\w+)?|KV[A-Z]\w+")
OPTION = re.compile(r"--[a-z][a-z-]+")
WORD = re.compile(r"[a-z]+(_[a-z]+)+(\(\))?|[a-z]+\(\)")


def members(node: ast.AST) -> set[str]:
    """Names that a module or class has: definitions, assignments, and what methods assign to self."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(child.name)
            if isinstance(node, ast.ClassDef) and not isinstance(child, ast.ClassDef):
                found |= {
                    target.attr
                    for target in ast.walk(child)
                    if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                }
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(child, (ast.If, ast.Try)):
            found |= members(child)
    return found


@cache
def source() -> tuple[dict[str, set[str]], dict[str, set[str]], str]:
    """Names by module, members by class, and all text."""
    modules: dict[str, set[str]] = {}
    classes: dict[str, set[str]] = {}
    texts = []
    for path in sorted((*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi"))):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text()
        texts.append(text)
        tree = ast.parse(text)
        modules[name] = members(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(members(node))
    texts += [path.read_text() for path in (ROOT / "native").rglob("*.h")]
    return modules, classes, "\n".join(texts)


def is_there(name: str) -> bool:
    """Whether a dotted name is a package, a module, or something in one."""
    modules, classes, _ = source()
    parts = name.removeprefix("octavo.").split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        if module in modules:
            rest = parts[count:]
            if not rest:
                return True
            if len(rest) == 1:  # of the module, or of the one class that the page speaks of
                return rest[0] in modules[module] or any(
                    rest[0] in classes[known] for known in modules[module] if known in classes
                )
            return rest[0] in modules[module] and rest[1] in classes.get(rest[0], ())
    return False


def missing(name: str) -> bool:
    """Whether this looks like a name of something that is not there."""
    _, classes, text = source()
    if FILE.fullmatch(name):
        parts = re.sub(r"<\w+>", "*", name).rstrip("/")
        return not any(next(base.glob(parts), None) for base in (ROOT, SOURCE, ROOT / "tests" / "architecture"))
    if OPTION.fullmatch(name):
        return re.search(rf"{name}(?![\w-])", (ROOT / "docs" / "options.md").read_text() + text) is None
    if DOTTED.fullmatch(name):
        first = name.removeprefix("octavo.").split(".")[0]
        return (SOURCE / first).is_dir() and not name.endswith(".json") and not is_there(name)
    if CLASS.fullmatch(name):
        cls, _, member = name.partition(".")
        in_native = re.search(rf"\b(class|struct) {cls}\b", text) is not None
        return not in_native if cls not in classes else bool(member) and member not in classes[cls]
    if WORD.fullmatch(name):
        name = name.removeprefix("octavo_kv_tier_")  # a metric is put together of the family's name and its own
        return re.search(rf"\b{name.removesuffix('()')}\b", text) is None
    return False


def test_the_readme_lists_every_folder() -> None:
    listed = re.findall(r"^\| (`.*`) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    folders = {name for cell in listed for name in QUOTED.findall(cell)}
    assert folders == {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    named = set(QUOTED.findall(page.read_text()))
    assert sorted(name for name in named if missing(name)) == []


def test_what_is_not_there_would_be_found() -> None:
    gone = ["scheduler.no_such_module", "scheduler.seams.NoSuchSeam", "ControlPart.no_such_hook", "NoSuchClass",
            "no_such_word", "no_such_function()", "--no-such-option", "tests/no_such_file.py", "features/nowhere/"]  # fmt: skip
    assert [name for name in gone if not missing(name)] == []
    there = ["scheduler.seams", "octavo.scheduler.seams.ControlPart", "scheduler.scheduler.schedule", "ControlPart.match",
             "schedule()", "slot_mapping", "features/", "n > 1", "msgspec.Struct", "scheduler.request.Request"]  # fmt: skip
    assert [name for name in there if missing(name)] == []
