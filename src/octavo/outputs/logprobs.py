"""Public shapes of log-probabilities, from the arrays that the engine sends.

Promises: the chosen token comes first in its entry, then the most likely ones in falling order; a token
among the most likely ones is not listed twice.
Does not know: how they were computed.
"""

from collections.abc import Sequence
from itertools import islice

from octavo.base.outputs import Logprob, TokenLogprobs
from octavo.base.step import LogprobArrays, PromptLogprobs
from octavo.outputs.detokenizer import TokenDecoder


class LogprobReader:
    """Turns arrays into entries.

    Owns: a cache of single tokens' texts, at most one for each id of the vocabulary.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._texts: dict[int, str] = {}

    def sampled(self, arrays: LogprobArrays, *, with_text: bool = True) -> list[TokenLogprobs]:
        """One entry for each line."""
        return [
            self._entry(ids[:width], values[:width], rank, with_text)
            for ids, values, rank, width in zip(
                arrays.token_ids.tolist(),
                arrays.logprobs.tolist(),
                arrays.ranks.tolist(),
                arrays.width.tolist(),
                strict=True,
            )
        ]

    def prompt(self, arrays: PromptLogprobs, *, with_text: bool = True) -> list[TokenLogprobs]:
        """One entry for each prompt position from `arrays.start` on."""
        lines = zip(arrays.token_ids.tolist(), arrays.logprobs.tolist(), arrays.ranks.tolist(), strict=True)
        return [self._entry(ids, values, rank, with_text) for ids, values, rank in lines]

    def _entry(self, ids: Sequence[int], values: Sequence[float], rank: int, with_text: bool) -> TokenLogprobs:
        text = self._text if with_text else _no_text
        entry: dict[int, Logprob] = {}
        if ids:
            entry[ids[0]] = Logprob(values[0], rank, text(ids[0]))
        for place, (token_id, value) in enumerate(islice(zip(ids, values, strict=True), 1, None), start=1):
            if token_id not in entry:
                entry[token_id] = Logprob(value, place, text(token_id))
        return entry

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decoder.token_text(token_id)
        return text


def _no_text(_: int) -> None:
    return None


class PromptEntries:
    """A prompt's log-probabilities, gathered from the chunks it was computed in (OUT-6).

    Position 0 has no entry: nothing comes before it. A chunk that comes again (after a preemption) replaces
    what it gave before.

    Owns: the entries.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self.entries: list[TokenLogprobs | None] = [None] * num_prompt_tokens

    def place(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Entries for positions `start` and on; what lies beyond the prompt is left out."""
        end = min(start + len(entries), len(self.entries))
        self.entries[start:end] = entries[: max(0, end - start)]
