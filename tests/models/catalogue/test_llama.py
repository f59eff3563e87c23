"""The Llama group against Transformers on tiny random checkpoints (EXE-23): same logits, same greedy tokens.

Float32 logits must agree within 1e-4 of each other for logits of order one to ten.
"""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.models.oracle import PagedRun, hf_logits, pair

torch.set_num_threads(1)
TOLERANCE = 1e-4

BASE = {
    "vocab_size": 211,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def llama(**changes):
    return LlamaConfig(**{**BASE, "architectures": ["LlamaForCausalLM"], **changes})


def mistral(**changes):
    return MistralConfig(**{**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": None, **changes})


def qwen2(**changes):
    return Qwen2Config(**{**BASE, "architectures": ["Qwen2ForCausalLM"], **changes})


def qwen3(**changes):
    return Qwen3Config(**{**BASE, "architectures": ["Qwen3ForCausalLM"], "head_dim": 20, **changes})


def rope(kind, **keys):
    return {"rope_type": kind, "rope_theta": 500.0, **keys}


CASES = {
    "llama": llama(),
    "llama, tied": llama(tie_word_embeddings=True),
    "llama, one key head": llama(num_key_value_heads=1),
    "llama, as many key heads": llama(num_key_value_heads=6),
    "llama, head size of its own": llama(head_dim=24),
    "llama, biases": llama(attention_bias=True, mlp_bias=True),
    "llama, gelu": llama(hidden_act="gelu", rms_norm_eps=1e-3),
    "llama, tanh gelu": llama(hidden_act="gelu_pytorch_tanh"),
    "smollm's shape": llama(num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "llama3 rope": llama(
        rope_parameters=rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        )
    ),
    "linear rope": llama(rope_parameters=rope("linear", factor=2.5)),
    "dynamic rope": llama(rope_parameters=rope("dynamic", factor=4.0)),
    "yarn rope": llama(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "yarn rope, all keys": llama(
        rope_parameters=rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=16,
            beta_slow=2,
            mscale=1.2,
            mscale_all_dim=0.7,
            truncate=False,
        )
    ),
    "mistral": mistral(),
    "mistral, window": mistral(sliding_window=9),
    "mistral, window of one block": mistral(sliding_window=16, head_dim=16),
    "qwen2": qwen2(),
    "qwen2, tied, window in upper layers": qwen2(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=11, max_window_layers=1
    ),
    "qwen3": qwen3(),
    "qwen3, biases, tied": qwen3(attention_bias=True, tie_word_embeddings=True),
    "qwen3, mixed window": qwen3(
        sliding_window=5,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def models(request):
    return pair(CASES[request.param])


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    gen = np.random.default_rng(seed)
    return [gen.integers(0, BASE["vocab_size"], size=int(n)).tolist() for n in gen.integers(1, length, size=count)]


def close(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    gap = (got - want).abs().max().item()
    assert gap <= TOLERANCE, f"logits differ by {gap}"
    assert want.std() > 0.3, "the random model says nothing"


def test_whole_prompts_in_one_step(models):
    theirs, ours, _ = models
    lines = [*prompts(3, 50), [7], list(range(100))]
    run = PagedRun(ours, len(lines), 128)
    for row, logits in run.step(dict(enumerate(lines))).items():
        close(logits, hf_logits(theirs, lines[row]))


def test_chunks_mixed_with_decode_rows(models):
    """Chunked prefill beside single tokens, rows in changing order: every position's logits are those of one run."""
    theirs, ours, _ = models
    lines = [list(line) for line in (range(3, 70), range(50, 73), range(100, 137))]
    want = [hf_logits(theirs, line) for line in lines]
    cuts = {0: [1, 15, 17, 1, 1, 32], 1: [16, 1, 1, 1, 4], 2: [30, 1, 1, 5]}
    run = PagedRun(ours, 3, 80, seed=1)
    at = dict.fromkeys(cuts, 0)
    for turn in range(6):
        chunks = {}
        for row in sorted(cuts, reverse=bool(turn % 2)):
            if turn < len(cuts[row]):
                chunks[row] = lines[row][at[row] : at[row] + cuts[row][turn]]
        for row, logits in run.step(chunks).items():
            close(logits, want[row][at[row] : at[row] + len(chunks[row])])
            at[row] += len(chunks[row])
    assert at == {row: len(line) for row, line in enumerate(lines)}


def test_greedy_continuations_are_the_same(models):
    theirs, ours, _ = models
    lines = prompts(4, 30, seed=3)
    run = PagedRun(ours, 4, 64)
    out = run.step(dict(enumerate(lines)))
    new = {row: [int(logits[-1].argmax())] for row, logits in out.items()}
    for _ in range(11):
        out = run.step({row: tokens[-1:] for row, tokens in new.items()})
        for row, logits in out.items():
            new[row].append(int(logits[-1].argmax()))
    for row, line in enumerate(lines):
        with torch.inference_mode():
            want = theirs.generate(
                torch.tensor([line]),
                attention_mask=torch.ones(1, len(line), dtype=torch.long),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert new[row] == want[0, len(line) :].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3, mixed window"])
def test_short_types_are_as_exact_as_transformers(case, dtype):
    """Roundings differ by the order of sums, so both are measured against float32: ours may not be 1.5 times worse."""
    exact, _, _ = pair(CASES[case])
    theirs, ours, _ = pair(CASES[case], dtype=dtype)
    lines = [list(range(n, n + 40)) for n in (0, 60, 140)]
    run = PagedRun(ours, len(lines), 64)
    run.step({row: line[:-1] for row, line in enumerate(lines)})
    got = torch.cat(list(run.step({row: line[-1:] for row, line in enumerate(lines)}).values()))
    assert got.dtype == torch.float32, "logits are not rounded to the short type"
    want = torch.stack([hf_logits(exact, line)[-1] for line in lines])
    their_error = torch.stack([hf_logits(theirs, line)[-1] for line in lines]).float() - want
    assert (got.float() - want).square().mean() <= 1.5**2 * their_error.square().mean()


def test_dynamic_rope_beyond_the_models_length_uses_one_base():
    """Transformers' base for the longest length, from the first token on."""
    config = llama(rope_parameters=rope("dynamic", factor=4.0), max_position_embeddings=48)
    theirs, ours, _ = pair(config, max_model_len=100)
    line = list(range(100))  # as long as this engine serves: the same base there
    (logits,) = PagedRun(ours, 1, 112).step({0: line}).values()
    close(logits, hf_logits(theirs, line))
