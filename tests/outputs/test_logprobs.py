"""Public shapes of log-probabilities (OUT-25, OUT-6)."""

import numpy as np

from octavo.base.outputs import Logprob
from octavo.base.step import LogprobArrays, PromptLogprobs
from octavo.outputs.logprobs import LogprobReader, PromptEntries
from tests.support.decoders import NoFastPath, tokenizer

DECODER = NoFastPath(tokenizer("byte-bpe"))


def ints(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def floats(values: object) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def text(token_id: int) -> str:
    return DECODER.token_text(token_id)


def test_the_chosen_token_comes_first_and_once() -> None:
    arrays = LogprobArrays(
        ints([[60, 61, 62], [70, 70, 71]]), floats([[-3, -0.5, -1], [-0.25, -0.25, -2]]), ints([9, 1]), ints([3, 3])
    )
    first, second = LogprobReader(DECODER).sampled(arrays)
    assert list(first.items()) == [
        (60, Logprob(-3.0, 9, text(60))), (61, Logprob(-0.5, 1, text(61))), (62, Logprob(-1.0, 2, text(62))),
    ]  # fmt: skip
    assert list(second.items()) == [(70, Logprob(-0.25, 1, text(70))), (71, Logprob(-2.0, 2, text(71)))]


def test_only_as_many_columns_as_a_row_asked_for() -> None:
    arrays = LogprobArrays(ints([[60, 61], [62, 63]]), floats([[-1, -2], [-3, -4]]), ints([1, 1]), ints([1, 0]))
    first, second = LogprobReader(DECODER).sampled(arrays)
    assert list(first) == [60]
    assert second == {}


def test_without_text_entries_have_none() -> None:
    arrays = LogprobArrays(ints([[60, 61]]), floats([[-1, -2]]), ints([1]), ints([2]))
    (entry,) = LogprobReader(DECODER).sampled(arrays, with_text=False)
    assert [value.decoded_token for value in entry.values()] == [None, None]


def test_prompt_chunks_join_in_their_places_and_may_come_again() -> None:
    reader, entries = LogprobReader(DECODER), PromptEntries(4)
    late = PromptLogprobs(0, 3, ints([[63]]), floats([[-3]]), ints([3]))
    early = PromptLogprobs(0, 1, ints([[61], [62]]), floats([[-1], [-2]]), ints([1, 2]))
    for chunk in (late, early, late):
        entries.place(chunk.start, reader.prompt(chunk))
    assert entries.entries[0] is None
    assert [next(iter(entry)) for entry in entries.entries[1:] if entry] == [61, 62, 63]


def test_what_lies_beyond_the_prompt_is_left_out() -> None:
    entries = PromptEntries(2)
    entries.place(1, [{1: Logprob(0.0)}, {2: Logprob(0.0)}])
    entries.place(5, [{3: Logprob(0.0)}])
    assert entries.entries == [None, {1: Logprob(0.0)}]
