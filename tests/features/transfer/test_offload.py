"""With tiers the text is the same, and less of it is computed (TIR-10 .. TIR-18, SCH-13)."""

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError
from tests.support import checkpoints

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BASE = {
    "dtype": "float32", "block_size": 16, "num_kv_blocks": 24, "max_model_len": 256, "max_num_batched_tokens": 64,
    "num_threads": 1,
}  # fmt: skip


def prompt(seed, length=200):
    return {"prompt_token_ids": [(seed * 97 + i * 31) % 400 + 10 for i in range(length)]}


# Each prompt alone takes more than half of the cache: when it comes back, its blocks are gone.
TURNS = [prompt(1), prompt(2), prompt(3, 150), prompt(1), prompt(2), prompt(3, 150), prompt(1, 120)]


def run(turns=TURNS, path=None, together=False, **options):
    """Token ids of each turn, and of where its prefix came from."""
    with LLM(model=str(path or checkpoints.tiny_llama()), **{**BASE, **options}) as llm:
        batches = [turns] if together else [[turn] for turn in turns]
        outs = [out for batch in batches for out in llm.generate(batch, GREEDY, use_tqdm=False)]
        stats = llm.stats().parts.get("transfer", {})
    return [out.outputs[0].token_ids for out in outs], [out.cached_by_source or {} for out in outs], stats


@pytest.fixture(scope="module")
def plain():
    return run()[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 24},
        {"enable_prefix_caching": True, "prefix_hash": "sha256", "kv_tier": ("host?size=4MiB&policy=arc",)},
        {"num_kv_blocks": 18},
    ],
    ids=["plain", "two steps in flight", "small chunks", "arc", "hardly any blocks"],
)
def test_a_prefix_that_was_evicted_comes_back_from_the_host(plain, options):
    texts, sources, stats = run(**{"kv_tier": ("host?size=4MiB",), **options})
    assert texts == plain
    assert [source.get("host", 0) for source in sources[:3]] == [0, 0, 0]
    assert all(source.get("host", 0) >= 112 for source in sources[3:6])
    assert stats["host.rows_used"] > 20 and stats["host.hits"] > 20


def test_many_at_once_preempted_and_queued_get_the_same_text(plain):
    texts, sources, _ = run(
        TURNS * 2, together=True, kv_tier=("host?size=4MiB",), num_kv_blocks=30, async_scheduling=True
    )
    assert texts == plain * 2
    assert any("host" in source for source in sources)


def test_a_small_host_tier_keeps_what_fits(plain):
    texts, _, stats = run(kv_tier=("host?size=40KiB",))
    assert texts == plain and 0 < stats["host.rows_used"] <= stats["host.rows"] < 24 and stats["host.evicted"] > 0


def test_sliding_windows():
    path = checkpoints.tiny_swa(mixed=True)
    want = run(path=path, num_kv_blocks=60)[0]
    texts, sources, _ = run(path=path, num_kv_blocks=60, kv_tier=("host?size=4MiB",))
    assert texts == want
    assert any("host" in source for source in sources)


def test_a_file_tier_outlives_the_engine(plain, tmp_path):
    tiers = ("host?size=4MiB", f"file://{tmp_path}?size=64MiB")
    first, _, stats = run(TURNS[:3], kv_tier=tiers)
    assert first == plain[:3] and stats[f"file://{tmp_path}.failed_writes"] == 0
    assert len(list(tmp_path.rglob("*.kv"))) >= 34  # also those of the last answer: the end waits for them
    texts, sources, stats = run(TURNS[:3], kv_tier=tiers)
    assert texts == plain[:3] and stats[f"file://{tmp_path}.hits"] > 20
    assert all(source.get("file", 0) >= 128 for source in sources)


def test_altered_files_are_computed_again(plain, tmp_path):
    tiers = ("host?size=4MiB", f"file://{tmp_path}")
    run(TURNS[:1], kv_tier=tiers)
    paths = sorted(tmp_path.rglob("*.kv"))
    for path in paths[:4]:
        data = bytearray(path.read_bytes())
        data[-9] ^= 4
        path.write_bytes(data)
    texts, _, stats = run(TURNS[:1], kv_tier=tiers)
    assert texts == plain[:1] and stats[f"file://{tmp_path}.failed_reads"] >= 1


def test_another_model_finds_nothing_of_ours(tmp_path):
    other = checkpoints.tiny_llama(seed=5)
    want = run(TURNS[:1], path=other)[0]
    run(TURNS[:1], kv_tier=(f"file://{tmp_path}",))
    texts, _, stats = run(TURNS[:1], path=other, kv_tier=(f"file://{tmp_path}",))
    assert texts == want and stats[f"file://{tmp_path}.hits"] == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kv_tier": ("tape:///x",)}, "there is no tier 'tape'"),
        ({"kv_tier": ("host?size=100",)}, "one block of KV takes .* bytes; give the tier more"),
        ({"kv_tier": ("host",), "enable_prefix_caching": False}, "--kv-tier keeps prefixes"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(options, error):
    with pytest.raises(ConfigError, match=error):
        LLM(model=str(checkpoints.tiny_llama()), **{**BASE, **options})
