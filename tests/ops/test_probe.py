"""The machine's own limits are measured, at every level (OPS-8)."""

import json

import pytest
import torch

native = pytest.importorskip("octavo.ops.native", reason="the package was built without the native core")
from octavo.ops import probe  # noqa: E402


@pytest.mark.parametrize("name", native.levels())
def test_every_level_has_its_limits(name):
    native.use_level(name)
    try:
        limits = probe.measure(memory_bytes=8 << 20)
    finally:
        native.use_level(native.levels()[-1])
    assert limits.level == name and limits.num_threads == torch.get_num_threads()
    assert 0.1 < limits.read_gb_s < 10_000
    assert 0.05 < limits.bf16_gflop_s < 1e6 and 0.05 < limits.int8_gop_s < 1e6


def test_all_of_the_memory_is_read():
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    size = len(memory) - 64
    start = -memory.data_ptr() % 64
    memory = memory[start : start + size // 64 * 64]
    for name in native.levels():
        native.use_level(name)
        assert native.core.probe_read(memory.data_ptr(), len(memory)) == 0
        for at in (0, len(memory) // 2, len(memory) - 1):
            memory[at] = 7
            assert native.core.probe_read(memory.data_ptr(), len(memory)) == 7 << 8 * (at % 8)
            memory[at] = 0


def test_it_prints_one_line_of_json(capsys, monkeypatch):
    limits = probe.MachineLimits(read_gb_s=20.5, bf16_gflop_s=400.0, int8_gop_s=800.0, level="avx2", num_threads=2)
    monkeypatch.setattr(probe, "measure", lambda: limits)
    assert probe.main() == 0
    assert json.loads(capsys.readouterr().out) == {
        "read_gb_s": 20.5,
        "bf16_gflop_s": 400.0,
        "int8_gop_s": 800.0,
        "level": "avx2",
        "num_threads": 2,
    }
