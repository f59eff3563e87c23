"""Workloads are the same every time, have the lengths and the sharing that were asked for, and arrive as they should (OPS-8)."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.bench import workloads
from octavo.bench.workloads import (
    Item,
    burst,
    evenly,
    from_jsonl,
    multi_turn,
    poisson,
    ramp,
    random_prompts,
    shared_prefix,
)

SIZES = {"input_len": 20, "output_len": 5, "ids": (100, 200)}


def plain_items(num):
    return [Item(prompt=(i,), max_tokens=1) for i in range(num)]


@pytest.mark.parametrize("text", [False, True])
def test_random_prompts_are_the_same_for_a_seed_and_distinct(text):
    items = random_prompts(50, **SIZES, seed=3, text=text)
    assert items == random_prompts(50, **SIZES, seed=3, text=text)
    assert items != random_prompts(50, **SIZES, seed=4, text=text)
    assert len({i.prompt for i in items}) == 50
    lengths = {len(i.prompt.split() if text else i.prompt) for i in items}
    assert lengths == {20}
    assert {i.max_tokens for i in items} == {5}
    if not text:
        assert all(100 <= t < 200 for i in items for t in i.prompt)


def test_lengths_spread_evenly_between_their_bounds():
    items = random_prompts(500, input_len=(10, 30), output_len=(1, 4), ids=(0, 9))
    lengths = [len(i.prompt) for i in items]
    assert (min(lengths), max(lengths)) == (10, 30)
    assert abs(sum(lengths) / 500 - 20) < 1
    assert {i.max_tokens for i in items} == {1, 2, 3, 4}


@pytest.mark.parametrize("text", [False, True])
def test_a_shared_prefix_is_shared_and_the_rest_is_not(text):
    items = shared_prefix(9, prefix_len=32, num_prefixes=2, text=text, **SIZES)
    prefixes = [i.prompt[: i.num_shared] for i in items]
    assert len(set(prefixes)) == 2
    assert prefixes[0] == prefixes[2] == prefixes[8] != prefixes[1]
    assert len({i.prompt[i.num_shared :] for i in items}) == 9
    assert all(len(i.prompt.split() if text else i.prompt) == 52 for i in items)


def test_each_turn_repeats_the_conversation_before_it():
    items = multi_turn(3, turns=4, prefix_len=8, **SIZES)
    assert [i.conversation for i in items] == [0] * 4 + [1] * 4 + [2] * 4
    for first, second in pairwise(items):
        if first.conversation == second.conversation:
            assert second.prompt[: len(first.prompt)] == first.prompt
            assert len(second.prompt) == len(first.prompt) + 5 + 20
    assert len({i.prompt[:8] for i in items}) == 1


def test_a_turn_of_text_is_the_turn_alone():
    items = multi_turn(2, turns=3, prefix_len=8, text=True, **SIZES)
    assert [len(i.prompt.split()) for i in items] == [28, 20, 20] * 2


def test_poisson_arrivals_have_the_rate_and_the_spread_of_an_exponential():
    items = poisson(plain_items(20_000), 50.0, seed=1)
    gaps = [b.at_s - a.at_s for a, b in pairwise(items)]
    mean = sum(gaps) / len(gaps)
    assert items[0].at_s == 0
    assert min(gaps) >= 0
    assert mean == pytest.approx(1 / 50, rel=0.03)
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.05)


def test_bursts_come_together_at_the_rate():
    items = burst(plain_items(8001), 40.0, 8, seed=1)
    for start in range(0, 8001, 8):
        assert len({i.at_s for i in items[start : start + 8]}) == 1
    assert len({i.at_s for i in items}) == 1001
    assert items[-1].at_s == pytest.approx(8000 / 40, rel=0.1)


def test_even_arrivals_are_even():
    assert [i.at_s for i in evenly(plain_items(4), 2.0)] == [0, 0.5, 1.0, 1.5]


@given(
    low=st.floats(0.1, 100),
    high=st.floats(0.1, 100),
    num=st.integers(1, 1000),
    part=st.floats(0, 1.5),
)
def test_a_ramp_places_each_arrival_where_the_integral_of_the_rate_says(low, high, num, part):
    total_s = 2 * num / (low + high)
    at = workloads._when(num * part, low, high, total_s)
    inside = min(at, total_s)
    integral = low * inside + (high - low) * inside**2 / (2 * total_s) + high * max(at - total_s, 0)
    assert integral == pytest.approx(num * part, rel=1e-6, abs=1e-6)


def test_a_ramp_goes_from_its_first_rate_to_its_last():
    times = [i.at_s for i in ramp(plain_items(20_000), 10.0, 90.0, seed=5)]
    assert times == sorted(times)
    total_s = 2 * 20_000 / 100
    early = sum(t < total_s / 10 for t in times) / (total_s / 10)
    late = sum(total_s * 0.9 < t <= total_s for t in times) / (total_s / 10)
    assert early == pytest.approx(14, rel=0.1)
    assert late == pytest.approx(86, rel=0.1)


@pytest.mark.parametrize("rate", [0, -1, math.inf, math.nan])
def test_an_impossible_rate_is_refused(rate):
    with pytest.raises(ConfigError, match="rate"):
        poisson(plain_items(3), rate)


@pytest.mark.parametrize("ids", [(5, 5), (-1, 4), (9, 3)])
def test_an_empty_range_of_ids_is_refused(ids):
    with pytest.raises(ConfigError, match="LOW:HIGH"):
        random_prompts(1, input_len=1, output_len=1, ids=ids)


SHAREGPT = {
    "id": "a",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "x" * 40},
        {"from": "human", "value": "More"},
        {"from": "gpt", "value": "y" * 8},
    ],
}
OPENAI = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "z" * 12}]}


def written(tmp_path, rows, *, as_list=False):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(rows) if as_list else "\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("as_list", [False, True])
def test_a_file_gives_prompts_of_every_known_kind(tmp_path, as_list):
    rows = [{"prompt": "a", "max_tokens": 3}, {"prompt": [1, 2], "completion": "w" * 20}, SHAREGPT, OPENAI]
    items = from_jsonl(written(tmp_path, rows, as_list=as_list))
    assert [(i.prompt, i.max_tokens) for i in items] == [
        ("a", 3), ((1, 2), 5), ("Be brief.\n\nHello", 10), ("Hi", 3),
    ]  # fmt: skip
    assert all(i.conversation is None for i in items)


def test_all_turns_of_a_file_are_conversations(tmp_path):
    items = from_jsonl(written(tmp_path, [SHAREGPT, OPENAI]), turns=True, output_len=9)
    assert [(i.prompt, i.conversation, i.max_tokens) for i in items] == [
        ("Be brief.\n\nHello", 0, 9), ("More", 0, 9), ("Hi", 1, 9),
    ]  # fmt: skip


def test_a_part_of_a_file_can_be_taken(tmp_path):
    rows = [{"prompt": str(i), "max_tokens": 1} for i in range(5)]
    assert [i.prompt for i in from_jsonl(written(tmp_path, rows), num=2, skip=1)] == ["1", "2"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "a"}], "row 1: it says neither max_tokens nor an answer"),
        ([{"prompt": "a", "max_tokens": 1}, {"question": "b"}], "row 2: it has none of"),
        ([{"prompt": "", "max_tokens": 1}], "row 1: the prompt must be text"),
        ([{"prompt": [1, "a"], "max_tokens": 1}], "row 1: the prompt must be text"),
        ([{"prompt": "a", "max_tokens": 0}], "max_tokens must be"),
        ([{"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}], "without text"),
        ([{"conversations": []}], "has 0 prompts"),
        (["a"], "must hold JSON objects"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_place(tmp_path, rows, words):
    with pytest.raises(ConfigError, match=words):
        from_jsonl(written(tmp_path, rows))


def test_a_file_with_too_few_prompts_absent_or_broken_is_refused(tmp_path):
    path = written(tmp_path, [{"prompt": "a", "max_tokens": 1}])
    with pytest.raises(ConfigError, match="has 1 prompts, but 2 are needed"):
        from_jsonl(path, num=2)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        from_jsonl(tmp_path / "absent")
    path.write_text('{"prompt": "a", "max_tokens": 1}\n{oops\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        from_jsonl(path)
