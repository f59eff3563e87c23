"""A request's counters and lists change together, and readers cannot change them."""

import pytest

from octavo.base.errors import ContextLengthError
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.base.types import FinishReason, RequestState
from octavo.kvcache.hashing import HashChain, make_hasher
from octavo.scheduler.request import NEVER, Request


def make(
    prompt: tuple[int, ...] = (1, 2, 3, 4, 5), *, context: int = 100, name: str = "a", **params: object
) -> Request:
    source = EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 8, **params}),  # type: ignore[arg-type]
        eos_token_ids=(0,),
    )
    chain = HashChain(make_hasher("sha256"), 4, source)
    return Request(source, chain, block_size=4, max_model_len=context, now=2.0)


def test_views_show_the_lists_and_cannot_change_them() -> None:
    """REQ-2."""
    req = make()
    output = req.output_tokens
    req.append(9)
    assert list(req.prompt_tokens) == [1, 2, 3, 4, 5] and list(output) == [9]
    assert req.tokens[-1] == 9 and req.tokens[1:3] == [2, 3] and len(req.tokens) == 6
    with pytest.raises(TypeError):
        req.tokens[0] = 5  # type: ignore[index]
    assert not hasattr(req.tokens, "append")


@pytest.mark.parametrize("size", [3, 4, 5, 7, 8, 9])
def test_appending_a_token_extends_the_hashes_in_the_same_call(size: int) -> None:
    """REQ-2: at every length there is one hash for each full block, equal to those of a request that began so."""
    req = make((5,) * size, max_tokens=20)
    for _ in range(9):
        assert len(req.block_hashes) == req.num_tokens // 4
        assert list(req.block_hashes) == list(make(req.known_tokens()).block_hashes)
        req.append(5)
        req.check()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "context", "end"), [(5, 8, 100, 13), (5, 8, 10, 10), (5, None, 10, 10), (9, 1, 10, 10)]
)
def test_a_request_ends_by_length_at_max_tokens_or_the_context(
    prompt: int, max_tokens: int | None, context: int, end: int
) -> None:
    assert make((1,) * prompt, max_tokens=max_tokens, context=context).max_total_tokens == end


def test_a_prompt_that_leaves_no_room_is_refused_in_the_users_words() -> None:
    with pytest.raises(ContextLengthError, match="10 tokens and leaves no room in a context of 10"):
        make((1,) * 10, context=10)
    with pytest.raises(ContextLengthError, match="empty"):
        make(())
    assert make((1,) * 10, context=10, max_tokens=0, prompt_logprobs=0).max_total_tokens == 10


def test_illegal_transitions_raise() -> None:
    """REQ-4."""
    req = make()
    with pytest.raises(RuntimeError, match="NEW -> RUNNING"):
        req.move(RequestState.RUNNING)
    req.move(RequestState.WAITING)
    req.move(RequestState.RUNNING)
    req.move(RequestState.FINISHED)
    with pytest.raises(RuntimeError, match="FINISHED -> WAITING"):
        req.move(RequestState.WAITING)


def test_a_preempted_request_starts_over_and_its_tokens_in_flight_are_stale() -> None:
    """SCH-30, SCH-31, REQ-3."""
    req = make()
    req.move(RequestState.WAITING)
    req.run(3, 4, 4.0)
    req.reserved(6)
    req.schedule(5, sample=1, drafts=0, seq=4)
    req.leave_prompt()
    assert req.schedule_next(5) == 5 and req.num_placeholders == 2 and req.last_seq == 5
    assert req.num_reserved_tokens == 8
    req.preempt(5.0)
    assert (req.slot, req.num_computed_tokens, req.num_placeholders, req.num_reserved_tokens) == (None, 0, 0, 0)
    assert (req.num_preemptions, req.num_stale_output_tokens, req.valid_from) == (1, 2, NEVER)
    assert req.times.preempted_s == [5.0] and req.next_commit == 4
    req.check()


def test_the_hot_path_takes_one_token_in_a_block_it_has_or_nothing() -> None:
    """REQ-3, SCH-31: as `schedule` would, and `unschedule` takes it back; anything else is not its business."""
    req = make(max_tokens=2)
    req.reserved(8)
    req.schedule(5, sample=1, drafts=0, seq=1)
    assert req.schedule_next(2) is None, "it is in its prompt"
    req.leave_prompt()
    assert req.schedule_next(2) == 5
    req.unschedule(5, sample=1, drafts=0)
    assert (req.num_computed_tokens, req.num_placeholders, req.num_pending_tokens) == (5, 1, 1)
    assert req.schedule_next(2) == 5 and req.schedule_next(3) is None, "what is in flight ends it"
    req.accept(7)
    req.accept(8)
    assert (req.num_tokens, req.num_placeholders, len(req.block_hashes)) == (7, 0, 1)
    req.check()
    full = make((1, 2, 3, 4))
    full.reserved(4)
    full.schedule(4, sample=1, drafts=0, seq=1)
    full.leave_prompt()
    assert full.schedule_next(2) is None, "it needs a block"
    full.reserved(8)
    full.propose(3)
    assert full.schedule_next(2) is None and full.last_seq == 1, "drafts are to be verified"


def test_its_end_takes_its_slot_and_makes_what_is_in_flight_stale() -> None:
    req = make()
    req.move(RequestState.WAITING)
    req.run(3, 4, 4.0)
    req.end(FinishReason.STOP, 6.0)
    assert (req.slot, req.valid_from, req.finish_reason, req.times.finished_s) == (None, NEVER, FinishReason.STOP, 6.0)
    with pytest.raises(RuntimeError, match="FINISHED -> RUNNING"):
        req.run(3, 5, 7.0)


def test_eos_has_no_stop_reason_and_stop_ids_have_theirs() -> None:
    assert make(stop_token_ids=(3,)).stop_ids == {3: 3, 0: None}
    assert make(stop_token_ids=(3,), ignore_eos=True).stop_ids == {3: 3}
    assert make(stop_token_ids=(0,), ignore_eos=True).stop_ids == {0: 0}


def test_only_the_first_admission_counts_as_cached() -> None:
    """REQ-3: hits by source; own tokens found again after a preemption are none."""
    req = make()
    req.note_cached(0, "", 0)
    assert req.cached_by_source is None
    req.note_cached(3, "tier", 1)
    assert (req.num_cached_tokens, req.cached_by_source) == (4, {"device": 3, "tier": 1})
    req.move(RequestState.WAITING)
    req.run(0, 1, 3.0)
    req.preempt(4.0)
    req.note_cached(5, "", 0)
    assert req.num_cached_tokens == 4


def test_of_what_several_brought_each_is_named_for_its_share() -> None:
    """TIR-18: also when less came than was promised, or some of it was here."""
    for local, there, want in (
        (2, 8, {"device": 2, "host": 2, "file": 4}),
        (2, 6, {"device": 2, "host": 2, "file": 2}),
        (5, 8, {"device": 5, "file": 3}),
        (0, 3, {"host": 3}),
        (0, 10, {"host": 4, "file": 4, "tier": 2}),
    ):
        req = make()
        req.note_cached(local, "tier", there - local, ((4, "host"), (8, "file")))
        assert (req.num_cached_tokens, req.cached_by_source) == (there, want)


def test_scoring_the_prompt_needs_every_position_computed() -> None:
    assert not make(prompt_logprobs=2).reads_prefix_cache
    assert make(logprobs=2).reads_prefix_cache


@pytest.mark.parametrize(
    ("name", "value"), [("num_tokens", 6), ("num_placeholders", -1), ("num_computed_tokens", 6), ("slot", 1)]
)
def test_the_debug_check_finds_a_broken_counter(name: str, value: int) -> None:
    """REQ-3."""
    req = make()
    req.check()
    setattr(req, name, value)
    with pytest.raises(RuntimeError, match="breaks its invariant"):
        req.check()
