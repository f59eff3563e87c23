"""Which kernels compute, and the engine without the native core (QNT-23)."""

import os
import re
import subprocess
import sys

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.ops import kernels
from octavo.ops.registry import OP_NAMES
from tests.support.checkpoints import tiny_llama

BLOCKED = """
import importlib.abc, sys
class NoCore(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "octavo._native":
            raise ImportError("it was built without a compiler")
sys.meta_path.insert(0, NoCore())
"""
ANSWER = """
import sys
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from octavo.engine.startup import build_core
config = EngineConfig(
    model=ModelConfig(model=sys.argv[1], dtype="float32"),
    cache=CacheConfig(num_kv_blocks=64),
    device=DeviceConfig(device="cpu", num_threads=1, **{options}),
)
started = build_core(config, lambda line: None)
sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
started.core.add(EngineRequest(request_id="a", prompt_token_ids=(5, 6, 7, 8, 9), sampling=sampling))
tokens = []
while started.core.busy:
    for delta in started.core.step().deltas:
        tokens += delta.new_token_ids
started.core.stop()
print("tokens", tokens)
print("notes", list(started.report.notes))
"""


def answer(before: str = "", **options: object) -> tuple[str, list[str]]:
    """(tokens, notes) of an engine in a fresh interpreter."""
    code = before + ANSWER.replace("{options}", repr(options))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_llama())], capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokens, notes = (re.search(rf"^{name} (.*)$", done.stdout, re.M)[1] for name in ("tokens", "notes"))
    return tokens, eval(notes)


def test_the_package_works_without_the_native_core_and_says_so_once():
    tokens, notes = answer(BLOCKED)
    assert [note for note in notes if "native core" in note] == [
        "the native core is not there (it was built without a compiler): running on PyTorch's operators"
    ]
    assert len(notes) == 1
    assert (tokens, []) == answer(kernels="reference"), "who asked for it is told nothing"


def test_the_native_core_is_found_and_records():
    pytest.importorskip("octavo.ops.native")
    tokens, notes = answer()
    assert not notes and tokens == answer(kernels="reference")[0]


def test_reference_means_pytorch_everywhere():
    chosen = kernels.choose("reference", "cpu")
    assert chosen.make_tape is None and chosen.attention_backend == "torch_sdpa" and not chosen.notes
    assert dict(chosen.forced) == dict.fromkeys(OP_NAMES, "reference")


def test_a_level_can_be_named():
    native = pytest.importorskip("octavo.ops.native")
    try:
        for level in native.levels():
            assert kernels.choose(level, "cpu").make_tape is native.core.Tape
            assert native.core.level() == level
        with pytest.raises(
            ConfigError, match=r"--kernels neon: this machine's processor cannot run them; it can run scalar"
        ):
            kernels.choose("neon", "cpu")
        with pytest.raises(ConfigError, match=r"--kernels avx2 is for the CPU; on cuda it can be auto or reference"):
            kernels.choose("avx2", "cuda")
    finally:
        native.use_level(native.levels()[-1])
    assert kernels.choose("auto", "cuda") == kernels.Kernels()


def test_without_the_core_a_level_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "NATIVE", None)
    monkeypatch.setattr(kernels, "WHY_NOT", "no compiler")
    with pytest.raises(ConfigError, match="needs the native core, which is not there: no compiler"):
        kernels.choose("avx2", "cpu")
    assert kernels.choose("auto", "cuda").notes == ()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_there_is_one_pool_of_compute_threads():
    """Two pools on two cores were measured 600 times slower than one."""
    native = pytest.importorskip("octavo.ops.native")
    code = (  # other packages of a test run bring pools of their own, which nothing of ours uses
        "import octavo.ops.native\n"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1", done.stderr
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert native.core.num_threads() == torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
