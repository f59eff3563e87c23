"""Random weights (`--load-format dummy`) in an engine's process, whatever they are kept as (F51)."""

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from octavo.engine.process import SocketClient
from tests.cases.test_quantization import int8_checkpoint
from tests.inputs.builders import byte_bpe, gguf_of_bpe
from tests.support import checkpoints
from tests.support.gguf_files import write_gguf

ROOT = Path(__file__).resolve().parents[2]
# What an engine's process imports of torch, and then every way to keep weights; one line for each that gave tokens.
GRID = """
import sys
from octavo.platforms import lean
lean.import_torch()
from octavo import LLM, SamplingParams
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
for case in sys.argv[1:]:
    path, dtype, scheme = case.split("|")
    options = {"quantization": scheme} if scheme else {}
    with LLM(path, load_format="dummy", dtype=dtype, num_threads=1, num_kv_blocks=16, **options) as llm:
        (result,) = llm.generate(["hello"], greedy)
        print("tokens", case, len(result.outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Checkpoints that are quantized on disk."""
    folder = tmp_path_factory.mktemp("stored")
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    source = checkpoints.tiny_llama(folder / "hf", **wide)
    bpe = gguf_of_bpe(byte_bpe(), "smollm")
    files = [write_gguf(source, folder / f"{q}.gguf", quant=q, metadata=bpe) for q in ("F32", "Q8_0", "Q4_0")]
    return [*files, int8_checkpoint(folder / "int8")]


def test_every_dtype_and_scheme_starts_and_answers(stored):
    """F51: RuntimeError of torch.Generator in the engine process."""
    schemes = ("", "none", "int8_per_channel", "int4_group")
    cases = [f"{checkpoints.tiny_llama()}|{d}|{s}" for d in ("float32", "bfloat16", "float16") for s in schemes]
    cases += [f"{path}|{dtype}|" for path in stored for dtype in ("float32", "bfloat16")]
    command = [sys.executable, "-P", "-c", GRID, *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told = [line.removeprefix("tokens ") for line in done.stdout.splitlines() if line.startswith("tokens ")]
    assert told == [f"{case} 4" for case in cases]


def test_the_engines_own_process_starts_with_them():
    """F51, through the process itself."""
    config = EngineConfig(
        model=ModelConfig(model=str(checkpoints.tiny_llama()), load_format="dummy", dtype="bfloat16"),
        cache=CacheConfig(num_kv_blocks=16),
        device=DeviceConfig(num_threads=1),
    )
    client = SocketClient(config, lambda line: None)
    try:
        assert client.wait_ready().num_kv_blocks == 16
    finally:
        client.close()
