"""Who gets a request: a pure function of what is held and what is under way (PDX-12)."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.features.router.choice import Candidate, best

CANDIDATES = st.lists(st.builds(Candidate, st.integers(0, 5000), st.integers(0, 50)), min_size=1, max_size=8)


def place(*candidates, load_weight=256, turn=0):
    return best([Candidate(*c) for c in candidates], load_weight=load_weight, turn=turn)


def test_nobody_is_chosen_of_nobody():
    assert place() is None


def test_the_longest_held_prefix_wins_where_the_load_is_equal():
    assert place((0, 3), (640, 3), (128, 3)) == 1


def test_a_held_prefix_is_weighed_against_the_load():
    assert place((0, 0), (1024, 3)) == 1  # 1024 tokens outweigh three requests of 256
    assert place((0, 0), (1024, 4)) == 0  # and not four: equal cost, fewer requests
    assert place((0, 0), (1024, 5)) == 0
    assert place((0, 0), (1024, 5), load_weight=0) == 1


def test_without_knowledge_the_least_load_wins_and_equals_take_turns():
    assert place((0, 2), (0, 1), (0, 2)) == 1
    assert [place((0, 1), (0, 1), (0, 1), turn=t) for t in range(4)] == [0, 1, 2, 0]


def test_without_a_weight_equals_still_go_by_load():
    assert place((0, 2), (0, 1), load_weight=0) == 1


@given(CANDIDATES, st.integers(0, 1000), st.integers(0, 100))
def test_nobody_who_holds_more_and_has_less_to_do_is_passed_over(candidates, load_weight, turn):
    chosen = candidates[best(candidates, load_weight=load_weight, turn=turn)]
    for other in candidates:
        assert not (other.held_tokens > chosen.held_tokens and other.in_flight <= chosen.in_flight)
        if other.held_tokens == chosen.held_tokens:
            assert chosen.in_flight <= other.in_flight
