"""Options of KV memory and steps that change how, not what, is computed (REQ-3, REQ-12, REQ-14, SCH-3)."""

import json

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from octavo.engine.startup import build_core
from octavo.entrypoints.cli import main
from tests.support import checkpoints

PROMPTS = [[(7 * i + n) % 400 for i in range(length)] for n, length in enumerate((150, 33, 16, 90, 1, 64))]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def answers(**options: object) -> list[list[int]]:
    """Token ids of all answers."""
    settings = {"num_kv_blocks": 64, "block_size": 16, "dtype": "float32", "check_invariants": True, **options}
    with LLM(str(checkpoints.tiny_swa(mixed=True)), num_threads=1, max_model_len=256, **settings) as llm:
        inputs = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outs = llm.generate(inputs, GREEDY, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return answers(check_invariants=False)


@pytest.mark.parametrize(
    "options",
    [
        {"hybrid_kv_cache": False},
        {"kv_cache_layout": "layer"},
        {"kv_cache_layout": "layer", "hybrid_kv_cache": False},
        {"max_num_batched_tokens": 64, "max_num_scheduled_tokens": 24},
        {"num_kv_blocks": 32},  # some are preempted
        {"async_scheduling": True, "num_kv_blocks": 32},
    ],
    ids=str,
)
def test_the_answers_are_the_same(plain: list[list[int]], options: dict[str, object]) -> None:
    assert answers(**options) == plain


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_a_layout_changes_no_bit_of_smaller_types(kv_dtype: str) -> None:
    of = {
        order: answers(dtype="bfloat16", kv_cache_dtype=kv_dtype, kv_cache_layout=order) for order in ("block", "layer")
    }
    assert of["block"] == of["layer"]


def test_a_window_gives_blocks_back_only_where_it_may(capsys: pytest.CaptureFixture[str]) -> None:
    """REQ-12: the same memory holds fewer requests where windows keep all. REQ-18: by the command."""
    plans = {}
    for switch in ("--hybrid-kv-cache", "--no-hybrid-kv-cache"):
        options = ["--kv-cache-memory", "1MiB", "--block-size", "16", "--max-num-batched-tokens", "32", switch]
        assert main(["plan", str(checkpoints.tiny_swa(mixed=True)), "--lengths", "512", "--json", *options]) == 0
        plans[switch] = json.loads(capsys.readouterr().out)
    hybrid, full = plans.values()
    assert [g["kind"] for g in full["groups"]] == ["FullAttentionSpec"] and len(hybrid["groups"]) == 2
    assert hybrid["concurrency"]["512"] > 1.5 * full["concurrency"]["512"]


@pytest.mark.parametrize(("mixed", "groups"), [(True, 2), (False, 0)])
def test_a_start_says_how_kv_memory_is_shared(mixed: bool, groups: int) -> None:
    """REQ-13: by groups, and what is padding; nothing where there is one group and all of it is used."""
    model = checkpoints.tiny_swa(mixed=True) if mixed else checkpoints.tiny_llama()
    cache = CacheConfig(num_kv_blocks=32, block_size=16)
    config = EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32"), cache=cache, device=DeviceConfig(num_threads=1)
    )
    started = build_core(config, lambda line: None)
    started.core.stop()
    notes = [note for note in started.report.notes if note.startswith(("KV memory", "group ", "one request"))]
    assert sum(note.startswith("group ") for note in notes) == groups
    assert bool(notes) == mixed and (not mixed or ("padding" in notes[0] and "window 64" in "".join(notes)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"max_num_batched_tokens": 64, "max_num_scheduled_tokens": 65},
            r"--max-num-scheduled-tokens must be in 1\.\.64",
        ),
        ({"max_num_scheduled_tokens": 0}, r"--max-num-scheduled-tokens must be in 1\.\."),
        ({"kv_cache_layout": "token"}, "block"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(checkpoints.tiny_llama()), num_threads=1, num_kv_blocks=16, **options)
