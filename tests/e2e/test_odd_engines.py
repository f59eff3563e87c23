"""However small the pool, the batch, the blocks or the steps are, every text is the one of a roomy engine (SCH-30, SCH-31).

Requests of every kind at once: greedy and drawn, several answers, penalties, stop strings, scores of the prompt.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.base.outputs import RequestOutput
from octavo.base.params import SamplingParams
from octavo.entrypoints.llm import LLM
from tests.support import checkpoints

MAX_LEN = 90
ROOMY = {"num_kv_blocks": 512, "block_size": 16, "max_num_seqs": 64, "enable_prefix_caching": False}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "seed": 2, "n": 3, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 3},
    {"temperature": 0, "prompt_logprobs": 2, "logprobs": 0},
    {"temperature": 1, "seed": 5, "top_k": 20, "min_p": 0.01, "ignore_eos": True},
    {"temperature": 0.7, "seed": 5, "stop": ["e", "a"], "include_stop_str_in_output": True},
)


def requests() -> tuple[list[Any], list[SamplingParams]]:
    """Fourteen prompts, some of which share their beginnings."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 512) for _ in range(40)]
    prompts, params = [], []
    for i in range(14):
        length = rng.choice((1, 2, 5, 16, 17, 31, 40))
        ids = shared[:length] if i % 2 else [rng.randrange(3, 512) for _ in range(length)]
        prompts.append({"prompt_token_ids": ids})
        params.append(SamplingParams(**KINDS[i % 7], max_tokens=rng.choice((1, 7, 20, 40))))
    return prompts, params


def said(outputs: list[RequestOutput]) -> list[Any]:
    """All that an engine's shape must not change."""
    found = []
    for out in outputs:
        scored = [None if line is None else next(iter(line)) for line in out.prompt_logprobs or []]
        answers = [(a.token_ids, a.text, a.finish_reason, a.stop_reason, len(a.logprobs or [])) for a in out.outputs]
        found.append((scored, answers))
    return found


def run(model: Path, times: int = 1, **options: Any) -> list[Any]:
    """What an engine of this shape says; afterwards nothing of it is left."""
    prompts, params = requests()
    with LLM(
        str(model), dtype="float32", num_threads=1, multiprocessing=False, max_model_len=MAX_LEN, **options
    ) as llm:
        told = [said(llm.generate(prompts, params, use_tqdm=False)) for _ in range(times)]
        assert all(each == told[0] for each in told), "the second time, from the prefix cache"
        end = time.monotonic() + 5
        while (stats := llm.stats()).num_blocks_used and time.monotonic() < end:
            time.sleep(0.01)  # a step that was planned ahead comes back
        assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    return told[0]


@pytest.fixture(scope="module", params=["full", "mixed", pytest.param("window", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> tuple[Path, list[Any]]:
    """A model, and what a roomy engine says with it."""
    make = {"full": checkpoints.tiny_llama, "window": checkpoints.tiny_swa, "mixed": checkpoints.tiny_swa}[
        request.param
    ]
    path = make(**{"full": {}, "window": {"window": 5}, "mixed": {"window": 16, "mixed": True}}[request.param])
    return path, run(path, **ROOMY)


SHAPES: tuple[dict[str, Any], ...] = (
    {"block_size": 1, "num_kv_blocks": 190},
    {"block_size": 7, "num_kv_blocks": 32, "max_num_seqs": 5},
    {"block_size": 16, "num_kv_blocks": 14, "max_num_batched_tokens": 7, "max_num_seqs": 5},
    {"block_size": 7, "num_kv_blocks": 40, "max_num_batched_tokens": 1},
    {"block_size": 90, "num_kv_blocks": 8, "max_num_seqs": 1},
    {"block_size": 7, "num_kv_blocks": 34, "scheduling_policy": "priority", "priority_aging_s": 0.01},
    {"block_size": 7, "num_kv_blocks": 34, "long_prefill_token_threshold": 3, "max_num_active_seqs": 2},
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: " ".join(f"{k}={v}" for k, v in s.items()))
@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
def test_an_engine_of_any_shape_says_the_same(
    model: tuple[Path, list[Any]], shape: dict[str, Any], ahead: bool
) -> None:
    path, expected = model
    assert run(path, 2, async_scheduling=ahead, **shape) == expected


def test_a_context_of_two_tokens_has_room_for_one_answer() -> None:
    options = {"num_threads": 1, "multiprocessing": False, "num_kv_blocks": 4, "block_size": 1, "max_model_len": 2}
    with LLM(str(checkpoints.tiny_llama()), **options) as llm:
        (out,) = llm.generate({"prompt_token_ids": [7]}, SamplingParams(max_tokens=None, ignore_eos=True))
        assert (len(out.outputs[0].token_ids), out.outputs[0].finish_reason) == (1, "length")
