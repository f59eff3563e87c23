"""What the manager promises, case by case; `test_manager_properties` covers the combinations."""

import pytest

from octavo.kvcache.manager import KVCacheManager, PrefixHit
from tests.kvcache.driver import Req, full, manager, snapshot, window


def run(kv: KVCacheManager, req: Req, tokens: int | None = None) -> PrefixHit:
    """Admit a request, compute its prompt (or `tokens` of it) and commit."""
    hit = kv.match(req)
    new = (req.num_tokens if tokens is None else tokens) - hit.num_tokens
    assert kv.reserve(req, new, hit=hit, admission=True) is not None
    req.num_computed_tokens = hit.num_tokens + new
    kv.commit(req, req.num_computed_tokens)
    kv.check()
    return hit


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16])
def test_KVC_01_a_repeated_prompt_hits_whole_blocks_but_never_its_last_token(length: int) -> None:
    kv = manager(40)
    prompt = list(range(100, 100 + length))
    assert run(kv, Req("cold", prompt.copy())).num_tokens == 0
    expected = (length - 1) // 4 * 4
    for name in ("second", "third"):
        assert run(kv, Req(name, prompt.copy())).num_tokens == expected
    assert kv.match(Req("extended", [*prompt, 1, 2, 3, 4, 5])).num_tokens == length // 4 * 4
    assert kv.match(Req("last differs", [*prompt[:-1], 7])).num_tokens == (length - 1) // 4 * 4


def test_a_hit_shares_the_blocks_themselves() -> None:
    kv = manager(10)
    run(kv, Req("a", list(range(9))))
    before = kv.num_free_blocks
    run(kv, Req("b", list(range(9))))
    assert kv.blocks("a")[0][:2] == kv.blocks("b")[0][:2]
    assert kv.num_free_blocks == before - 1
    kv.release("a")
    assert kv.match(Req("c", list(range(9)))).num_tokens == 8


def test_SCH_25_only_certain_tokens_become_findable() -> None:
    kv = manager(10)
    req = Req("a", list(range(9)))
    kv.reserve(req, 9)
    req.num_computed_tokens = 9
    assert kv.match(Req("b", list(range(9)))).num_tokens == 0
    assert kv.commit(req, 3) == (0, ())
    assert kv.commit(req, 7) == (0, (req.block_hashes[0],))
    assert kv.commit(req, 7) == (0, ())
    assert kv.match(Req("b", list(range(9)))).num_tokens == 4
    assert kv.commit(req, 9) == (1, (req.block_hashes[1],))
    assert kv.commit(req, 3) == (0, ())


def test_REU_5_what_was_never_committed_is_never_hit() -> None:
    kv = manager(10)
    kv.reserve(Req("aborted", list(range(9))), 9)
    kv.release("aborted")
    assert kv.match(Req("b", list(range(9)))).num_tokens == 0


def test_REU_5_salted_requests_hit_only_their_own() -> None:
    kv = manager(30)
    tokens = list(range(9))
    run(kv, Req("plain", tokens.copy()))
    run(kv, Req("mine", tokens.copy(), salt="me"))
    assert run(kv, Req("again", tokens.copy(), salt="me")).blocks[0] == kv.blocks("mine")[0][:2]
    assert kv.match(Req("other", tokens.copy(), salt="you")).num_tokens == 0
    assert kv.match(Req("plain again", tokens.copy())).blocks[0] == kv.blocks("plain")[0][:2]


def test_a_request_that_does_not_read_the_cache_still_writes_it() -> None:
    kv = manager(20)
    run(kv, Req("a", list(range(9))))
    assert run(kv, Req("b", list(range(9)), reads_prefix_cache=False)).num_tokens == 0
    kv.release("a")
    kv.release("b")
    assert kv.match(Req("c", list(range(9)))).num_tokens == 8
    assert kv.stats().prefix_queries == 9


def test_without_prefix_caching_nothing_is_kept() -> None:
    kv = manager(20, enable_prefix_caching=False)
    req = Req("a", list(range(9)))
    run(kv, req)
    assert kv.commit(req, 9) == (0, ())
    kv.release("a")
    assert kv.match(Req("b", list(range(9)))).num_tokens == 0
    assert kv.stats().num_cached_blocks == 0
    assert kv.reset_prefix_cache()


def test_SCH_22_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    kv = manager(6)
    run(kv, Req("a", list(range(17))))
    kv.release("a")
    kv.reserve(Req("b", [50] * 9), 9)  # the partial block, and two evicted ones
    assert kv.stats().evictions == 2
    assert kv.match(Req("c", list(range(17)))).num_tokens == 8


def test_SCH_22_groups_are_freed_tail_first_together() -> None:
    kv = manager(13, full(), window(64))
    run(kv, Req("a", list(range(24))))
    kv.release("a")
    kv.reserve(Req("b", [50] * 4), 4)  # one block for each group
    assert kv.match(Req("c", list(range(24)))).num_tokens == 20


def test_SCH_24_admission_asks_for_room_for_the_whole_sequence() -> None:
    kv = manager(6)
    assert kv.reserve(Req("a", [1] * 24), 4, admission=True) is None
    assert kv.reserve(Req("a", [1] * 24), 4) is not None
    kv.release("a")
    assert kv.reserve(Req("b", [1] * 20), 4, admission=True) is not None


def test_SCH_24_nobody_is_admitted_to_blocks_that_others_have_yet_to_take() -> None:
    kv = manager(11)
    first = Req("a", [1] * 24)
    kv.reserve(first, 4, admission=True)
    assert kv.num_free_blocks == 9
    assert kv.reserve(Req("b", [2] * 20), 4, admission=True, beside_others=True) is None
    assert kv.reserve(Req("c", [2] * 16), 4, admission=True, beside_others=True) is not None
    first.num_computed_tokens = 4
    assert kv.reserve(first, 20) is not None
    kv.check()
    kv.release("c")
    assert kv.reserve(Req("b", [2] * 16), 4, admission=True, beside_others=True) is not None


def test_SCH_24_the_whole_sequence_counts_what_the_request_holds_already() -> None:
    kv = manager(6)
    req = Req("parked", [1] * 20)
    kv.reserve(req, 0, external_tokens=12)
    req.num_computed_tokens = 12
    assert kv.reserve(req, 4, admission=True) is not None
    grown = Req("parked", [1] * 24)
    grown.num_computed_tokens = 16
    assert kv.reserve(grown, 4, admission=True) is None


def test_SCH_24_admission_counts_what_is_shared_with_a_running_request_once() -> None:
    kv = manager(7)
    run(kv, Req("a", list(range(17))))
    req = Req("b", [*range(16), 9, 9, 9])
    hit = kv.match(req)
    assert hit.num_tokens == 16
    assert kv.num_free_blocks == 1
    assert kv.reserve(req, 3, hit=hit, admission=True, beside_others=True) is not None
    kv.check()


def test_SCH_24_hits_that_are_free_use_up_free_blocks_too() -> None:
    kv = manager(6)
    run(kv, Req("a", list(range(17))))
    kv.release("a")
    req = Req("b", list(range(16)) + [9] * 5)
    assert kv.reserve(req, 5, hit=kv.match(req)) is None
    assert kv.reserve(req, 4, hit=kv.match(req)) is not None
    assert kv.num_free_blocks == 0


def test_SCH_24_the_watermark_is_kept_beside_others_only() -> None:
    kv = manager(11, watermark_blocks=3)
    kv.reserve(Req("a", [1] * 20), 20)
    assert kv.reserve(Req("b", [2] * 12), 12, admission=True, beside_others=True) is None
    assert kv.reserve(Req("c", [2] * 8), 8, admission=True, beside_others=True) is not None
    assert kv.reserve(Req("d", [2] * 12), 12) is not None


def test_lookahead_takes_room_but_not_past_the_models_length() -> None:
    kv = manager(40, max_model_len=10)
    req = Req("a", [1] * 8)
    res = kv.reserve(req, 8, lookahead_tokens=50)
    assert res is not None
    assert len(res.new_blocks[0]) == 3


def test_SCH_24_external_tokens_follow_the_local_hit() -> None:
    kv = manager(20, full(), window(6))
    run(kv, Req("a", list(range(9))))
    req = Req("b", list(range(30)))
    hit = kv.match(req)
    res = kv.reserve(req, 0, hit=hit, external_tokens=16)
    assert res is not None
    whole, behind = res.new_blocks
    assert whole[:2] == hit.blocks[0]
    assert len(whole) == 6
    assert behind[:4] == (0, 0, 0, 0), "blocks behind the window are not loaded at all"
    req.num_computed_tokens = 24
    assert kv.commit(req, 24)[1] == tuple(req.block_hashes[2:6])
    assert kv.match(Req("c", list(range(30)))).num_tokens == 24
    kv.check()


def test_a_window_gives_blocks_back_as_it_moves() -> None:
    kv = manager(5, window(6))
    req = Req("a", [1] * 8)
    run(kv, req)
    for _ in range(40):
        req.grow(1)
        assert kv.reserve(req, 1) is not None
        req.num_computed_tokens += 1
        kv.commit(req, req.num_computed_tokens)
        kv.check()
    assert sum(b != 0 for b in kv.blocks("a")[0]) <= 3


def test_a_block_goes_in_the_very_step_that_no_longer_sees_it() -> None:
    kv = manager(10, window(5))
    req = Req("a", [1] * 30)
    kv.reserve(req, 7)
    req.num_computed_tokens = 7
    kv.reserve(req, 1)
    assert kv.blocks("a")[0][0] != 0
    req.num_computed_tokens = 8
    kv.reserve(req, 1)
    assert kv.blocks("a")[0][0] == 0


def test_SCH_26_a_window_hit_needs_only_the_window() -> None:
    kv = manager(30, full(), window(6))
    run(kv, Req("a", list(range(21))))
    hit = kv.match(Req("b", list(range(21))))
    assert hit.num_tokens == 20
    assert [b != 0 for b in hit.blocks[1]] == [False, False, False, True, True]


def test_groups_of_different_block_sizes_hit_at_their_common_multiple() -> None:
    kv = manager(40, full(4), full(12))
    run(kv, Req("a", list(range(23))))
    assert kv.match(Req("b", list(range(23)))).num_tokens == 12


def test_a_plain_decode_step_changes_nothing_and_makes_nothing() -> None:
    kv = manager(20, full(), window(6))
    req = Req("a", [1] * 5)
    run(kv, req)
    before = snapshot(kv)
    first, second = kv.reserve(req, 1), kv.reserve(req, 2)
    assert first is second is not None
    assert first.new_blocks == ((), ())
    kv.cancel(first)
    kv.cancel(first)
    assert snapshot(kv) == before


def test_cancel_brings_evicted_content_and_hits_back() -> None:
    kv = manager(8)
    run(kv, Req("a", list(range(17))))
    run(kv, Req("b", [70] * 5))
    kv.release("a")
    kv.release("b")
    req = Req("c", list(range(8)) + [5] * 20)
    before = snapshot(kv)
    res = kv.reserve(req, 20, hit=kv.match(req))
    assert res is not None
    assert kv.stats().evictions
    kv.cancel(res)
    assert snapshot(kv) == before
    kv.check()


def test_a_reset_between_reserving_and_cancelling_brings_no_content_back() -> None:
    kv = manager(6)
    run(kv, Req("a", list(range(17))))
    kv.release("a")
    res = kv.reserve(Req("b", [5] * 17), 17)
    assert res is not None
    kv.reset_prefix_cache()
    kv.cancel(res)
    kv.check()
    assert kv.match(Req("c", list(range(17)))).num_tokens == 0
    assert kv.num_free_blocks == 5


def test_only_the_last_reservation_of_a_request_can_be_cancelled() -> None:
    kv = manager(20)
    req = Req("a", [1] * 12)
    first = kv.reserve(req, 4)
    second = kv.reserve(req, 8)
    assert first is not None and second is not None
    with pytest.raises(RuntimeError, match="before the request reserves or commits again"):
        kv.cancel(first)
    kv.cancel(second)
    req.num_computed_tokens = 4
    kv.commit(req, 4)
    with pytest.raises(RuntimeError, match="before the request reserves or commits again"):
        kv.cancel(first)
    kv.release("a")
    with pytest.raises(RuntimeError, match="was released"):
        kv.cancel(first)


def test_a_stale_hit_is_refused_and_a_hit_belongs_to_admission() -> None:
    kv = manager(6)
    run(kv, Req("a", list(range(17))))
    kv.release("a")
    late = Req("b", list(range(17)))
    hit = kv.match(late)
    other = Req("c", [9] * 17)
    kv.reserve(other, 17)
    with pytest.raises(RuntimeError, match="no longer stands"):
        kv.reserve(late, 1, hit=hit)
    with pytest.raises(RuntimeError, match="has blocks already"):
        kv.reserve(other, 1, hit=hit)


def test_SCH_32_fenced_blocks_wait_for_their_step() -> None:
    kv = manager(6)
    run(kv, Req("a", list(range(9))))
    kv.release("a", after=7)
    kv.check()
    assert kv.num_free_blocks == 2
    assert kv.blocks("a") == ((),)
    assert kv.match(Req("b", list(range(9)))).num_tokens == 8, "what is committed can be hit behind the fence"
    kv.retire(6)
    assert kv.num_free_blocks == 2
    kv.retire(8)
    assert kv.num_free_blocks == 5
    kv.check()
    run(kv, Req("c", [4] * 9))
    kv.release("c", after=8)
    assert kv.num_free_blocks == 5, "a step that is processed holds nothing back"


def test_SCH_32_the_first_step_is_a_fence_too() -> None:
    kv = manager(6)
    kv.reserve(Req("a", [1] * 9), 9)
    kv.release("a", after=0)
    assert kv.num_free_blocks == 2
    kv.retire(0)
    assert kv.num_free_blocks == 5


def test_REQ_5_an_id_that_comes_back_at_once_is_another_request() -> None:
    kv = manager(8)
    run(kv, Req("a", list(range(9))))
    kv.release("a", after=1)
    run(kv, Req("a", [3] * 9))
    kv.retire(1)
    kv.check()
    assert len(kv.blocks("a")[0]) == 3
    kv.release("a")
    kv.release("a")
    assert kv.num_free_blocks == 7


def test_SCH_28_reset_forgets_also_what_running_requests_hold_and_will_compute() -> None:
    kv = manager(20, record_events=True)
    old = Req("a", list(range(13)))
    run(kv, old, tokens=8)
    assert kv.reset_prefix_cache()
    kv.reserve(old, 5)
    old.num_computed_tokens = 13
    assert kv.commit(old, 13) == (0, ())
    assert [e.kind for e in kv.take_events()] == ["cleared"]
    run(kv, Req("fresh", list(range(9))))
    assert kv.match(Req("b", list(range(13)))).num_tokens == 8, "the third block was computed on old content"
    kv.release("a")
    kv.check()


def test_stats_count_admitted_lookups_once() -> None:
    kv = manager(20)
    run(kv, Req("a", list(range(9))))
    req = Req("b", list(range(9)))
    kv.match(req)
    res = kv.reserve(req, 1, hit=kv.match(req))
    assert res is not None
    kv.cancel(res)
    kv.reserve(req, 1, hit=kv.match(req))
    stats = kv.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (18, 8)
    assert stats.num_total_blocks == 19
    assert stats.usage == pytest.approx(4 / 19)
    assert stats.num_cached_blocks == 2
    assert stats.num_requests == 2


def test_a_block_size_that_cannot_join_the_hash_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of the 4"):
        manager(10, full(6))


def test_check_finds_a_leak() -> None:
    kv = manager(10)
    run(kv, Req("a", list(range(9))))
    kv._tables.clear()
    with pytest.raises(RuntimeError, match="holders on record"):
        kv.check()


def test_duplicates_are_kept_and_each_can_serve() -> None:
    kv = manager(20)
    twins = [Req("a", list(range(9))), Req("b", list(range(9)))]
    for req in twins:
        kv.reserve(req, 9)
        req.num_computed_tokens = 9
    for req in twins:
        kv.commit(req, 9)
    assert kv.stats().num_cached_blocks == 4
    kv.release("a")
    kv.reserve(Req("c", [8] * 64), 64)
    assert kv.match(Req("d", list(range(9)))).blocks[0] == kv.blocks("b")[0][:2]
    kv.check()
