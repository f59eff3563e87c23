"""A whole engine beside a tier that hangs, and one that is reset or ended while tiers are at work."""

import logging
import time
from types import SimpleNamespace

import pytest

from octavo import SamplingParams
from octavo.base.outputs import EngineOutputs
from octavo.base.requests import EngineRequest
from octavo.base.types import FinishReason
from octavo.features.transfer.control.tiers import TierStack
from octavo.features.transfer.data import agent, tier_threads
from octavo.plugins.registry import load_target
from octavo.scheduler.seams import NullControlPart, close_all
from tests.features.transfer.test_offload import Engine, prompt
from tests.support.hung_tier import HungTier

HUNG = "redis://127.0.0.1:1/0"


@pytest.fixture
def hung(monkeypatch):
    """Makes a tier that stands for Redis and hangs in these calls."""
    made = []

    def make(*calls):
        tier = HungTier(calls)
        made.append(tier)
        monkeypatch.setattr(
            tier_threads,
            "load_target",
            lambda target: tier.make if "tier_redis:make" in target else load_target(target),
        )
        return tier

    monkeypatch.setattr(agent, "measure", lambda *_: {})
    monkeypatch.setattr(agent, "CLOSE_S", 0.3)
    yield make
    for tier in made:
        tier.let_go.set()


def until(condition, limit_s=60):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_tier_that_never_answers_does_not_keep_a_prefix_from_coming_out_of_the_next(hung, tmp_path, monkeypatch):
    """F32: with a patience of minutes, the answer comes in seconds."""
    with Engine("host?size=4MiB", f"file://{tmp_path}") as engine:
        engine.ask(prompt(1))
    tier = hung("find")
    monkeypatch.setitem(TierStack.__init__.__kwdefaults__, "patience_s", 600.0)
    with Engine("host?size=4MiB", HUNG, f"file://{tmp_path}") as engine:
        assert engine.source(prompt(1))["file"] >= 176
        assert "find" in tier.asked
        tier.let_go.set()


def test_an_engine_whose_read_hangs_answers_and_then_does_nothing_at_all(hung, monkeypatch):
    """F33: plans are what the engine's other half is woken with."""
    plans = []
    real = agent.TransferAgent.prepare
    monkeypatch.setattr(
        agent.TransferAgent, "prepare", lambda part, plan, batch: (plans.append(plan.seq), real(part, plan, batch))[1]
    )
    tier = hung("read")
    with Engine("host?size=4MiB", f"{HUNG}?timeout=1") as engine:
        delta = engine.ask(prompt(1))
        assert delta.finish is FinishReason.LENGTH and "read" in tier.asked
        stack = engine.core._scheduler._parts[0].stack
        until(lambda: stack.stats()[f"{HUNG}.overdue"] and not stack.has_pending_work)
        count = len(plans)
        time.sleep(1.0)
        assert len(plans) <= count + 1
        again = engine.ask(prompt(1, 210))
        assert again.finish is FinishReason.LENGTH
        tier.let_go.set()


def test_a_reset_between_steps_leaves_who_runs_alone_and_nothing_to_be_found_but_in_tiers(tmp_path):
    """TIR-20."""

    def long_answer(engine, name, reset):
        engine.client.submit(
            (
                EngineRequest(
                    request_id=name,
                    prompt_token_ids=tuple(prompt(1)["prompt_token_ids"]),
                    sampling=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
                ),
            )
        )
        tokens = []
        while True:
            outputs = engine.inbox.get(timeout=60)
            assert isinstance(outputs, EngineOutputs), outputs
            for delta in outputs.deltas:
                if delta.request_id != name:
                    continue
                tokens += delta.new_token_ids
                if len(tokens) in (3, 17) and reset:
                    assert engine.client.call("reset_prefix_cache") is False  # a tier still has it, which is said
                if delta.finish is not None:
                    return tokens

    with Engine("host?size=4MiB") as engine:
        want = long_answer(engine, "plain", False)
    with Engine("host?size=4MiB", f"file://{tmp_path}") as engine:
        assert long_answer(engine, "reset", True) == want
        stack = engine.core._scheduler._parts[0].stack
        until(lambda: not stack.has_pending_work)
        engine.client.call("reset_prefix_cache")
        until(lambda: stack.stats()["host.rows_used"] == 0)  # what tiers were at came back
        sources = engine.source(prompt(1))
        assert set(sources) == {"file"} and sources["file"] >= 96
        stack.check()


def test_an_engine_that_ends_says_what_a_tier_was_not_given(hung, caplog, monkeypatch):
    """TIR-4, TIR-21: the manager's end, before the tiers'."""
    monkeypatch.setattr("octavo.engine.core.SETTLE_S", 0.2)
    monkeypatch.setattr("octavo.engine.core.EngineCore.settle.__defaults__", (0.2,))
    tier = hung("write")
    with caplog.at_level(logging.WARNING), Engine("host?size=4MiB", HUNG) as engine:
        engine.ask(prompt(1), tiers=["redis"])
        until(lambda: "write" in tier.asked)
    said = [record.getMessage() for record in caplog.records]
    assert any(f"blocks of KV were not yet in the tier {HUNG}" in line for line in said), said


def test_one_part_that_fails_at_the_end_does_not_keep_others_from_theirs(caplog):
    """TIR-21."""
    ended = []

    class Fails(NullControlPart):
        name = "fails"

        def close(self):
            raise OSError("no")

    parts = (Fails(), SimpleNamespace(name="good", close=lambda: ended.append("good")))
    close_all(parts)
    assert ended == ["good"] and "fails did not end well: no" in caplog.text
