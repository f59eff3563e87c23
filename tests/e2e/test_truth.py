"""Octavo's tokens are Transformers' tokens, however the work is cut, cached, preempted or overlapped.

The full size (64 prompts x 128 tokens) is in the slow suite; `make test` runs 8 x 32 of each.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from tests.support import checkpoints
from tests.support.prompts import prompts, sharing_prefix
from tests.support.truth import Reference

SMALL, FULL = (8, 32), (64, 128)
SIZES = [pytest.param(SMALL, id="8x32"), pytest.param(FULL, id="64x128", marks=pytest.mark.slow)]


def blocks_for(sequences: float, tokens: int, block_size: int = 16) -> int:
    """Blocks that this many sequences of this length need."""
    return int(sequences * -(-tokens // block_size))


def run(path: Path, texts: list[str], length: int, logprobs: int | None = None, repeat: int = 1, **options: Any):
    """Outputs of one engine for these texts, and its statistics; with `repeat`, those of the last time."""
    threads = (
        1 if length == SMALL[1] else 2
    )  # two threads only where they pay: beside other work they wait for each other
    settings = {"dtype": "float32", "block_size": 16, "max_model_len": 1024, "num_threads": threads, **options}
    with LLM(model=str(path), **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=logprobs)
        for _ in range(repeat):
            outputs = llm.generate(texts, params)
        return outputs, llm.stats()


def variants(texts: int, longest: int) -> dict[str, dict[str, Any]]:
    """The runs of the issue's third line, by name."""
    few = blocks_for(2.2, longest)
    return {
        "one batch": {"max_num_seqs": 32},
        "chunked": {"max_num_batched_tokens": 64},
        "prefix cache": {"enable_prefix_caching": True, "repeat": 2},
        "preempted": {"num_kv_blocks": few, "max_model_len": longest + 16},
        "together": {
            "max_num_seqs": 32, "max_num_batched_tokens": 64, "num_kv_blocks": few, "max_model_len": longest + 16,
            "enable_prefix_caching": True, "async_scheduling": True,
        },
        "asynchronous": {"async_scheduling": True},
    }  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Path, Reference]]:
    path = checkpoints.smollm2_f32()
    yield path, Reference(path)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("size", SIZES)
def test_smollm2_in_float32_is_true_in_every_run(smollm2, size):
    path, reference = smollm2
    count, length = size
    texts = prompts(count // 2) + sharing_prefix(count // 2)
    plain, _ = run(path, texts, length, max_num_seqs=1, enable_prefix_caching=False, logprobs=5)
    ties = sum(reference.check_tokens(o.prompt_token_ids, o.outputs[0].token_ids) for o in plain)
    errors = np.concatenate(
        [reference.logprob_errors(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in plain]
    )
    print(f"{count}x{length}: {ties} ties, logprob error median {np.median(errors):.1e}, max {errors.max():.1e}")
    assert np.median(errors) <= 1e-4
    assert errors.max() <= 5e-4
    longest = max(len(o.prompt_token_ids) for o in plain) + length
    for name, options in variants(count, longest).items():
        outputs, stats = run(path, texts, length, **options)
        for a, b in zip(plain, outputs, strict=True):
            reference.check_tokens(b.prompt_token_ids, b.outputs[0].token_ids)
            reference.check_same(a.prompt_token_ids, a.outputs[0].token_ids, b.outputs[0].token_ids)
        if name in ("preempted", "together"):
            assert stats.preemptions > 0, name
        if name == "prefix cache":
            assert stats.prefix_hits > 0


FAMILIES = {
    "llama": lambda: checkpoints.tiny_llama(),
    "llama tied": lambda: checkpoints.tiny_llama(tie_word_embeddings=True),
    "mistral window": lambda: checkpoints.tiny_mistral(),
    "qwen2": lambda: checkpoints.tiny_qwen2(),
    "qwen3": lambda: checkpoints.tiny_qwen3(),
    "window": lambda: checkpoints.tiny_swa(),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_checkpoints_of_each_family_are_true_in_every_run(family):
    path = FAMILIES[family]()
    reference = Reference(path)
    texts = prompts(8)
    plain, _ = run(path, texts, 32, max_num_seqs=1, enable_prefix_caching=False, logprobs=3)
    for o in plain:
        reference.check_tokens(o.prompt_token_ids, o.outputs[0].token_ids)
        assert reference.logprob_errors(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs).max() < 5e-4
    longest = max(len(o.prompt_token_ids) for o in plain) + 32
    for name, options in variants(8, longest).items():
        outputs, stats = run(path, texts, 32, **options)
        for a, b in zip(plain, outputs, strict=True):
            reference.check_same(a.prompt_token_ids, a.outputs[0].token_ids, b.outputs[0].token_ids)
        if name == "preempted":
            assert stats.preemptions > 0
