"""Messages survive the trip, arrays keep dtype and shape, and strange versions are refused."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.codec import INLINE_BYTES, MessageDecoder, MessageEncoder, encode_outputs, part_classes
from octavo.base.errors import ServerError
from octavo.base.outputs import EngineOutputs, OutputPart, RequestDelta, StatsSnapshot
from octavo.base.params import SamplingParams
from octavo.base.requests import Abort, Admin, EngineRequest, RequestPart, Submit
from octavo.base.step import LogprobArrays, NewRow, PlanPart, StepPlan, as_ints, empty_batch
from octavo.base.types import FinishReason


class ToyRequestPart(RequestPart, frozen=True):
    """A feature's share of a request."""

    grammar: str


class ToyOutputPart(OutputPart, frozen=True):
    """A feature's share of an output."""

    hint: dict[str, int]


class ToyPlanPart(PlanPart, frozen=True):
    """A feature's share of a plan."""

    rows: tuple[int, ...]


def trip(message, kind):
    """Encode and decode, as over a socket (frames become plain bytes)."""
    return MessageDecoder(kind).decode([bytes(f) for f in MessageEncoder().encode(message)])


def test_requests_aborts_and_admin_calls_survive_the_trip():
    request = EngineRequest(
        request_id="r-1",
        prompt_token_ids=(1, 2, 70000),
        sampling=SamplingParams(stop=["x"], seed=3, logit_bias={5: -1.0}),
        parts=(ToyRequestPart("json"),),
    )
    kind = Submit | Abort | Admin
    for message in (Submit((request,)), Abort(("a", "b")), Admin(3, "reset", {"x": 1})):
        assert trip(message, kind) == message


def test_every_loaded_part_is_known_by_its_tag():
    assert {"ToyRequestPart", "ToyOutputPart", "ToyPlanPart"} <= part_classes().keys()


@pytest.mark.parametrize("lines", [1, 3, INLINE_BYTES])
def test_outputs_with_arrays_survive_inline_and_out_of_band(lines):
    arrays = LogprobArrays(
        token_ids=np.arange(lines * 3, dtype=np.int32).reshape(lines, 3),
        logprobs=np.linspace(-9, 0, lines * 3, dtype=np.float32).reshape(lines, 3),
        ranks=np.ones(lines, dtype=np.int32),
        width=np.full(lines, 3, dtype=np.int32),
    )
    delta = RequestDelta(
        request_id="r", new_token_ids=(4,), finish=FinishReason.STOP, logprobs=arrays, parts=(ToyOutputPart({"a": 1}),)
    )
    frames = MessageEncoder().encode(EngineOutputs(deltas=(delta,), stats=StatsSnapshot(seq=4)))
    assert (len(frames) > 1) == (lines * 12 > INLINE_BYTES)
    back = MessageDecoder(EngineOutputs).decode([bytes(f) for f in frames])
    got = back.deltas[0]
    assert got.parts == delta.parts
    assert got.finish is FinishReason.STOP
    assert got.logprobs.token_ids.dtype == np.int32
    for name in ("token_ids", "logprobs", "ranks", "width"):
        np.testing.assert_array_equal(getattr(got.logprobs, name), getattr(arrays, name))
    assert not got.logprobs.ranks.flags.writeable


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_plans_survive_the_trip(tokens):
    row = NewRow(slot=1, request_id="x", tokens=tuple(tokens), num_prompt_tokens=len(tokens), sampling=SamplingParams())
    batch = msgspec.structs.replace(empty_batch(2), new=(row,), slots=as_ints(tokens))
    plan = StepPlan(seq=9, batch=batch, parts=(ToyPlanPart((1, 2)),), late=("MaskPlan",))
    back = trip(plan, StepPlan)
    assert back.batch.new == (row,)
    assert back.part(ToyPlanPart) == ToyPlanPart((1, 2))
    assert back.batch.slots.tolist() == tokens
    assert len(back.batch.new_blocks) == 2


def test_another_version_and_damage_are_refused_in_words():
    frames = [bytes(f) for f in MessageEncoder().encode(Abort(("a",)))]
    with pytest.raises(ServerError, match="version 9"):
        MessageDecoder(Abort).decode([b"\x09" + frames[0][1:]])
    with pytest.raises(ServerError, match="cannot be decoded"):
        MessageDecoder(Abort).decode([frames[0][:-2]])
    with pytest.raises(ServerError, match="no installed feature"):
        bad = msgspec.msgpack.encode(
            {"type": "EngineOutputs", "deltas": [{"request_id": "r", "parts": [{"type": "Odd"}]}]}
        )
        MessageDecoder(EngineOutputs).decode([b"\x01" + bad])


class Foreign(msgspec.Struct, frozen=True, tag="Foreign"):
    """A part of a feature that the reader has not installed; it cannot be known by its base class."""

    words: str


def damaged_trip(message, kind):
    """The trip, and what was lost on it."""
    lost = {}
    frames = [bytes(f) for f in MessageEncoder().encode(message)]
    return MessageDecoder(kind, on_damaged=lambda request_id, why: lost.update({request_id: why})).decode(frames), lost


def test_f31_an_answer_that_cannot_be_read_is_lost_alone():
    """F31: one strange part made the whole message unreadable."""
    arrays = LogprobArrays(
        token_ids=np.zeros((2, 3), np.int32), logprobs=np.zeros((2, 3), np.float32),
        ranks=np.zeros(2, np.int32), width=np.full(2, 3, np.int32),
    )  # fmt: skip
    fine = RequestDelta(request_id="fine", new_token_ids=(1, 2), logprobs=arrays, parts=(ToyOutputPart({"a": 1}),))
    deltas = (
        RequestDelta(request_id="odd", parts=(Foreign("x"),)),
        fine,
        RequestDelta(request_id="typo", finish="huh"),
    )
    outputs = EngineOutputs(deltas=deltas, stats=StatsSnapshot(seq=4))
    got, lost = damaged_trip(outputs, EngineOutputs)
    assert lost.keys() == {"odd", "typo"} and "Foreign" in lost["odd"]
    assert [d.request_id for d in got.deltas] == ["fine"] and got.stats == StatsSnapshot(seq=4)
    assert got.deltas[0].parts == fine.parts and got.deltas[0].logprobs.token_ids.shape == (2, 3)
    with pytest.raises(ServerError):
        trip(outputs, EngineOutputs)


def test_f31_a_request_that_cannot_be_read_is_lost_alone():
    """F31, the other way."""
    sampling = SamplingParams()
    requests = [EngineRequest(request_id=i, prompt_token_ids=(1,), sampling=sampling) for i in ("a", "b")]
    odd = EngineRequest(request_id="odd", prompt_token_ids=(1,), sampling=sampling, parts=(Foreign("x"),))
    got, lost = damaged_trip(Submit((requests[0], odd, requests[1])), Submit | Abort | Admin)
    assert got == Submit(tuple(requests)) and lost.keys() == {"odd"}


def test_f31_an_answer_that_cannot_be_sent_ends_with_an_error():
    """F31: what a feature puts in an answer may be anything."""
    odd = RequestDelta(request_id="odd", parts=(object(),))
    outputs = EngineOutputs(deltas=(odd, RequestDelta(request_id="fine", new_token_ids=(7,))))
    frames, lost = encode_outputs(MessageEncoder(), outputs)
    got = MessageDecoder(EngineOutputs).decode([bytes(f) for f in frames])
    assert lost == ("odd",)
    assert got.deltas[0].finish is FinishReason.ERROR and "cannot be sent" in got.deltas[0].error
    assert got.deltas[1].new_token_ids == (7,)
