"""The native core as it is built and shipped: sanitizers, wheels with and without a compiler (QNT-23)."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, torch
from octavo.config.facts import DeviceFacts
from octavo.platforms.api import probe
from octavo.ops.registry import OpRegistry
ops, choices = OpRegistry().bind_explained(probe("cpu"), torch.bfloat16)
x, w = torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16)
print(ops.rms_norm(x, w, 0.0).float().sum().item(), {c.implementation for c in choices})
"""


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; what it printed is shown when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=1500)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def wheel(folder: Path, **environment: str) -> Path:
    """The package's wheel, built from a copy of the sources, so that nothing built before is found."""
    source = folder / "source"
    for name in ("native", "src"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    flags = ["--quiet", "--no-build-isolation", "--no-deps", "--disable-pip-version-check"]
    run(
        [sys.executable, "-m", "pip", "wheel", *flags, "-w", str(folder / "out"), str(source)], PATH=path, **environment
    )
    (made,) = (folder / "out").glob("*.whl")
    return made


def run_installed(made: Path, folder: Path) -> str:
    """What the operators say when this wheel is what `import octavo` finds, on a machine without a compiler."""
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder / "site")
    code = f"import sys; sys.path.insert(0, {str(folder / 'site')!r})\n{RUN}"
    program = [sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}\n{code}"]  # -S: no editable install
    return run(program, PATH="/nonexistent", CXX="/bin/false").stdout


@pytest.mark.slow
def test_operators_are_clean_under_address_and_undefined_behaviour_sanitizers(tmp_path):
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g"
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(tmp_path), "-G", "Ninja", "-DOCTAVO_CHECKS=ON"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run([*configure, f"-DCMAKE_CXX_FLAGS={flags}"], PATH=path)
    run(["cmake", "--build", str(tmp_path)], PATH=path)
    done = run([str(tmp_path / "native_checks")], ASAN_OPTIONS="detect_leaks=0")
    assert "scalar" in done.stdout


@pytest.mark.slow
def test_a_wheel_runs_without_a_compiler_and_links_nothing_unusual(tmp_path):
    made = wheel(tmp_path)
    with zipfile.ZipFile(made) as archive:
        (core,) = [n for n in archive.namelist() if n.startswith("octavo/_native") and n.endswith(".so")]
    assert "native" in run_installed(made, tmp_path)
    needed = run(["objdump", "-p", str(tmp_path / "site" / core)]).stdout
    libraries = {line.split()[1].partition(".so")[0] for line in needed.splitlines() if "NEEDED" in line}
    assert libraries <= {"libstdc++", "libgomp", "libgcc_s", "libc", "libm", "libpthread", "ld-linux-x86-64"}


@pytest.mark.slow
def test_without_a_compiler_the_package_installs_and_runs_on_torch(tmp_path):
    made = wheel(tmp_path, CXX="/bin/false", CC="/bin/false")
    assert made.name.endswith("-none-any.whl")
    out = run_installed(made, tmp_path)
    assert "{'reference'}" in out and out.startswith("15.0")
