"""Figures are what their definitions say; failures are counted, shown, and kept out of the percentiles (OPS-8)."""

import json
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.bench.report import (
    Goal,
    as_json,
    as_table,
    meets,
    parse_goal,
    percentile,
    spread,
    summarize,
    tpot_s,
    ttft_s,
)
from octavo.bench.samples import ClientCost, LoadResult, Sample


def sample(start=1.0, times=(2.0, 2.5, 4.0), end=4.5, tokens=None, **more):
    return Sample(
        due_s=start, start_s=start, end_s=end, first_token_s=times[0] if times else None, token_times=array("d", times),
        prompt_tokens=10, output_tokens=len(times) if tokens is None else tokens, **more,
    )  # fmt: skip


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_those_of_numpy(values, share):
    assert percentile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-6)


def test_a_spread_has_its_values_and_none_is_all_zero():
    found = spread([3.0, 1.0, 2.0])
    assert (found.num, found.mean, found.p50, found.min, found.max) == (3, 2.0, 2.0, 1.0, 3.0)
    assert spread([]).num == 0
    assert spread([]).max == 0


def test_times_follow_their_definitions():
    one = sample(tokens=6)  # six tokens in three events
    assert ttft_s(one) == 1.0
    assert tpot_s(one) == pytest.approx((4.0 - 2.0) / 5)
    assert tpot_s(sample(times=(2.0,), tokens=1)) is None
    assert tpot_s(sample(times=(2.0,), tokens=4)) is None  # one event tells nothing of the time of one token
    assert ttft_s(sample(times=())) is None


def test_a_summary_counts_whole_answers_only():
    good = [sample(), sample(start=2.0, times=(4.0, 5.0), end=6.0, cached_tokens=4)]
    bad = [sample(error="HTTP 500: x", end=99.0), sample(error="HTTP 500: x"), sample(error="lost", times=())]
    result = LoadResult(name="w", samples=tuple(good + bad), wall_s=5.0, client=ClientCost(cpu_s=0.1, num_chunks=10))
    found = summarize(result, Goal(ttft_s=1.5))
    assert (found.num_ok, found.num_failed) == (2, 3)
    assert found.errors == {"HTTP 500: x": 2, "lost": 1}
    assert found.request_rate == 2 / 5
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (20, 5, 4)
    assert found.output_tok_s == 1.0
    assert found.e2e_s.max == 4.0
    assert found.ttft_s.num == 2
    assert found.itl_s.num == 2 + 1
    assert (found.num_good, found.goodput) == (1, 1 / 5)
    text = as_table(found)
    assert "2 of 5 requests answered" in text
    assert "FAILED: 3 requests" in text
    assert "2 x HTTP 500: x" in text
    assert "1 x lost" in text
    assert "ttft <= 1500 ms" in text


def test_a_run_without_an_answer_is_summed_up_too():
    found = summarize(LoadResult(name="w", samples=(sample(error="no", times=()),), wall_s=0.0), Goal(ttft_s=1))
    assert (found.num_ok, found.request_rate, found.goodput) == (0, 0.0, 0.0)
    assert "FAILED: 1 requests" in as_table(found)


def test_many_kinds_of_errors_are_shortened_and_said_to_be():
    samples = tuple(sample(error=f"error {i}") for i in range(9))
    found = summarize(LoadResult(name="w", samples=samples, wall_s=1.0))
    assert "and 4 other errors" in as_table(found)
    assert len(found.errors) == 9


@pytest.mark.parametrize(
    ("goal", "good"),
    [
        ({}, True),
        ({"ttft_s": 1.0}, True),
        ({"ttft_s": 0.9}, False),
        ({"tpot_s": 1.0}, True),
        ({"tpot_s": 0.9}, False),
        ({"itl_s": 1.5}, True),
        ({"itl_s": 1.4}, False),
        ({"e2e_s": 3.5}, True),
        ({"e2e_s": 3.4}, False),
        ({"ttft_s": 1.0, "e2e_s": 3.4}, False),
    ],
)
def test_a_goal_is_met_or_not(goal, good):
    assert meets(sample(), Goal(**goal)) is good
    assert not meets(sample(error="x"), Goal(**goal))


def test_without_a_first_token_no_target_for_it_is_met():
    assert not meets(sample(times=(), tokens=4), Goal(ttft_s=9))
    assert meets(sample(times=(), tokens=4), Goal(tpot_s=9))


def test_goals_are_read_in_milliseconds():
    assert parse_goal(["ttft:500", "tpot:50.5"]) == Goal(ttft_s=0.5, tpot_s=0.0505)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", "foo:1"])
def test_a_wrong_goal_is_refused(text):
    with pytest.raises(ConfigError, match="--goodput takes NAME:MILLISECONDS"):
        parse_goal([text])


def test_json_holds_the_figures_and_on_demand_every_request():
    result = LoadResult(name="w", samples=(sample(), sample(error="x", times=())), wall_s=2.0)
    found = json.loads(json.dumps(as_json(summarize(result, ceiling_chunks_s=5.0), result, bench="serve")))
    assert found["bench"] == "serve"
    assert found["summary"]["ttft_s"]["p50"] == 1.0
    assert found["summary"]["ceiling_chunks_s"] == 5.0
    assert found["requests"][0]["token_times"] == [2.0, 2.5, 4.0]
    assert found["requests"][1]["error"] == "x"
    assert "requests" not in as_json(summarize(result))


def test_counted_events_are_said_to_be():
    assert "gives no usage" in as_table(summarize(LoadResult(name="w", samples=(sample(counted=True),), wall_s=1.0)))
