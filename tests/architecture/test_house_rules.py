"""House rules that a machine can see: torch-free control, one reader of the environment, no mixins, small globals."""

import ast
import builtins
import subprocess
import sys
from pathlib import Path

import octavo
from tests.architecture.test_layers import CONTRACT, MODULES, matches

CONTROL = [
    m for m in MODULES if matches(m, CONTRACT["planes"]["control"]) and m not in CONTRACT["torch_exceptions"]["allowed"]
]


def fresh(code: str) -> str:
    """Run code in a fresh interpreter; its standard output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_control_module_imports_without_torch_or_transformers():
    names = [f"octavo.{m}" for m in CONTROL]
    code = (
        f"import sys, importlib\nfor n in {names!r}: importlib.import_module(n)\n"
        "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    assert fresh(code) == "[]"


def test_the_control_plane_imports_in_under_a_second():
    """Of processor time, so that a busy neighbour does not count."""
    names = [f"octavo.{m}" for m in CONTROL if not matches(m, ["entrypoints", *CONTRACT["imported_late"]])]
    late = [f"octavo.{m}" for m in CONTRACT["imported_late"]]
    code = (
        f"import importlib, sys, time\nt = time.process_time()\nfor n in {names!r}: importlib.import_module(n)\n"
        f"assert not set({late!r}) & sys.modules.keys()\n"
        "print(time.process_time() - t)"
    )
    assert min(float(fresh(code)) for _ in range(3)) < 1.0


def test_only_config_env_reads_the_environment():
    wrong = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("environ", "getenv", "putenv") and module != "config.env":
                wrong.append(module)
    assert sorted(set(wrong)) == []


def test_no_mixins_and_no_second_concrete_base():
    wrong = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(b) for b in node.bases]
                concrete = [b for b in bases if not b.startswith(("Protocol", "Generic", "ABC", "typing."))]
                if len(concrete) > 1:  # an error may also be the built-in error that people catch
                    concrete = [b for b in concrete if not hasattr(builtins, b)]
                if node.name.endswith("Mixin") or len(concrete) > 1:
                    wrong.append(f"{module}.{node.name}({', '.join(bases)})")
    assert wrong == []


def test_no_global_statement():
    wrong = [
        m for m, p in MODULES.items() if any(isinstance(n, ast.Global) for n in ast.walk(ast.parse(p.read_text())))
    ]
    assert wrong == []


def test_every_module_says_what_it_promises():
    missing = [
        m for m, p in MODULES.items() if not (ast.get_docstring(ast.parse(p.read_text(encoding="utf-8"))) or "").strip()
    ]
    assert missing == []


def test_the_public_surface_is_what_is_listed():
    assert sorted(octavo.__all__, key=str.lower) == sorted(
        ["LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob", "__version__"], key=str.lower
    )
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None


def test_nothing_outside_the_repository_is_read():
    root = Path(__file__).resolve().parents[2]
    wrong = [
        str(p.relative_to(root))
        for folder in ("src", "tests", "scripts", "benchmarks")
        for p in (root / folder).rglob("*.py")
        if p != Path(__file__) and ("/work/" in (text := p.read_text(encoding="utf-8")) or "../shared" in text)
    ]
    assert wrong == []
