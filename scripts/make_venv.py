"""Make the environment of this checkout in `.venv`: `make venv`, and the first step of every other recipe.

Promises: says what it does; installs the versions of `requirements/*.lock` with pip; refuses a CUDA build of torch
on a machine without a GPU before anything large is downloaded; says when the native core was not built, and refuses to
go on without it where it is developed and there is a compiler; does nothing when nothing changed.
Does not know: what is run in the environment.

Usage: python3 scripts/make_venv.py [--dev]
  TORCH_INDEX=URL   index to take torch from (PyTorch's own page names the one with CPU builds)
  TORCH_CUDA=1      take a CUDA build although no GPU is seen
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCKS = ROOT / "requirements"
OLDEST = (3, 11)


def say(line: str) -> None:
    """One line of progress."""
    print(f"make venv: {line}", flush=True)


def fail(line: str) -> None:
    """End with one sentence."""
    print(f"make venv: {line}", file=sys.stderr)
    sys.exit(1)


def pip(*args: str, capture: bool = False) -> str:
    """Run the environment's pip; ends the program when it fails."""
    command = [str(PYTHON), "-P", "-m", "pip", "--disable-pip-version-check", *args]
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True, check=False)
    if done.returncode:
        fail(f"{failed(list(args))} pip's own message is above.")
    return done.stdout or ""


def failed(args: list[str]) -> str:
    """What pip could not do, and what to look at."""
    index = os.environ.get("TORCH_INDEX")
    if index and "--index-url" in args:
        return (
            f"pip got no {args[-1]} from TORCH_INDEX={index}: is this the index of CPU builds, and can it be reached?"
        )
    return f"pip could not do '{' '.join(args[:4])} ...': can it reach its package index?"


def has_gpu() -> bool:
    """True when an NVIDIA device is visible."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def torch_requirement() -> str:
    """The torch line of the runtime lock."""
    lines = (LOCKS / "runtime.lock").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def torch_source() -> list[str]:
    """Arguments that tell pip where torch comes from."""
    index = os.environ.get("TORCH_INDEX")
    return ["--index-url", index] if index else []


def refuse_cuda_without_gpu(requirement: str) -> None:
    """Ask pip what it would install, and stop at a CUDA build that this machine cannot use."""
    if has_gpu() or os.environ.get("TORCH_CUDA") == "1":
        return
    report = pip(
        "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-",
        *torch_source(), requirement, capture=True,
    )  # fmt: skip
    found = json.loads(report)["install"][0]
    needs = found["metadata"].get("requires_dist", [])
    gpu_needs = [n for n in needs if n.lower().startswith(("nvidia-", "cuda-"))]
    if gpu_needs and "+cpu" not in found["metadata"]["version"]:
        fail(
            f"pip would install the CUDA build of {requirement} (about 3 GB with what it needs), and this machine has "
            "no GPU. Run the same make command with TORCH_INDEX=URL before it, where URL is the index of CPU builds "
            "that pytorch.org names under Get Started, pip, CPU; or with TORCH_CUDA=1 to take the CUDA build all the same."
        )


def fingerprint(dev: bool) -> str:
    """Changes when anything that decides the environment's content does."""
    digest = hashlib.sha256(sys.version.encode())
    native = sorted(path for path in (ROOT / "native").rglob("*") if path.is_file())  # a changed core is built again
    for path in [*sorted(LOCKS.glob("*.lock")), ROOT / "pyproject.toml", Path(__file__), *native]:
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {'dev' if dev else 'runtime'}"


def installed(dev: bool) -> bool:
    """True when the environment is there and up to date."""
    stamp = VENV / "octavo-stamp"
    if not (PYTHON.exists() and stamp.exists()):
        return False
    have = stamp.read_text()
    return have in (fingerprint(dev), fingerprint(True))


def report_core(dev: bool) -> None:
    """Say when the native core is missing: pip leaves it out without a word when its build fails, for whatever reason."""
    command = [str(PYTHON), "-c", "from octavo import _native"]
    if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
        return
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        say("there is no C++ compiler, so the native core was not built: on a CPU everything works, but slower")
        return
    again = f"{PYTHON.relative_to(ROOT)} -m pip install -v --no-deps --no-build-isolation -e ."
    line = f"the native core was not built although {compiler} is there; '{again}' shows why"
    (fail if dev else say)(line)


def main() -> None:
    """Make or complete the environment."""
    dev = "--dev" in sys.argv[1:]
    if sys.version_info < OLDEST:
        fail(
            f"Python {'.'.join(map(str, OLDEST))} or later is needed, this is {sys.version.split()[0]}; PYTHON=python3.11 make."
        )
    if installed(dev):
        return
    if not PYTHON.exists():
        say(f"creating {VENV.relative_to(ROOT)} with Python {sys.version.split()[0]}")
        venv.create(VENV, with_pip=True)
    requirement = torch_requirement()
    say("asking pip which build of torch it would take")
    refuse_cuda_without_gpu(requirement)
    say(f"installing {requirement} (a minute or two, quietly)")
    pip("install", "--quiet", *torch_source(), requirement)
    locks = ["runtime.lock", "build.lock", *(["dev.lock"] if dev else [])]
    say(f"installing {', '.join(locks)}")
    pip("install", "--quiet", *(a for lock in locks for a in ("-r", str(LOCKS / lock))))
    pip("install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    report_core(dev)
    (VENV / "octavo-stamp").write_text(fingerprint(dev))
    say(f"ready: {VENV.relative_to(ROOT)}/bin/octavo")


if __name__ == "__main__":
    main()
