"""Facts of a CPU from the files of /proc."""

from pathlib import Path

import pytest

from octavo.platforms.cpu import CpuPlatform, instruction_sets
from tests.platforms.trees import GIB, v2, write

X86 = (
    "processor\t: 0\nmodel name\t: Some Processor\n"
    "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile sse2\n\nprocessor\t: 1\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp bf16 i8mm sve\n"


def machine(root: Path, **files: str) -> Path:
    meminfo = (
        f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {12 * GIB // 1024} kB\nHugePages_Total: 0\n"
    )
    return write(root, {"proc/meminfo": meminfo, "proc/cpuinfo": X86, **files})


def test_a_bare_machine(tmp_path: Path) -> None:
    facts = CpuPlatform(machine(tmp_path), affinity=lambda: 6).facts()
    assert facts.kind == "cpu"
    assert facts.name == "Some Processor"
    assert (facts.memory_total_bytes, facts.memory_available_bytes) == (16 * GIB, 12 * GIB)
    assert facts.num_cores == 6
    assert facts.capability == ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def test_a_container_has_what_it_was_given(tmp_path: Path) -> None:
    files = v2() | {
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/cpu.max": "250000 100000\n",
    }
    facts = CpuPlatform(write(machine(tmp_path), files), affinity=lambda: 8).facts()
    assert (facts.memory_total_bytes, facts.memory_available_bytes) == (2 * GIB, GIB)
    assert facts.num_cores == 2  # 2.5 cores' quota: a third thread would be held back


def test_a_limit_above_the_machine_is_no_limit(tmp_path: Path) -> None:
    files = v2() | {"sys/fs/cgroup/memory.max": f"{64 * GIB}\n", "sys/fs/cgroup/memory.current": "0\n"}
    facts = CpuPlatform(write(machine(tmp_path), files), affinity=lambda: 1).facts()
    assert (facts.memory_total_bytes, facts.memory_available_bytes) == (16 * GIB, 12 * GIB)


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("max 100000", 3), ("900000 100000", 3)])
def test_there_is_always_a_core_and_never_more_than_affinity(tmp_path: Path, quota: str, cores: int) -> None:
    root = write(machine(tmp_path), v2() | {"sys/fs/cgroup/cpu.max": quota})
    assert CpuPlatform(root, affinity=lambda: 3).facts().num_cores == cores


def test_arm_names_are_translated() -> None:
    assert instruction_sets(ARM.splitlines()) == ("neon", "dotprod", "bf16", "i8mm", "sve")


def test_nothing_known_is_no_capability() -> None:
    assert instruction_sets([]) == ()


def test_this_machine_can_be_asked() -> None:
    facts = CpuPlatform().facts()
    assert 0 < facts.memory_available_bytes <= facts.memory_total_bytes
    assert facts.num_cores >= 1
