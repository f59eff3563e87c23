"""From specs and bytes to a layout: nothing overlaps, little is wasted, too little memory is explained."""

import re
from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.base.kvspec import FullAttentionSpec, KVLayout, KVSpec, SlidingWindowSpec
from octavo.kvcache.groups import blocks_needed, fit_report, hash_block_size, longest_context, plan_layout


def full(heads: int = 2, dim: int = 8, block: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_dim=dim, dtype="bfloat16")


def window(tokens: int = 64, heads: int = 2, dim: int = 8, block: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, num_kv_heads=heads, head_dim=dim, dtype="bfloat16", window=tokens)


def plan(specs: list[KVSpec], num_blocks: int = 10, **options: object) -> KVLayout:
    settings = {
        "budget_bytes": None,
        "num_blocks": num_blocks,
        "max_model_len": 512,
        "max_batched_tokens": 64,
    } | options
    return plan_layout(specs, **settings)  # type: ignore[arg-type]


def test_layers_of_one_kind_are_one_group_with_nothing_lost() -> None:
    layout = plan([full()] * 5)
    page = full().page_bytes
    assert [g.layers for g in layout.groups] == [(0, 1, 2, 3, 4)]
    assert layout.block_bytes == 5 * page
    assert layout.total_bytes == 50 * page
    assert layout.padding_share == 0.0
    assert [(p.offset, p.block_stride) for p in layout.places] == [(i * 10 * page, page) for i in range(5)]


def test_REQ_14_block_outermost_keeps_a_blocks_pages_together() -> None:
    layout = plan([full()] * 3, order="block")
    page = full().page_bytes
    assert [(p.offset, p.block_stride) for p in layout.places] == [(i * page, 3 * page) for i in range(3)]


def test_REQ_13_full_and_window_layers_share_regions() -> None:
    specs: list[KVSpec] = [window(), window(), window(), full()] * 3
    layout = plan(specs)
    assert [len(g.layers) for g in layout.groups] == [3, 3, 3, 3]
    assert [g.index for g in layout.groups] == [0, 1, 2, 3]
    assert layout.padding_share == 0.0
    assert sorted(layer for g in layout.groups for layer in g.layers) == list(range(12))
    for group in layout.groups:
        assert [layout.places[layer].offset for layer in group.layers] == [i * 10 * full().page_bytes for i in range(3)]


def test_REQ_13_a_smaller_page_takes_more_tokens_and_padding_for_the_rest() -> None:
    layout = plan([full(heads=5), window(heads=2)])
    big, small = (g.spec for g in layout.groups)
    assert small.block_size == 32
    assert small.page_padding_bytes == big.page_bytes - 4 * window(heads=1).content_bytes
    assert small.page_bytes == big.page_bytes
    assert hash_block_size(layout) == 16
    assert 0 < layout.padding_share < 0.2


def test_REQ_12_window_layers_can_be_allocated_as_full() -> None:
    layout = plan([window(), full(), window()], window_as_full=True)
    assert [g.layers for g in layout.groups] == [(0, 1, 2)]
    assert type(layout.groups[0].spec) is FullAttentionSpec


SPECS = st.lists(
    st.one_of(
        st.builds(full, st.integers(1, 3), st.sampled_from([8, 24])),
        st.builds(window, st.sampled_from([5, 64, 400]), st.integers(1, 3), st.sampled_from([8, 24])),
    ),
    min_size=1,
    max_size=14,
)


@given(SPECS, st.integers(2, 9), st.sampled_from(["layer", "block"]))
def test_pages_of_one_group_never_overlap_and_stay_inside(specs: list[KVSpec], num_blocks: int, order: str) -> None:
    layout = plan(specs, num_blocks, order=order)
    assert [p.layer for p in layout.places] == list(range(len(specs)))
    for group in layout.groups:
        kinds = {replace(specs[i], page_padding_bytes=0) for i in group.layers}
        assert len(kinds) == 1
        assert kinds.pop().content_bytes * (group.spec.block_size // 16) == group.spec.content_bytes
        pages = []
        for layer in group.layers:
            place = layout.places[layer]
            assert place.group == group.index
            pages += [(b, place.offset + b * place.block_stride, group.spec.page_bytes) for b in range(num_blocks)]
        pages.sort(key=lambda p: p[1])
        for (_, start, size), (_, following, _) in pairwise(pages):
            assert start + size <= following
        assert pages[-1][1] + pages[-1][2] <= layout.total_bytes
    # Blocks with different ids never share a byte, whatever the groups they serve.
    owners: dict[int, int] = {}
    for place in layout.places:
        for block in range(num_blocks):
            assert owners.setdefault(place.offset + block * place.block_stride, block) == block


@given(SPECS)
def test_no_group_size_would_hold_less_memory_by_much(specs: list[KVSpec]) -> None:
    """The chosen size is within what the price of groups explains of the best possible."""
    layout = plan(specs)
    kinds: dict[KVSpec, int] = {}
    for spec in specs:
        kinds[spec] = kinds.get(spec, 0) + 1
    unified = {replace(specs[g.layers[0]], page_padding_bytes=0): g.spec for g in layout.groups}

    def cost(size: int) -> float:
        groups = sum(ceil(n / size) for n in kinds.values())
        return (
            size
            * sum(ceil(n / size) * unified[s].max_blocks(512, 64) for s, n in kinds.items())
            * (0.99 + 0.01 * groups)
        )

    chosen = layout.block_bytes // layout.groups[0].spec.page_bytes
    assert cost(chosen) == pytest.approx(min(cost(s) for s in range(1, max(kinds.values()) + 1)))


@given(SPECS, st.integers(2, 60), st.integers(1, 600))
def test_REQ_17_the_longest_context_is_the_largest_that_fits(specs: list[KVSpec], num_blocks: int, limit: int) -> None:
    layout = plan(specs, num_blocks)
    slow = max(n for n in range(limit + 1) if blocks_needed(layout, n, 64) <= num_blocks - 1)
    assert longest_context(layout, limit=limit, max_batched_tokens=64) == slow


def test_REQ_17_the_report_says_what_fits() -> None:
    layout = plan([full()] * 2, num_blocks=65)
    report = fit_report(layout, max_model_len=256, max_batched_tokens=64, limit=4096)
    assert report.longest_context == 1024
    assert report.blocks_per_request == 16
    assert report.concurrency == 4.0
    assert "64 blocks" in report.lines[0]
    assert "0.0% padding" in report.lines[0]
    assert "4.0 requests of 256 tokens" in report.lines[-1]


def test_REQ_17_too_little_memory_says_what_is_missing_and_what_would_fit() -> None:
    layout = plan([full()] * 2, num_blocks=9)
    with pytest.raises(ConfigError) as caught:
        fit_report(layout, max_model_len=256, max_batched_tokens=64)
    message = str(caught.value)
    assert "needs 32.00 KiB of KV memory but 16.00 KiB are there, 16.00 KiB too little" in message
    longest = int(re.findall(r"max_model_len to at most (\d+)", message)[0])
    assert longest == 128
    assert fit_report(layout, max_model_len=longest, max_batched_tokens=64).concurrency == 1.0
    with pytest.raises(ConfigError):
        fit_report(layout, max_model_len=longest + 1, max_batched_tokens=64)


def test_a_budget_becomes_whole_blocks() -> None:
    page = full().page_bytes
    layout = plan([full()] * 3, num_blocks=None, budget_bytes=3 * page * 7 + page)  # type: ignore[arg-type]
    assert layout.num_blocks == 7


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"budget_bytes": None, "num_blocks": None}, "set kv_cache_memory or num_kv_blocks"),
        ({"budget_bytes": 1500, "num_blocks": None}, "1.46 KiB of KV memory hold no block: at least 2.00 KiB"),
        ({"budget_bytes": -5, "num_blocks": None}, "0 bytes of KV memory hold no block"),
        ({"budget_bytes": None, "num_blocks": 1}, "num_kv_blocks is 1 but must be at least 2"),
    ],
)
def test_no_room_for_a_block_is_a_configuration_error(sizes: dict[str, int | None], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan([full()], **sizes)  # type: ignore[arg-type]
