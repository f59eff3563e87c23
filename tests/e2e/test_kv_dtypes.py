"""A KV cache of fewer bits (ATT-10): near to what bfloat16 gives, about twice the room, refused where it cannot be."""

import pytest
import torch

from octavo import LLM
from octavo.base.errors import ConfigError
from octavo.config.facts import read_model_facts
from octavo.models.build import BuildSettings
from octavo.models.loader import WeightSource, load_model
from octavo.platforms.api import probe
from tests.models.oracle import PagedRun
from tests.support import checkpoints

pytest.importorskip("octavo.ops.native", exc_type=ImportError)


def logits(kv_dtype: torch.dtype) -> torch.Tensor:
    """Of 48 tokens, cut into three chunks and steps of one."""
    path = checkpoints.tiny_llama(dtype="bfloat16")
    settings = BuildSettings(
        dtype=torch.bfloat16, device_facts=probe("cpu"), max_model_len=64, block_size=16, kv_dtype=kv_dtype
    )
    loaded = load_model(read_model_facts(path), settings, WeightSource())
    run = PagedRun(loaded.model, 1, 64, block_size=16, backend=loaded.backend)
    tokens = [(37 * i) % 400 for i in range(48)]
    parts = [tokens[:20], tokens[20:37], *([t] for t in tokens[37:])]
    return torch.cat([run.step({0: part})[0] for part in parts])


@pytest.mark.parametrize(("kv_dtype", "most"), [(torch.int8, 2e-3), (torch.float8_e4m3fn, 2e-2)])
def test_answers_are_near_those_of_a_bfloat16_cache(kv_dtype: torch.dtype, most: float) -> None:
    p, q = (torch.log_softmax(logits(t).double(), dim=-1) for t in (torch.bfloat16, kv_dtype))
    divergence = (p.exp() * (p - q)).sum(-1).mean().item()
    print(f"mean KL divergence to a bfloat16 cache: {divergence:.2e} nats")
    assert 0 < divergence <= most


def num_blocks(**options: object) -> int:
    with LLM(
        model=str(checkpoints.tiny_llama()), dtype="bfloat16", max_model_len=128, kv_cache_memory=2 << 20, **options
    ) as llm:
        return int(llm.stats().num_blocks_total)


def test_the_same_memory_holds_more_blocks() -> None:
    head_dim = 16
    for kv_cache_dtype in ("fp8", "int8"):
        ratio = num_blocks(kv_cache_dtype=kv_cache_dtype) / num_blocks()
        assert ratio == pytest.approx(2 * head_dim / (head_dim + 4), rel=0.02), "a byte a value, and a float32 scale"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_the_reference_backend_refuses_it(kv_cache_dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"torch_sdpa.*does not keep .* KV"):
        LLM(model=str(checkpoints.tiny_llama()), kv_cache_dtype=kv_cache_dtype, attention_backend="torch_sdpa")


def test_an_unknown_type_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype must be one of auto, bfloat16, fp8, int8"):
        LLM(model=str(checkpoints.tiny_llama()), kv_cache_dtype="int2")
