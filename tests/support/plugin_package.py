"""A package that extends Octavo, as if it were installed.

Promises: `write` makes a module and the metadata of its entry points in a folder; `complete` runs `octavo complete` in a
process that finds them there.
Does not know: what the package does.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def write(folder: Path, name: str, module: str, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    """A package `name` of one module of that name; `entry_points` are targets by name, by group."""
    (folder / f"{name}.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (f"[{group}]\n" + "".join(f"{n} = {t}\n" for n, t in here.items()) for group, here in entry_points.items())
    (info / "entry_points.txt").write_text("".join(groups))


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This process's environment with the packages in a folder; plugins are those that `more` selects, or all."""
    base = {name: value for name, value in os.environ.items() if name != "OCTAVO_PLUGINS"}
    where = os.pathsep.join([str(folder), base.get("PYTHONPATH", "")])
    return {**base, "PYTHONPATH": where, **more}


def complete(folder: Path, model: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What `octavo complete` says and gives for two tokens of a model."""
    command = [sys.executable, "-m", "octavo.entrypoints.cli", "complete", "x", "--model", str(model)]
    limits = ["--max-tokens", "2", "--num-threads", "1"]
    return subprocess.run(
        [*command, *limits, *args], capture_output=True, text=True, timeout=90, env=environment(folder, **env)
    )
