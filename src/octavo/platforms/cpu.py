"""The CPU: what this process may use of the machine.

Promises: memory and cores are what the process may really take: control groups (versions 1 and 2, every level
above the process), processor affinity and quotas are respected.
Does not know: how many threads or bytes anybody will use.
"""

import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from octavo.config.facts import DeviceFacts
from octavo.platforms.api import RunSettings, torch_attribute
from octavo.platforms.cgroups import ControlGroups

# What /proc/cpuinfo calls the instruction sets that kernels ask for, and our name for each.
_INSTRUCTION_SETS: Final = {
    "avx2": "avx2", "fma": "fma", "f16c": "f16c", "avx_vnni": "avx_vnni", "avx512f": "avx512f",
    "avx512bw": "avx512bw", "avx512dq": "avx512dq", "avx512vl": "avx512vl", "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16", "avx512_fp16": "avx512_fp16", "amx_tile": "amx_tile", "amx_bf16": "amx_bf16",
    "amx_int8": "amx_int8",
    "asimd": "neon", "asimddp": "dotprod", "asimdhp": "fp16", "bf16": "bf16", "i8mm": "i8mm", "sve": "sve",
    "sve2": "sve2",
}  # fmt: skip


def _affinity() -> int:
    """Processors that the scheduler may run this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CpuPlatform:
    """The CPU platform. `root` and `affinity` are replaced in tests."""

    name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    visible_variable: str | None = None
    communicator = "gloo"
    worker = "octavo.worker.worker:Worker"
    compile_backend = "inductor"

    def __init__(self, root: Path = Path("/"), affinity: Callable[[], int] = _affinity) -> None:
        self._root = root
        self._affinity = affinity

    def __getattr__(self, name: str) -> Any:
        return torch_attribute("cpu", name)

    def available(self) -> bool:
        return True

    def facts(self) -> DeviceFacts:
        groups = ControlGroups.of_this_process(self._root)
        total, available = self._memory()
        limit, room = groups.memory()
        info = _lines(self._root / "proc/cpuinfo")
        return DeviceFacts(
            kind="cpu",
            name=_processor_name(info),
            memory_total_bytes=total if limit is None else min(total, limit),
            memory_available_bytes=available if room is None else max(0, min(available, room)),
            num_cores=self.num_cores(groups),
            capability=instruction_sets(info),
        )

    def num_cores(self, groups: ControlGroups | None = None) -> int:
        """Cores by affinity and quota; a quota of 2.5 cores counts as 2, since a third thread would be held back."""
        groups = ControlGroups.of_this_process(self._root) if groups is None else groups
        quota = groups.cores()
        cores = self._affinity()
        return max(1, cores if quota is None else min(cores, int(quota)))

    def adjusted(self, settings: RunSettings) -> RunSettings:
        return settings

    def _memory(self) -> tuple[int, int]:
        """(total, available) bytes of the machine; available counts caches that the kernel would give up."""
        found = {}
        for line in _lines(self._root / "proc/meminfo"):
            name, _, value = line.partition(":")
            if value.strip().endswith("kB"):
                found[name] = int(value.split()[0]) * 1024
        if "MemTotal" not in found:  # not Linux
            pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return pages, pages
        return found["MemTotal"], found.get("MemAvailable", found.get("MemFree", 0))


def instruction_sets(cpuinfo: Iterable[str]) -> tuple[str, ...]:
    """The instruction sets that matter, from the first processor's line of flags."""
    for line in cpuinfo:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            present = set(value.split())
            return tuple(ours for theirs, ours in _INSTRUCTION_SETS.items() if theirs in present)
    return ()


def _processor_name(cpuinfo: Iterable[str]) -> str:
    for line in cpuinfo:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
