"""The state machine of a request is a table, and reasons speak OpenAI's words (REQ-4)."""

import itertools

import pytest

from octavo.base.types import TRANSITIONS, FinishReason, RequestState, check_transition


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestState, RequestState)))
def test_only_transitions_in_the_table_are_legal(old, new):
    if new in TRANSITIONS[old]:
        check_transition(old, new)
    else:
        with pytest.raises(RuntimeError, match=f"{old.name} -> {new.name}"):
            check_transition(old, new)


def test_every_state_but_the_last_can_finish_and_nothing_leaves_it():
    assert all(RequestState.FINISHED in TRANSITIONS[s] for s in RequestState if s is not RequestState.FINISHED)
    assert not TRANSITIONS[RequestState.FINISHED]


def test_each_reason_maps_to_one_api_reason():
    assert {r: r.api_name for r in FinishReason} == {
        FinishReason.STOP: "stop",
        FinishReason.LENGTH: "length",
        FinishReason.ABORT: "abort",
        FinishReason.IGNORED: "length",
        FinishReason.ERROR: "error",
        FinishReason.REPETITION: "stop",
    }
