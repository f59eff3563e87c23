"""How long `octavo serve` takes from its command to being ready, and to the first token of the first request.

Promises: the whole command is timed, interpreter and imports included; each run says what is known of the file
cache before it; the server's own account of its stages is kept.
Does not know: what happens in those stages.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from octavo.base.errors import ServerError
from octavo.bench.load import LoadTarget, run_load
from octavo.bench.report import Spread, spread, spread_table
from octavo.bench.serve import started
from octavo.bench.workloads import Item, Workload

_STAGES = re.compile(r"start-up(?: in [\d.]+ s)?: (.+)$")
_STAGE = re.compile(r"([^,]+?) ([\d.]+) s(?:,|$)")

AS_FOUND, DROPPED, WARM = "as found", "dropped from the file cache", "warm"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start. Seconds from the command; `stages` by the server's own log."""

    files: str  # what is known of the model's files in the file cache
    ready_s: float
    first_token_s: float
    stages: dict[str, float]


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """All starts, and their spread: of the runs with a warm file cache, or of all when there are none."""

    runs: tuple[Start, ...]
    ready_s: Spread
    first_token_s: Spread


def start_once(
    arguments: Sequence[str], files: str, prompt: Item, clock: Callable[[], float] = time.perf_counter
) -> Start:
    """Start `octavo serve ARGUMENTS`, ask for `prompt`, and stop it. Raises `ServerError` when either fails."""
    start_s = clock()
    with started(arguments, clock=clock) as server:
        before_s = clock() - start_s
        work = Workload(name="first token", items=(prompt,), concurrency=1)
        sample = run_load(LoadTarget(base_url=server.url, model=server.model), work).samples[0]
        if sample.error or sample.first_token_s is None:
            raise ServerError(f"the first request failed: {sample.error or 'no token came'}")
        return Start(
            files=files,
            ready_s=server.ready_s,
            first_token_s=before_s + sample.first_token_s,
            stages=stages([text for _, text in server.lines]),
        )


def measure_starts(
    arguments: Sequence[str],
    *,
    runs: int,
    prompt: Item,
    drop: Sequence[Path] = (),
    start: Callable[[Sequence[str], str, Item], Start] = start_once,
) -> Startup:
    """Start and stop `octavo serve ARGUMENTS` `runs` times; `drop`: files to put out of the file cache before each."""
    found: list[Start] = []
    for i in range(runs):
        files = WARM if i else AS_FOUND
        if drop:
            files = DROPPED if drop_from_cache(drop) else AS_FOUND
        found.append(start(arguments, files, prompt))
    counted = [s for s in found if s.files == WARM] or found
    return Startup(
        runs=tuple(found),
        ready_s=spread([s.ready_s for s in counted]),
        first_token_s=spread([s.first_token_s for s in counted]),
    )


def stages(lines: Sequence[str]) -> dict[str, float]:
    """The stages in a start-up log, in seconds; empty when it names none."""
    for line in lines:
        if match := _STAGES.search(line):
            return {name.strip(): float(seconds) for name, seconds in _STAGE.findall(match[1])}
    return {}


def model_files(path: Path) -> list[Path]:
    """The files of a model: itself, or what its folder holds."""
    return [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]


def drop_from_cache(files: Sequence[Path]) -> bool:
    """Ask the kernel to forget these files' pages; False where it cannot be asked. Pages in use elsewhere stay."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        with contextlib.suppress(OSError), file.open("rb") as handle:
            os.fsync(handle.fileno())  # pages not yet written cannot be dropped
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def startup_table(found: Startup) -> str:
    """The figures for people."""
    lines = [f"{'run':<5}{'model files':<29}{'ready s':>9}{'first token s':>15}  stages by the server's log"]
    for i, one in enumerate(found.runs, 1):
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in one.stages.items()) or "-"
        lines.append(f"{i:<5}{one.files:<29}{one.ready_s:>9.2f}{one.first_token_s:>15.2f}  {parts}")
    lines += ["", f"over the {found.ready_s.num} runs that count:"]
    return "\n".join(lines + spread_table({"ready": found.ready_s, "token": found.first_token_s}))
