"""Messages name a command that works as it stands (F55)."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from octavo.base.packages import install_command

ROOT = Path(__file__).resolve().parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_f55_the_command_names_this_python_and_the_packages_themselves() -> None:
    """F55."""
    requires = [
        "numpy",
        "redis<9,>=5; extra == 'redis'",
        'nixl>=1.5; extra == "nixl"',
        "a; extra == 'two'",
        "b; extra == 'two'",
    ]
    start = f"{shlex.quote(sys.executable)} -m pip install "
    assert install_command("redis", requires) == f"{start}'redis<9,>=5'"
    assert install_command("two", requires) == f"{start}a b"
    assert install_command("unknown", requires) == f"{start}unknown"
    assert install_command("unknown", requires, package="known") == f"{start}known"


def test_f55_without_pip_it_is_the_tool_that_made_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """F55."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert install_command("x", []) == f"uv pip install --python {shlex.quote(sys.executable)} x"


@pytest.mark.parametrize("extra", [e for e in EXTRAS if e not in ("nixl", "mooncake")])
def test_f55_the_command_runs(extra: str) -> None:
    """F55: what the tests' environment has is found already there, so nothing is fetched."""
    requires = [f"{package}; extra == '{extra}'" for package in EXTRAS[extra]]
    command = [*shlex.split(install_command(extra, requires)), "--dry-run", "--no-index", "--no-deps", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_f55_nothing_tells_people_to_install_octavo_by_name() -> None:
    """F55: the package of that name on the public index is another project."""
    places = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "changelog.d").glob("*.md"),
    ]
    places += [*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    wrong = re.compile(r"octavo\[|pip install ['\"]?octavo\b|install octavo with")
    found = [f"{p.relative_to(ROOT)}: {m[0]}" for p in places for m in wrong.finditer(p.read_text(encoding="utf-8"))]
    assert found == []
