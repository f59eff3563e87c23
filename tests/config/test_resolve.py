"""Rules are a table: facts and intent in, values with reasons out; impossible settings say what to do."""

import dataclasses

import pytest

from octavo.base.errors import ConfigError
from octavo.config.facts import DeviceFacts, ModelFacts
from octavo.config.resolve import resolve
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig

GIB = 2**30
FACTS = ModelFacts(
    source="m", format="hf", architecture="LlamaForCausalLM", model_type="llama", vocab_size=100, hidden_size=8,
    intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_position=2048, dtype="float16",
)  # fmt: skip
CPU = DeviceFacts(
    kind="cpu", name="a processor", memory_total_bytes=10 * GIB, memory_available_bytes=8 * GIB, num_cores=2,
    capability=("avx2",),
)  # fmt: skip
BF16 = dataclasses.replace(CPU, capability=("avx2", "avx512_bf16"))
GPU = dataclasses.replace(CPU, kind="cuda", capability=("9.0",))


def config(**sections):
    return EngineConfig(**sections)


def test_nothing_is_left_unset_that_a_worker_needs():
    got = resolve(EngineConfig(), FACTS, BF16).config
    assert (got.device.device, got.model.dtype, got.model.max_model_len) == ("cpu", "bfloat16", 2048)
    assert (got.scheduler.max_num_seqs, got.scheduler.max_num_active_seqs) == (128, 128)
    assert got.scheduler.max_num_batched_tokens == 2048
    assert (got.device.num_threads, got.scheduler.async_scheduling) == (2, False)
    assert got.cache.kv_cache_memory == int(8 * GIB * 0.2)


def test_every_decision_has_a_reason_and_what_was_given_stays():
    given = config(model=ModelConfig(dtype="float32", max_model_len=64), device=DeviceConfig(num_threads=1))
    resolved = resolve(given, FACTS, BF16)
    assert all(d.why for d in resolved.decisions)
    decided = {d.field for d in resolved.decisions}
    assert not decided & {"model.dtype", "model.max_model_len", "device.num_threads"}
    assert resolved.config.model.dtype == "float32"


def test_a_processor_without_bfloat16_computes_float32():
    assert resolve(EngineConfig(), FACTS, CPU).config.model.dtype == "float32"


def test_a_gpu_gets_its_own_defaults():
    got = resolve(EngineConfig(), FACTS, GPU).config
    assert (got.scheduler.max_num_seqs, got.scheduler.async_scheduling) == (256, True)
    assert (got.cache.gpu_memory_utilization, got.cache.kv_cache_memory) == (0.9, None)


def test_a_number_of_blocks_wins_over_sizes():
    got = resolve(config(cache=CacheConfig(num_kv_blocks=7)), FACTS, CPU).config
    assert (got.cache.num_kv_blocks, got.cache.kv_cache_memory) == (7, None)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": ModelConfig(max_model_len=4096)}, "--max-model-len 4096 is more than the model's 2048"),
        ({"model": ModelConfig(max_model_len=1)}, "--max-model-len must be at least 2"),
        ({"device": DeviceConfig(device="cuda")}, "--device cuda was asked for"),
        ({"device": DeviceConfig(num_threads=0)}, "--num-threads"),
        ({"device": DeviceConfig(num_threads=10**9)}, "--num-threads must be at most"),
        ({"cache": CacheConfig(kv_cache_memory=100 * GIB)}, "--kv-cache-memory 100.00 GiB is more than the 8.00 GiB"),
        ({"cache": CacheConfig(num_kv_blocks=0)}, "--num-kv-blocks"),
        ({"cache": CacheConfig(gpu_memory_utilization=1.5)}, "--gpu-memory-utilization"),
        ({"cache": CacheConfig(block_size=0)}, "--block-size"),
        ({"cache": CacheConfig(block_size=10**30)}, "--block-size must be in"),
        ({"cache": CacheConfig(kv_cache_memory=0)}, "--kv-cache-memory must be more"),
        ({"scheduler": SchedulerConfig(max_num_seqs=10**8)}, "--max-num-seqs must be in"),
        ({"scheduler": SchedulerConfig(max_num_batched_tokens=10**11)}, "--max-num-batched-tokens must be in"),
        ({"scheduler": SchedulerConfig(max_waiting_requests=0)}, "--max-waiting-requests must be at least 1"),
        ({"scheduler": SchedulerConfig(max_num_seqs=0)}, "--max-num-seqs"),
        ({"scheduler": SchedulerConfig(max_num_seqs=4, max_num_active_seqs=5)}, "--max-num-active-seqs"),
        ({"scheduler": SchedulerConfig(max_num_batched_tokens=0)}, "--max-num-batched-tokens"),
        ({"scheduler": SchedulerConfig(kv_watermark=1.0)}, "--kv-watermark"),
        ({"scheduler": SchedulerConfig(priority_aging_s=-1.0)}, "--priority-aging-s"),
    ],
)
def test_impossible_settings_name_the_flag(sections, words):
    with pytest.raises(ConfigError, match=words):
        resolve(config(**sections), FACTS, CPU)
