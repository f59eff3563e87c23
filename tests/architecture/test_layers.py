"""Arrows point down, control never imports data, nobody imports inside functions, and no cycle exists."""

import ast
import graphlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "octavo"
CONTRACT = tomllib.loads((Path(__file__).parent / "layers.toml").read_text())
MODULES = {
    ".".join(p.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted(SOURCE.rglob("*.py"))
    if p.name != "__init__.py" or p.parent != SOURCE
}


def imports(path: Path, module: str) -> Iterator[tuple[str, bool]]:
    """(full name imported, inside a function?) for every import, type-only ones included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                known = full.removeprefix("octavo.") in MODULES
                yield (full if known else str(node.module)), node in inner


def folder(module: str) -> str:
    """The folder a module belongs to: `attention`, `features.lora`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "features" else parts[0]


def matches(module: str, names: list[str]) -> bool:
    """True when the module is one of these or inside one of them."""
    return any(module == n or module.startswith(n + ".") for n in names)


def layer(module: str) -> int:
    """A module's layer; unknown folders fail here."""
    name = folder(module)
    return CONTRACT["layers"].get(name, 7 if name.split(".")[0] == "features" else None)


EDGES = [
    (module, name.removeprefix("octavo."), inside)
    for module, path in MODULES.items()
    for name, inside in imports(path, module)
    if name.startswith("octavo.") and name != "octavo.__version__"
]


def test_every_folder_has_a_layer():
    assert [m for m in MODULES if layer(m) is None] == []


def test_arrows_point_down():
    allowed = {tuple(part.strip() for part in key.split("->")) for key in CONTRACT["sideways"]}
    wrong = []
    for source, target, _ in EDGES:
        if folder(source) == folder(target) or layer(target) < layer(source):
            continue
        if any(matches(source, [a]) and matches(target, [b]) for a, b in allowed):
            continue
        wrong.append(f"{source} -> {target}")
    assert wrong == []


def test_planes_keep_apart():
    planes = CONTRACT["planes"]
    exceptions = CONTRACT["torch_exceptions"]["allowed"]
    wrong = []
    for module, path in MODULES.items():
        control = matches(module, planes["control"])
        for name, _ in imports(path, module):
            target = name.removeprefix("octavo.")
            inside = name.startswith("octavo.")
            if control and not inside and matches(name, planes["third_party_of_data"]) and module not in exceptions:
                wrong.append(f"control {module} -> {name}")
            if control and inside and target in MODULES and not matches(target, planes["control"]):
                wrong.append(f"control {module} -> data {target}")
            if not control and inside and matches(target, planes["data_may_not_import"]):
                wrong.append(f"data {module} -> control {target}")
    assert wrong == []


def test_function_level_imports_are_listed_with_a_reason():
    allowed = CONTRACT["function_level_imports"]
    found = sorted({m for m, p in MODULES.items() for _, inside in imports(p, m) if inside})
    print(f"function-level imports: {len(found)} modules {found}")
    assert [m for m in found if m not in allowed] == []
    assert [m for m in allowed if m in MODULES and m not in found] == [], "listed but no longer needed"


def test_no_import_cycles():
    graph: dict[str, set[str]] = {m: set() for m in MODULES}
    for source, target, _ in EDGES:
        if target in graph and target != source:
            graph[source].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))
