"""The ten stages, with a scripted part in every seam (EXE-5, EXE-19; design: runner and DataPart)."""

import pytest
import torch
from torch import Tensor

from octavo.base.errors import EngineDead, OctavoError
from octavo.base.params import SamplingParams
from octavo.base.step import PlanPart, StepPlan, StepResult
from octavo.forward.context import is_entered
from octavo.sampling.sampler import NOT_FINITE
from octavo.worker.memory import scratch_layout
from octavo.worker.seams import EagerForward
from octavo.worker.worker import NothingLate, Worker, WorkerSeams
from tests.support.plans import HandPlanner
from tests.support.scripted_part import ForbidPlan, HeardReport, ScriptedPart
from tests.support.toy_model import ToyLoaded, toy_device, toy_limits


class Rig:
    """A worker on the toy model."""

    def __init__(self, *parts: ScriptedPart, answers: object = None, forward: object = None, **limits: object) -> None:
        seams = WorkerSeams(parts=parts, forward=forward or EagerForward())  # type: ignore[arg-type]
        self.worker = Worker(toy_limits(**limits), probe=toy_device, seams=seams)
        loaded = ToyLoaded(answers)  # type: ignore[arg-type]
        self.worker.load(loaded)
        layout = scratch_layout(loaded.specs, (40,) * 4)
        self.worker.allocate(layout)
        self.worker.warm_up()
        self.planner = HandPlanner(layout)

    def step(self, plan: StepPlan, late: object = None) -> StepResult:
        return self.worker.step(plan, late or NothingLate())  # type: ignore[arg-type]


class Late:
    """Late parts that are there already."""

    def __init__(self, *parts: PlanPart) -> None:
        self.parts = parts
        self.asked: list[tuple[str, ...]] = []

    def wait(self, names: tuple[str, ...]) -> tuple[PlanPart, ...]:
        self.asked.append(tuple(names))
        return self.parts


def test_hooks_are_called_in_their_order_and_report_in_the_result() -> None:
    part = ScriptedPart()
    rig = Rig(part)
    assert part.heard == ["bind"], "profile and warm-up are nobody's steps"
    part.heard.clear()
    rig.planner.enter(2, [5, 6, 7])
    result = rig.step(rig.planner.plan({2: 3}))
    layers = [(hook, i) for i in range(2) for hook in ("before_layer", "after_layer")]
    assert part.heard == [("enter", 2), ("prepare", 0, 1), *layers, ("after_forward", 3), ("mask", 0)]
    assert result.part(HeardReport) == HeardReport(8)
    assert result.tokens.row(0).tolist() == [8] and result.timings.forward_s > 0
    part.heard.clear()
    rig.planner.leave(2)
    empty = rig.step(rig.planner.plan({}))
    assert part.heard == [("leave", 2), ("prepare", 1, 0)], "a plan without rows still carries parts"
    assert empty.seq == 1 and len(empty.tokens) == 0 and empty.part(HeardReport) is not None
    rig.worker.stop()
    rig.worker.stop()
    assert part.heard.count("close") == 1


def test_parts_answer_calls_of_their_own() -> None:
    rig = Rig(ScriptedPart())
    assert rig.worker.call("scripted.heard", {}) == 1
    with pytest.raises(OctavoError, match=r"no call 'x'; it has handshake, memory, ping, scripted\.heard"):
        rig.worker.call("x", {})


def test_parts_offer_what_other_sides_need_to_know() -> None:
    """PDX-3: handshake metadata, by part, once memory is registered."""
    assert Rig(ScriptedPart()).worker.call("handshake", {}) == {"scripted": {"heard": 1}}


def test_only_steps_that_want_it_are_run_layer_by_layer() -> None:
    """PDX-3: the recording, which is one region without layers, is left only for steps that a part wants to see."""

    class Recording(EagerForward):
        runs = 0

        def run(self, *args: object) -> Tensor:
            self.runs += 1
            return super().run(*args)  # type: ignore[arg-type]

    part, recording = ScriptedPart(), Recording()
    rig = Rig(part, forward=recording)
    rig.planner.enter(0, [5])
    before, tokens = recording.runs, []
    for layered in (True, False, True):
        part.layered = layered
        part.heard.clear()
        tokens += rig.step(rig.planner.plan({0: 1})).tokens.row(0).tolist()
        assert (("before_layer", 1) in part.heard) is layered
    assert recording.runs == before + 1 and tokens == [6, 7, 8]


def test_warm_up_and_profile_do_not_reach_parts() -> None:
    part = ScriptedPart()
    rig = Rig(part)
    rig.worker.profile()
    assert part.heard == ["bind"]


def test_late_parts_are_waited_for_after_the_forward_and_mask_the_logits() -> None:
    part = ScriptedPart(watches_layers=False)
    rig = Rig(part)
    rig.planner.enter(0, [5])
    late = Late(ForbidPlan(tokens=(6,)))
    result = rig.step(rig.planner.plan({0: 1}, late=["ForbidPlan"]), late)
    assert late.asked == [("ForbidPlan",)]
    assert result.tokens.row(0).tolist() == [0], "6 was the answer; the lowest of the others is left"
    assert part.heard[-2:] == [("after_forward", 1), ("mask", 1)]
    assert rig.step(rig.planner.plan({0: 1})).tokens.row(0).tolist() == [1], "the next step knows what was sampled"


def test_a_row_with_bad_logits_fails_alone_and_the_others_go_on() -> None:
    def answers(tokens: Tensor) -> Tensor:
        return (tokens + 1) % 50

    rig = Rig(answers=answers)
    model = rig.worker._loaded.model  # type: ignore[union-attr]
    plain = model.logits
    model.logits = lambda hidden: torch.where(hidden[:, 13:14] == 1, torch.nan, plain(hidden))
    params = SamplingParams(temperature=0.0, logprobs=0)
    for slot, token in ((0, 3), (1, 12), (2, 30)):
        rig.planner.enter(slot, [token], params)
    result = rig.step(rig.planner.plan({2: 1, 1: 1, 0: 1}))
    assert [(e.row, e.message) for e in result.errors] == [(1, NOT_FINITE)]
    assert [result.tokens.row(i).tolist() for i in range(3)] == [[31], [], [4]]
    assert result.logprobs is not None and result.logprobs.token_ids[:, 0].tolist() == [31, 4]
    result = rig.step(rig.planner.plan({0: 1, 1: 1, 2: 1}))
    assert [result.tokens.row(i).tolist() for i in (0, 2)] == [[5], [32]], "a step planned before the error was known"
    rig.planner.leave(1)
    result = rig.step(rig.planner.plan({0: 1, 2: 1}))
    assert [result.tokens.row(i).tolist() for i in range(2)] == [[6], [33]] and not result.errors


def test_a_row_that_a_part_refuses_fails_alone() -> None:
    part = ScriptedPart(watches_layers=False, fail_at="enter")
    rig = Rig(part)
    rig.planner.enter(0, [5])
    result = rig.step(rig.planner.plan({0: 1}))
    assert [e.row for e in result.errors] == [0] and "scripted failure" in result.errors[0].message
    assert result.tokens.row(0).tolist() == []


def test_what_is_raised_anywhere_else_leaves_no_context_behind() -> None:
    rig = Rig(ScriptedPart(fail_at="before_layer"))
    rig.planner.enter(0, [5])
    with pytest.raises(ValueError, match="before_layer"):
        rig.step(rig.planner.plan({0: 1}))
    assert not is_entered()


def test_a_step_that_nobody_completes_says_so() -> None:
    class Abandoned:
        def wait(self, names: object) -> tuple[PlanPart, ...]:
            raise EngineDead("gone")

    rig = Rig()
    rig.planner.enter(0, [5])
    with pytest.raises(EngineDead):
        rig.step(rig.planner.plan({0: 1}, late=["Mask"]), Abandoned())


def test_the_context_length_can_be_filled_to_the_last_token() -> None:
    rig = Rig(max_model_len=6)
    rig.planner.enter(0, [1, 2, 3, 4])
    got = [rig.step(rig.planner.plan({0: n})).tokens.row(0).tolist()[0] for n in (4, 1, 1)]
    assert got == [5, 6, 7]


def test_padded_vocabulary_is_cut_off_for_sampling() -> None:
    rig = Rig(sample_vocab_size=20)
    rig.planner.enter(0, [30])
    assert rig.step(rig.planner.plan({0: 1})).tokens.row(0).tolist() == [0], "31 does not exist for the tokenizer"


def test_prompt_scoring_without_sampling() -> None:
    rig = Rig()
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    rig.planner.enter(1, [4, 5, 9], params)
    result = rig.step(rig.planner.plan({1: 3}, unsampled=(1,)))
    (part,) = result.prompt_logprobs
    assert (part.slot, part.start) == (1, 1)
    assert part.token_ids.tolist() == [[5], [9]] and part.ranks.tolist() == [1, 2]
    assert result.tokens.row(0).tolist() == [] and result.logprobs is None


def test_stages_in_the_wrong_order_are_named() -> None:
    worker = Worker(toy_limits(), probe=toy_device)
    with pytest.raises(RuntimeError, match="call load first"):
        worker.profile()
    with pytest.raises(RuntimeError, match="call allocate first"):
        worker.warm_up()


def test_profile_grows_with_the_step_and_with_the_vocabulary_rows() -> None:
    def peak(**limits: object) -> int:
        worker = Worker(toy_limits(**limits), probe=toy_device)
        worker.load(ToyLoaded())
        memory = worker.profile()
        assert memory.available_bytes == max(0, toy_device().memory_available_bytes - memory.peak_bytes)
        return memory.peak_bytes

    assert peak(max_num_batched_tokens=150) > peak(max_num_batched_tokens=64)
    assert peak(max_model_len=1, max_num_seqs=1, max_num_batched_tokens=1) > 0
    assert peak(max_num_seqs=64) > peak(max_num_seqs=1)
