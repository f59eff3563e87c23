"""From deltas to outputs: kinds, stops, log-probabilities, several answers (OUT-22, OUT-23, OUT-25, OUT-7)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.outputs import EngineOutputs, OutputPart, RequestDelta, RequestOutput, RequestTimes
from octavo.base.params import SamplingParams
from octavo.base.types import FinishReason, OutputKind
from octavo.inputs.tokenizer_fast import FastTokenizer, SpecialTokens
from octavo.outputs.assembler import OutputAssembler, RequestOpening, merge
from octavo.outputs.detokenizer import REPLACEMENT
from tests.support.decoders import NoFastPath, tokenizer
from tests.support.fixture_tokenizers import piece_tokenizer
from tests.support.toy_engine import toy_logprobs

SCRIPT = ("A", "B", "CD", "EF", "GH", "IJ", "K")
CORE = piece_tokenizer([s.encode() for s in SCRIPT if len(s) > 1], ["<s>", "</s>", "<X>"])
CHAIN = FastTokenizer(CORE, SpecialTokens(bos="<s>", eos="</s>"))
EOS, X = CORE.token_to_id("</s>"), CORE.token_to_id("<X>")
KINDS = (OutputKind.CUMULATIVE, OutputKind.DELTA, OutputKind.FINAL_ONLY)


def tok(*pieces: str) -> tuple[int, ...]:
    return tuple(CORE.token_to_id(p) for p in pieces)


def opening(
    params: SamplingParams, *, prompt: Sequence[int] = tok("A"), name: str = "r", **more: Any
) -> RequestOpening:
    ids = (name,) if params.n == 1 else tuple(f"{name}.{i}" for i in range(params.n))
    return RequestOpening(
        parent_id=name, request_ids=ids, params=params, prompt=None, prompt_token_ids=tuple(prompt), **more
    )


def delta(ids: Sequence[int] = (), name: str = "r", finish: FinishReason | None = None, **more: Any) -> RequestDelta:
    return RequestDelta(request_id=name, new_token_ids=tuple(ids), finish=finish, **more)


class Run:
    """One assembler with its outputs and aborts.

    Owns: what came back.
    """

    def __init__(self, *openings: RequestOpening, decoder: Any = CHAIN) -> None:
        self.assembler = OutputAssembler(decoder)
        self.outputs: list[RequestOutput] = []
        self.aborts: list[str] = []
        self.ended: list[Any] = []
        self.kind = openings[0].params.output_kind
        for one in openings:
            self.assembler.open(one)

    def push(self, *deltas: RequestDelta, now_s: float = 1.0) -> list[RequestOutput]:
        pushed = self.assembler.push(EngineOutputs(deltas=deltas), now_s)
        self.outputs += pushed.outputs
        self.aborts += pushed.aborts
        self.ended += pushed.ended
        return pushed.outputs

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    def text(self, index: int = 0) -> str:
        """The whole text that the outputs tell, whatever their kind."""
        texts = [o.text for out in self.outputs for o in out.outputs if o.index == index]
        return "".join(texts) if self.kind is OutputKind.DELTA else texts[-1]


def run(kind: OutputKind, deltas: Sequence[RequestDelta], decoder: Any = CHAIN, **params: Any) -> Run:
    out = Run(opening(SamplingParams(output_kind=kind, **params)), decoder=decoder)
    for one in deltas:
        out.push(one)
    return out


# ---- stops ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize(("include", "want"), [(False, "BC"), (True, "BCDEFG")])
def test_stop_string_over_several_tokens_stp_01(kind: OutputKind, chunk: int, include: bool, want: str) -> None:
    ids = tok("B", "CD", "EF", "GH", "IJ", "K")
    deltas = [delta(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    out = run(kind, deltas, stop=["DEFG"], include_stop_str_in_output=include, max_tokens=20)
    assert out.text() == want
    assert out.last.finished
    assert (out.last.outputs[0].finish_reason, out.last.outputs[0].stop_reason) == ("stop", "DEFG")
    assert out.last.num_output_tokens == 4  # B, CD, EF, GH: what was generated up to the stop, whatever the chunks
    assert out.aborts == ["r"]
    if not include:
        assert not any("D" in o.text for each in out.outputs for o in each.outputs)


def test_deltas_after_a_stop_string_are_dropped() -> None:
    out = run(OutputKind.DELTA, [delta(tok("B", "CD")), delta(tok("EF"))], stop=["CD"])
    assert out.text() == "B" and len(out.assembler) == 0
    assert out.push(delta(tok("GH")), delta(finish=FinishReason.ABORT)) == []
    assert [r.reason for r in out.ended] == [FinishReason.STOP]  # not the abort that follows from it
    assert out.aborts == ["r"]


def test_a_stop_string_in_the_last_delta_needs_no_abort() -> None:
    out = run(OutputKind.DELTA, [delta(tok("B", "CD"), finish=FinishReason.LENGTH)], stop=["D"])
    assert (out.text(), out.last.outputs[0].finish_reason, out.aborts) == ("BC", "stop", [])


def test_text_held_for_a_stop_string_comes_out_at_the_end() -> None:
    out = run(OutputKind.DELTA, [delta(tok("B", "CD")), delta(tok("EF"), finish=FinishReason.LENGTH)], stop=["DEFG"])
    assert [o.outputs[0].text for o in out.outputs] == ["BC", "DEF"]
    assert out.last.outputs[0].finish_reason == "length" and out.last.outputs[0].stop_reason is None


@pytest.mark.parametrize(("min_tokens", "want"), [(0, ""), (1, "B"), (2, "BCD"), (3, "BCDEF")])
def test_text_before_min_tokens_is_never_searched(min_tokens: int, want: str) -> None:
    ids = tok("B", "CD", "EF", "B")
    out = run(OutputKind.DELTA, [delta([i]) for i in ids], stop=["B", "CD", "EF"], min_tokens=min_tokens)
    assert out.text() == want and out.last.finished


def test_a_stop_string_that_begins_before_min_tokens_does_not_count() -> None:
    out = run(OutputKind.DELTA, [delta(tok("B", "CD", "B", "CD"))], stop=["BC"], min_tokens=1)
    assert out.text() == "BCD"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(
    ("skip", "include", "want"), [(True, False, "bc"), (False, False, "bc"), (False, True, "bc<X>"), (True, True, "bc")]
)
def test_special_stop_token_keeps_the_text_before_it_stp_06(
    kind: OutputKind, chunk: int, skip: bool, include: bool, want: str
) -> None:
    ids = tok("b", "c", "<X>")
    deltas = [delta(ids[:2]), delta(ids[2:], finish=FinishReason.STOP, stop_reason=X)]
    if chunk == 3:
        deltas = [delta(ids, finish=FinishReason.STOP, stop_reason=X)]
    out = run(
        kind, deltas, stop_token_ids=[X], skip_special_tokens=skip, include_stop_str_in_output=include, max_tokens=9
    )
    assert out.text() == want
    assert out.last.outputs[0].stop_reason == X and out.last.num_output_tokens == 3


@pytest.mark.parametrize(("skip", "want"), [(True, "bcd"), (False, "bc<X>d")])
def test_special_token_that_does_not_stop_stp_06(skip: bool, want: str) -> None:
    deltas = [delta([i]) for i in tok("b", "c", "<X>", "d")] + [delta(finish=FinishReason.ABORT)]
    assert run(OutputKind.DELTA, deltas, skip_special_tokens=skip).text() == want


def test_eos_has_no_text_but_is_counted() -> None:
    out = run(OutputKind.FINAL_ONLY, [delta(tok("b", "</s>"), finish=FinishReason.STOP)], skip_special_tokens=False)
    answer = out.last.outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("b", list(tok("b", "</s>")), None)


def test_a_stop_token_flushes_half_a_character() -> None:
    half = CORE.token_to_id("Ã")  # the first byte of é, as byte-level vocabularies write it
    out = run(OutputKind.DELTA, [delta(tok("b")), delta([half, EOS], finish=FinishReason.STOP)])
    assert out.text() == "b" + REPLACEMENT


# ---- kinds ----


@pytest.mark.parametrize("kind_of_text", ["byte-bpe", "byte-fallback-bpe", "wordpiece"])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_all_kinds_tell_one_text_whatever_the_chunking_out_23(kind_of_text: str, data: st.DataObject) -> None:
    decoder = tokenizer(kind_of_text)
    words = data.draw(st.lists(st.sampled_from(["the", "fox", "é", "\U0001f9d1", "hello", "words"]), min_size=1))
    ids = decoder.encode(" ".join(words), add_special_tokens=False)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)))) | {0, len(ids)})
    stop = data.draw(st.sampled_from([(), ("fo",), ("hello w", "xe"), ("o", "lo")]))
    texts, tokens = [], []
    for kind in KINDS:
        for path in (decoder, NoFastPath(decoder)):
            deltas = [delta(ids[a:b]) for a, b in pairwise(cuts)]
            out = run(kind, [*deltas, delta(finish=FinishReason.LENGTH)], path, stop=stop, logprobs=0)
            texts.append(out.text())
            per_output = [o.outputs[0].token_ids for o in out.outputs]
            tokens.append([t for p in per_output for t in p] if kind is OutputKind.DELTA else per_output[-1])
    assert len(set(texts)) == 1
    assert all(t == tokens[0] for t in tokens)
    if not stop:
        whole = decoder.decode([*tok("A"), *ids]) if kind_of_text == "byte-bpe" else None
        assert whole is None or whole.endswith(texts[0])
        assert texts[0].strip() == decoder.decode(ids)


def test_cumulative_tells_all_and_delta_what_is_new() -> None:
    deltas = [delta(tok("B")), delta(tok("CD")), delta(tok("EF"), finish=FinishReason.LENGTH)]
    whole = run(OutputKind.CUMULATIVE, deltas)
    assert [(o.outputs[0].text, o.finished) for o in whole.outputs] == [("B", False), ("BCD", False), ("BCDEF", True)]
    assert [o.outputs[0].token_ids for o in whole.outputs][1] == list(tok("B", "CD"))
    new = run(OutputKind.DELTA, deltas)
    assert [o.outputs[0].text for o in new.outputs] == ["B", "CD", "EF"]
    assert [o.num_output_tokens for o in new.outputs] == [1, 2, 3]  # continuous usage
    final = run(OutputKind.FINAL_ONLY, deltas)
    assert [o.outputs[0].text for o in final.outputs] == ["BCDEF"]


def test_nothing_is_told_when_nothing_is_new() -> None:
    out = Run(opening(SamplingParams(output_kind=OutputKind.DELTA, stop=["CDE"])))
    assert out.push(delta(tok("CD"))) == []  # held back, and its token with it
    assert out.push(delta(times=RequestTimes(arrived_s=1.0))) == []
    assert len(out.push(delta(tok("GH")))) == 1


def test_a_prompt_that_is_only_scored_gives_one_output() -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, output_kind=OutputKind.DELTA)
    out = Run(opening(params, prompt=tok("A", "B", "CD")))
    assert out.push(delta(finish=FinishReason.LENGTH, prompt_logprobs=()))[0].finished
    assert out.last.outputs[0].text == "" and out.last.outputs[0].token_ids == []


def test_without_detokenizing_ids_come_alone() -> None:
    out = run(OutputKind.DELTA, [delta(tok("B")), delta(tok("CD"), finish=FinishReason.LENGTH)], detokenize=False)
    assert [(o.outputs[0].text, o.outputs[0].token_ids) for o in out.outputs] == [
        ("", list(tok("B"))), ("", list(tok("CD"))),
    ]  # fmt: skip


# ---- log-probabilities ----


@pytest.mark.parametrize("chunk", [1, 2, 3, 6])
def test_logprobs_leave_with_the_text_of_their_tokens_out_25(chunk: int) -> None:
    ids = tok("B", "CD", "EF", "IJ", "K", "A")
    deltas = [delta(ids[i : i + chunk], logprobs=toy_logprobs(ids[i : i + chunk], 2)) for i in range(0, 6, chunk)]
    out = run(OutputKind.DELTA, [*deltas, delta(finish=FinishReason.LENGTH)], stop=["DEFG", "AA"], logprobs=2)
    for each in out.outputs[:-1]:
        answer = each.outputs[0]
        assert [next(iter(entry)) for entry in answer.logprobs or ()] == answer.token_ids
        # every token told has told its whole text, and no text of an untold token is whole
        assert CHAIN.decode(answer.token_ids) in out.text()
    told = [o.outputs[0] for o in out.outputs]
    assert [t for o in told for t in o.token_ids] == list(ids)
    assert [next(iter(e)) for o in told for e in o.logprobs or ()] == list(ids)
    assert told[-1].cumulative_logprob == pytest.approx(-6.0)


def test_a_held_token_waits_for_the_delta_that_completes_its_text() -> None:
    out = Run(opening(SamplingParams(output_kind=OutputKind.DELTA, stop=["DEFG"], logprobs=0)))
    first = out.push(delta(tok("CD"), logprobs=toy_logprobs(tok("CD"), 0)))[0].outputs[0]
    assert (first.text, first.token_ids, first.logprobs) == ("C", [], [])
    assert out.push(delta(tok("EF"), logprobs=toy_logprobs(tok("EF"), 0))) == []
    third = out.push(delta(tok("K"), logprobs=toy_logprobs(tok("K"), 0)))[0].outputs[0]
    assert (third.text, third.token_ids, len(third.logprobs or ())) == ("DEFK", list(tok("CD", "EF", "K")), 3)


def test_logprobs_of_half_a_character_come_with_the_character() -> None:
    halves = (CORE.token_to_id("Ã"), CORE.token_to_id("©"))
    out = Run(opening(SamplingParams(output_kind=OutputKind.DELTA, logprobs=0)))
    assert out.push(delta(halves[:1], logprobs=toy_logprobs(halves[:1], 0))) == []
    answer = out.push(delta(halves[1:], logprobs=toy_logprobs(halves[1:], 0)))[0].outputs[0]
    assert (answer.text, answer.token_ids, len(answer.logprobs or ())) == ("é", list(halves), 2)


def test_a_stop_string_cuts_logprobs_with_its_ids() -> None:
    ids = tok("B", "CD", "EF")
    out = run(OutputKind.CUMULATIVE, [delta(ids, logprobs=toy_logprobs(ids, 1))], stop=["D"], logprobs=1)
    answer = out.last.outputs[0]
    assert answer.token_ids == list(tok("B", "CD")) and len(answer.logprobs or ()) == 2
    assert answer.cumulative_logprob == pytest.approx(-2.0)


def test_prompt_logprobs_come_once_in_deltas_and_always_otherwise() -> None:
    from octavo.base.step import PromptLogprobs

    prompt = tok("A", "B", "CD")
    arrays = toy_logprobs(prompt[1:], 1)
    scored = PromptLogprobs(0, 1, arrays.token_ids, arrays.logprobs, arrays.ranks)
    for kind, want in ((OutputKind.DELTA, [True, False]), (OutputKind.CUMULATIVE, [True, True])):
        out = Run(opening(SamplingParams(output_kind=kind, prompt_logprobs=1), prompt=prompt))
        out.push(delta(prompt_logprobs=(scored,)))
        out.push(delta(tok("EF")))
        out.push(delta(tok("GH"), finish=FinishReason.LENGTH))
        assert [o.prompt_logprobs is not None for o in out.outputs] == want
        entries = out.outputs[0].prompt_logprobs or []
        assert [e and next(iter(e)) for e in entries] == [None, *prompt[1:]]


# ---- several answers, several requests ----


@pytest.mark.parametrize("kind", KINDS)
def test_answers_come_back_as_one_request_in_order(kind: OutputKind) -> None:
    out = Run(opening(SamplingParams(n=3, output_kind=kind)))
    out.push(delta(tok("B"), "r.1"), delta(tok("CD"), "r.0"))
    out.push(delta(tok("EF"), "r.2", FinishReason.LENGTH), delta(tok("B"), "r.0", FinishReason.LENGTH))
    out.push(delta(tok("K"), "r.1", FinishReason.STOP))
    assert [out.text(i) for i in range(3)] == ["CDB", "B", "EF"]
    assert [o.finished for o in out.outputs] == [False] * (len(out.outputs) - 1) + [True]
    assert out.last.num_output_tokens == 5
    if kind is OutputKind.DELTA:
        assert [[o.index for o in each.outputs] for each in out.outputs] == [[0, 1], [0, 2], [1]]
    else:
        assert [[o.index for o in each.outputs] for each in out.outputs] == [[0, 1, 2]] * len(out.outputs)
    assert [r.prompt_tokens for r in out.ended].count(1) == 1  # the prompt counts once


def test_cached_tokens_are_those_of_the_first_answer() -> None:
    out = Run(opening(SamplingParams(n=2, output_kind=OutputKind.FINAL_ONLY)))
    out.push(
        delta(tok("B"), "r.0", num_cached_tokens=16, cached_by_source={"device": 16}),
        delta(tok("B"), "r.1", num_cached_tokens=32, cached_by_source={"device": 32}),
    )
    out.push(delta((), "r.0", FinishReason.LENGTH), delta((), "r.1", FinishReason.LENGTH, num_preemptions=2))
    assert (out.last.num_cached_tokens, out.last.cached_by_source) == (16, {"device": 16})
    assert out.last.num_preemptions == 2


def test_requests_do_not_mix_and_unknown_ids_are_dropped() -> None:
    params = SamplingParams(output_kind=OutputKind.DELTA)
    out = Run(opening(params, name="x"), opening(params, name="y"))
    got = out.push(delta(tok("B"), "x"), delta(tok("CD"), "y"), delta(tok("EF"), "z"), delta(tok("K"), "x"))
    assert {o.request_id: o.outputs[0].text for o in got} == {"x": "BK", "y": "CD"}


def test_closing_gives_the_ids_that_go_on_and_drops_what_comes() -> None:
    out = Run(opening(SamplingParams(n=2), name="x"))
    out.push(delta(tok("B"), "x.0", FinishReason.STOP))
    ids, records = out.assembler.close("x", 5.0)
    assert ids == ("x.1",) and [r.reason for r in records] == [FinishReason.ABORT]
    assert out.push(delta(tok("B"), "x.1")) == [] and len(out.assembler) == 0
    assert out.assembler.close("x", 5.0) == ((), [])


def test_an_error_of_the_engine_ends_its_request_only() -> None:
    params = SamplingParams(output_kind=OutputKind.DELTA)
    out = Run(opening(params, name="x"), opening(params, name="y"))
    out.push(delta((), "x", FinishReason.ERROR, error="row failed"), delta(tok("B"), "y"))
    failed, fine = out.outputs
    assert (failed.error, failed.finished, failed.outputs[0].finish_reason) == ("row failed", True, "error")
    assert (fine.error, fine.finished) == (None, False)


def test_a_decoder_that_fails_ends_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(NoFastPath):
        def decode(self, ids, **options):  # type: ignore[no-untyped-def]
            if 5 in ids:
                raise RuntimeError("no such token")
            return super().decode(ids, **options)

    params = SamplingParams(output_kind=OutputKind.DELTA)
    out = Run(opening(params, name="x"), opening(params, name="y"), decoder=Failing(CHAIN))
    out.push(delta([5], "x"), delta(tok("B"), "y"))
    assert [(o.request_id, o.error is None) for o in out.outputs] == [("x", False), ("y", True)]
    assert out.aborts == ["x"] and len(out.assembler) == 1


class Upper:
    """A parser that says what it saw.

    Owns: nothing.
    """

    def feed(self, text: str, token_ids: Sequence[int], *, finished: bool) -> tuple[Any, ...]:
        if "K" in text:
            raise ValueError("K is not allowed")
        return ((text.lower(), tuple(token_ids), finished),)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parser_sees_each_piece_once(kind: OutputKind) -> None:
    out = Run(opening(SamplingParams(output_kind=kind), parsers=lambda index: Upper()))
    for i, token in enumerate(tok("B", "CD", "EF")):
        out.push(delta([token], finish=FinishReason.LENGTH if i == 2 else None))
    events = [part for o in out.outputs for part in o.outputs[0].parts]
    assert "".join(text for text, _, _ in events) == "bcdef"
    assert [t for _, ids, _ in events for t in ids] == list(tok("B", "CD", "EF"))
    assert [finished for _, _, finished in events] == [False] * (len(events) - 1) + [True]


def test_a_parser_that_fails_ends_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(output_kind=OutputKind.DELTA)
    out = Run(opening(params, name="x", parsers=lambda index: Upper()), opening(params, name="y"))
    out.push(delta(tok("K"), "x"), delta(tok("K"), "y"))
    assert [(o.request_id, o.finished) for o in out.outputs] == [("x", True), ("y", False)]
    assert out.outputs[0].error is not None and out.aborts == ["x"]
    assert [r.reason for r in out.ended] == [FinishReason.ERROR]


class Note(OutputPart, frozen=True, tag=True):
    text: str


def test_parts_of_the_engine_reach_the_reader() -> None:
    out = run(OutputKind.DELTA, [delta(tok("B"), parts=(Note("x"),)), delta(tok("CD"))])
    assert [o.parts for o in out.outputs] == [(Note("x"),), ()]


# ---- figures ----


def test_records_complete_the_engine_s_times_when_the_front_ended_it() -> None:
    out = Run(opening(SamplingParams(stop=["CD"]), arrived_s=0.5))
    out.push(delta(tok("B"), times=RequestTimes(0.5, 0.6, 0.7, 0.9)), now_s=1.0)
    out.push(delta(tok("CD")), now_s=2.0)
    (record,) = out.ended
    assert record.times == out.last.times == RequestTimes(0.5, 0.6, 0.7, 0.9, 2.0)
    assert (record.reason, record.output_tokens, record.prompt_tokens) == (FinishReason.STOP, 2, 1)


def test_gaps_are_between_outputs_of_one_answer() -> None:
    out = Run(opening(SamplingParams(n=2)))
    pushed = [
        out.assembler.push(EngineOutputs(deltas=(delta(tok("B"), name),)), now_s)
        for name, now_s in (("r.0", 1.0), ("r.1", 2.0), ("r.0", 4.0), ("r.1", 4.5))
    ]
    assert [p.gaps_s for p in pushed] == [[], [], [3.0], [2.5]]


# ---- slow readers ----


def test_merged_deltas_tell_what_the_single_ones_told() -> None:
    steps = (("B", "r.0"), ("CD", "r.1"), ("EF", "r.0"), ("GH", "r.1"))
    make = lambda: Run(opening(SamplingParams(n=2, output_kind=OutputKind.DELTA, logprobs=0)))  # noqa: E731
    single, other = make(), make()
    for out in (single, other):
        for piece, name in steps:
            out.push(delta(tok(piece), name, logprobs=toy_logprobs(tok(piece), 0)))
    merged = other.outputs[0]
    for each in other.outputs[1:]:
        merged = merge(merged, each, OutputKind.DELTA)
    assert [(o.index, o.text, len(o.logprobs or ())) for o in merged.outputs] == [(0, "BEF", 2), (1, "CDGH", 2)]
    assert merged.num_output_tokens == single.last.num_output_tokens


def test_merging_cumulative_outputs_keeps_parsed_events() -> None:
    out = Run(opening(SamplingParams(), parsers=lambda index: Upper()))
    for piece in ("B", "CD"):
        out.push(delta(tok(piece)))
    merged = merge(out.outputs[0], out.outputs[1], OutputKind.CUMULATIVE)
    assert merged.outputs[0].text == "BCD"
    assert [text for text, _, _ in merged.outputs[0].parts] == ["b", "cd"]
