"""Each policy against an oracle that keeps everything and then filters (K10)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.kvspec import FullAttentionSpec, KVSpec, SlidingWindowSpec
from octavo.kvcache.hashing import BlockHash
from octavo.kvcache.policies import (
    NEVER,
    BlockPolicy,
    FullAttention,
    PolicyRegistry,
    SlidingWindow,
    block_policies,
    longest_common_hit,
)
from tests.kvcache.driver import full, window

SPECS = st.one_of(
    st.builds(full, st.sampled_from([1, 2, 4])),
    st.builds(window, st.integers(1, 17), st.sampled_from([1, 2, 4])),
)


def seen_positions(spec: KVSpec, num_computed: int) -> range:
    """What the query at position `num_computed` sees, itself left out: the definition of the window."""
    first = max(0, num_computed - spec.window + 1) if isinstance(spec, SlidingWindowSpec) else 0
    return range(first, num_computed)


def needed_blocks(spec: KVSpec, num_computed: int) -> set[int]:
    return {p // spec.block_size for p in seen_positions(spec, num_computed)}


def hashes(count: int) -> list[BlockHash]:
    return [BlockHash(i.to_bytes(4, "big")) for i in range(count)]


@given(SPECS, st.integers(0, 80))
def test_a_block_expires_when_no_later_query_sees_it(spec: KVSpec, computed: int) -> None:
    policy = block_policies().policy(spec)
    later = set().union(
        *(needed_blocks(spec, n) for n in range(computed, 110)), range(computed // spec.block_size, 110)
    )
    assert set(policy.expired(computed)) == set(range(110)) - later


@given(SPECS, st.integers(0, 80))
def test_the_next_expiry_is_told_exactly(spec: KVSpec, computed: int) -> None:
    policy = block_policies().policy(spec)
    stop = policy.expired(computed).stop
    at = policy.expires_at(stop)
    assert at > computed
    if at != NEVER:
        assert policy.expired(at - 1).stop == stop
        assert policy.expired(at).stop > stop


@given(SPECS, st.integers(1, 80), st.integers(1, 20))
def test_no_request_ever_holds_more_than_most_blocks(spec: KVSpec, num_tokens: int, max_batched: int) -> None:
    policy = block_policies().policy(spec)
    most = policy.most_blocks(num_tokens, max_batched)
    for computed in range(num_tokens):
        total = min(num_tokens, computed + max_batched)
        assert policy.blocks_for(total) - policy.expired(computed).stop <= most


@given(SPECS, st.lists(st.booleans(), max_size=24))
def test_longest_hit_is_the_oracles(spec: KVSpec, cached: list[bool]) -> None:
    policy = block_policies().policy(spec)
    chain = hashes(len(cached))
    blocks = {h: i + 1 for i, h in enumerate(chain) if cached[i]}
    found = policy.longest_hit(chain, blocks.get)
    lengths = [n for n in range(len(cached) + 1) if all(cached[i] for i in needed_blocks(spec, n * spec.block_size))]
    assert len(found) == max(lengths)
    needed = needed_blocks(spec, len(found) * spec.block_size)
    assert found == tuple(i + 1 if i in needed else 0 for i in range(len(found)))


@given(st.data(), st.integers(0, 100))
def test_SCH_26_the_common_hit_is_the_longest_that_all_groups_can_go_on_from(data: st.DataObject, limit: int) -> None:
    sizes = st.sampled_from([2, 4, 6])
    specs: list[KVSpec] = data.draw(
        st.lists(
            st.one_of(st.builds(full, sizes), st.builds(window, st.integers(1, 17), sizes)), min_size=1, max_size=3
        )
    )
    chain = hashes(data.draw(st.integers(0, 20)))
    cached = [data.draw(st.sets(st.sampled_from(chain))) if chain else set() for _ in specs]
    if data.draw(st.booleans()):  # mostly cached: long hits
        cached = [set(chain) - c for c in cached]
    strides = [s.block_size // 2 for s in specs]
    policies: list[BlockPolicy] = [block_policies().policy(s) for s in specs]

    def find(h: BlockHash, group: int) -> int | None:
        return 1 + int.from_bytes(h, "big") if h in cached[group] else None

    def possible(n: int) -> bool:
        return all(
            n % s.block_size == 0 and all(chain[(i + 1) * stride - 1] in have for i in needed_blocks(s, n))
            for s, stride, have in zip(specs, strides, cached, strict=True)
        )

    num_tokens, rows = longest_common_hit(policies, strides, chain, find, limit)
    assert num_tokens == max(n for n in range(min(limit, 2 * len(chain)) + 1) if possible(n))
    for spec, stride, row in zip(specs, strides, rows, strict=True):
        needed = needed_blocks(spec, num_tokens)
        assert row == tuple((i + 1) * stride if i in needed else 0 for i in range(num_tokens // spec.block_size))


class DerivedSpec(SlidingWindowSpec):
    """A plugin's spec."""


def test_REQ_16_a_derived_spec_inherits_its_parents_policy() -> None:
    spec = DerivedSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32", window=8)
    assert isinstance(block_policies().policy(spec), SlidingWindow)


def test_REQ_16_a_plugin_registers_its_own_and_the_nearest_ancestor_wins() -> None:
    class Mine(FullAttention):
        """A plugin's policy."""

    registry = block_policies()
    registry.register(DerivedSpec, Mine)
    spec = DerivedSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32", window=8)
    assert isinstance(registry.policy(spec), Mine)
    assert isinstance(registry.policy(window(8)), SlidingWindow)


def test_REQ_16_an_unregistered_spec_is_refused_at_start_up() -> None:
    odd = KVSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    with pytest.raises(
        ValueError, match=r"no block policy is registered for KVSpec.*FullAttentionSpec, SlidingWindowSpec"
    ):
        block_policies().check([full(), odd])
    with pytest.raises(ValueError, match="none"):
        PolicyRegistry().policy(full())


def test_an_impossible_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        block_policies().policy(window(0))
    with pytest.raises(ValueError, match="SlidingWindowSpec"):
        SlidingWindow(FullAttentionSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32"))
