"""The same request gives the same bits, whatever runs beside it and however its work is cut (ATT-13, OUT-30).

Every log-probability is compared as a float, not only the token: one changed rounding anywhere would show. Tiny
checkpoints in `make test`; SmolLM2 in bfloat16 and quantized in the slow suite.
"""

import functools
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.support import checkpoints
from tests.support.prompts import prompts, sharing_prefix

LONG = "The lighthouse keeper counted the ships that passed, wrote each one down, and added the weather. " * 10
VARIANTS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "two": {"max_num_seqs": 2},
    "seven": {"max_num_seqs": 7},
    "all sixty-four": {"max_num_seqs": 64},
    "one thread": {"num_threads": 1, "max_num_seqs": 16},
    "chunks of 1": {"long_prefill_token_threshold": 1, "max_num_seqs": 16},
    "chunks of 3": {"long_prefill_token_threshold": 3},
    "chunks of 17": {"long_prefill_token_threshold": 17},
    "chunks of 128": {"long_prefill_token_threshold": 128},
    "steps of 64": {"max_num_batched_tokens": 64},
    "steps of 512": {"max_num_batched_tokens": 512},
    "prefix hits": {"enable_prefix_caching": True, "repeat": 2},
    "small blocks": {"block_size": 16},
    "asynchronous": {"async_scheduling": True},
    "preempted": {"num_kv_blocks": 70, "block_size": 16, "preempts": True},
}


def run(
    path: Path,
    texts: list[str],
    params: list[SamplingParams],
    *,
    repeat: int = 1,
    preempts: bool = False,
    **options: Any,
):
    """Each request's tokens and every log-probability given for it."""
    settings = {"max_model_len": 640, "max_num_seqs": 64, "enable_prefix_caching": False, "num_threads": 2, **options}
    with LLM(model=str(path), **settings) as llm:
        for _ in range(repeat):
            outputs = llm.generate(texts, params)
        stats = llm.stats()
    if preempts:
        assert stats.preemptions > 0
    if repeat > 1:
        assert stats.prefix_hits > 0
    return [
        (
            o.outputs[0].token_ids,
            [{t: entry.logprob for t, entry in line.items()} for line in o.outputs[0].logprobs],
        )
        for o in outputs
    ]


def requests(length: int) -> tuple[list[str], list[SamplingParams]]:
    """64 requests, short, long and sharing a beginning, greedy and drawn by a seed."""
    texts = [*prompts(40), *sharing_prefix(20), *(LONG[i:] for i in range(4))]
    params = [
        SamplingParams(
            temperature=(0.0, 0.8, 1.0, 0.7)[i % 4],
            top_p=0.9 if i % 4 == 3 else 1.0,
            seed=i,
            max_tokens=length,
            ignore_eos=True,
            logprobs=5,
        )
        for i in range(len(texts))
    ]
    return texts, params


@functools.cache
def plain_run(path: Path, length: int, options: tuple[tuple[str, Any], ...]):
    """All requests at once: what every other run is compared with."""
    return run(path, *requests(length), **dict(options))


def check(path: Path, length: int, names: list[str], **options: Any) -> None:
    texts, params = requests(length)
    plain = plain_run(path, length, tuple(sorted(options.items())))
    for name in names:
        other = run(path, texts, params, **{**options, **VARIANTS[name]})
        for i, (a, b) in enumerate(zip(plain, other, strict=True)):
            assert a == b, f"{name}: request {i} differs from the run of all at once"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_tiny_model_gives_the_same_bits(name, dtype):
    check(checkpoints.tiny_llama(), 6, [name], dtype=dtype, num_threads=1)


@pytest.mark.parametrize("quantization", ["int8_per_channel", "int4_group"])
@pytest.mark.parametrize("name", ["one at a time", "seven", "chunks of 17", "prefix hits", "preempted"])
def test_a_quantized_tiny_model_gives_the_same_bits(name, quantization):
    check(checkpoints.tiny_llama(), 6, [name], dtype="bfloat16", quantization=quantization, num_threads=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["one at a time", "seven", "chunks of 17", "prefix hits", "preempted"])
def test_a_cache_of_fewer_bits_gives_the_same_bits(name, kv_cache_dtype, dtype):
    """ATT-10, ATT-13: a chunk reads back its own keys and values as the cache keeps them."""
    check(checkpoints.tiny_llama(), 6, [name], dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_threads=1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("quantization", [None, "int8_per_channel", "int4_group"])
def test_smollm2_gives_the_same_bits_in_every_run(quantization):
    check(checkpoints.smollm2_f32(), 16, list(VARIANTS), dtype="bfloat16", quantization=quantization)
