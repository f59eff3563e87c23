"""From hidden states to tokens: which rows need logits, and what the sampler is asked.

Promises: logits are made only for rows that yield a token, and for prompt positions whose scores were asked for,
those a bounded number at a time (OUT-6); a row that fails takes nobody with it.
Does not know: how tokens are chosen (see `sampling`), or features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.base.step import Ints, LogprobArrays, NewRow, PromptLogprobs, Ragged, RowError
from octavo.sampling.choice import make_sampler
from octavo.sampling.logprobs import LogprobsMode, Scores, score_prompt
from octavo.sampling.processors import LogitsProcessor, Processors
from octavo.sampling.sampler import Mask
from octavo.sampling.state import SamplingRows, SamplingState
from octavo.worker.batch import InputBatch, Longs
from octavo.worker.seams import WorkerModel
from octavo.worker.table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One step's tokens by row, and what goes with them."""

    tokens: Ragged
    logprobs: LogprobArrays | None
    prompt_logprobs: tuple[PromptLogprobs, ...]
    errors: tuple[RowError, ...]


class SampleChooser:
    """Samples one token for each row that yields one, and tells the table.

    `native` False: never with the native core, as for logits that are not in a CPU's memory.

    Owns: the sampling state of the slots, and who of them custom processors change.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_limit: int,
        seed: int,
        processors: Sequence[LogitsProcessor] = (),
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        native: bool = True,
    ) -> None:
        self._processors = Processors(processors)
        self._sampler = make_sampler(vocab_limit=vocab_limit, processors=self._processors, mode=mode, native=native)
        self._state = SamplingState(
            max_num_seqs=max_num_seqs,
            vocab_limit=vocab_limit,
            engine_seed=seed,
            make_counts=self._sampler.make_counts,
        )

    def enter(self, row: NewRow) -> None:
        """A request takes a slot."""
        self._state.enter(
            row.slot,
            row.request_id,
            row.sampling,
            num_prompt_tokens=row.num_prompt_tokens,
            sample_index=row.sample_index,
            eos_token_ids=row.eos_token_ids,
            bad_words_ids=row.bad_words_ids,
        )
        if self._processors:
            self._processors.enter(row.slot, row.request_id, row.sampling)

    def leave(self, slot: int) -> None:
        """The slot's request is gone."""
        self._state.leave(slot)
        self._processors.leave(slot)

    def choose(
        self,
        model: WorkerModel,
        hidden: Tensor,
        batch: InputBatch,
        table: RequestTable,
        masks: Sequence[Mask],
        failed: Sequence[RowError] = (),
    ) -> Chosen:
        """Sample, and append what was sampled to `table`. For rows in `failed` nothing comes out.

        A row that fails is given a token in `table` all the same: the next step, which may have been planned
        already, computes it and is dropped.
        """
        prompt = self._score_prompts(model, hidden, batch, table) if self._state.scores_prompts else ()
        whole = len(batch.sample_rows) == batch.num_tokens  # every token yields one
        slots = batch.slots if whole else batch.slots[batch.sample_rows]
        if not len(slots):
            nothing = np.zeros(0, dtype=np.int32)
            tokens = _ragged(batch.num_rows, nothing, nothing)
            return Chosen(tokens=tokens, logprobs=None, prompt_logprobs=prompt, errors=())
        last = hidden[: batch.num_tokens] if whole else hidden[batch.sample_index]
        logits = model.logits(last)
        rows = SamplingRows(
            metadata=self._state.metadata(slots), token_ids=table.token_ids, lengths=batch.sample_lengths
        )
        out = self._sampler.sample(logits, rows, masks)
        sampled = out.tokens
        table.append(slots, sampled)
        if whole and not out.errors and not failed:
            tokens = Ragged(batch.query_starts, sampled.astype(np.int32, copy=False))
            return Chosen(tokens=tokens, logprobs=out.logprobs, prompt_logprobs=prompt, errors=())
        errors = tuple(RowError(int(batch.sample_rows[e.row]), e.message) for e in out.errors)
        bad = {e.row for e in (*errors, *failed)}
        keep = ~np.isin(batch.sample_rows, list(bad))
        return Chosen(
            tokens=_ragged(batch.num_rows, batch.sample_rows[keep], sampled[keep]),
            logprobs=_lines(out.logprobs, keep),
            prompt_logprobs=prompt,
            errors=errors,
        )

    def _score_prompts(
        self, model: WorkerModel, hidden: Tensor, batch: InputBatch, table: RequestTable
    ) -> tuple[PromptLogprobs, ...]:
        """Position p scores the prompt token at p + 1, so a prompt's last position scores none."""
        columns = self._state.prompt_columns(batch.slots)
        out = []
        for row in np.flatnonzero(columns).tolist():
            slot, start, first = (
                int(batch.slots[row]),
                int(batch.num_computed_tokens[row]),
                int(batch.query_starts[row]),
            )
            last = min(start + int(batch.num_scheduled_tokens[row]), int(table.num_prompt[slot]) - 1)
            if last <= start:
                continue
            ids, values, ranks = score_prompt(
                hidden[first : first + last - start],
                model.logits,
                table.token_ids[slot, start + 1 : last + 1],
                partial(self._score, int(columns[row])),
            )
            out.append(PromptLogprobs(slot, start + 1, ids, values, ranks))
        return tuple(out)

    def _score(self, columns: int, logits: Tensor, chosen: Longs) -> Scores:
        return self._sampler.score(logits, chosen, columns)


def _ragged(num_rows: int, rows: "Longs | Ints", tokens: "Longs | Ints") -> Ragged:
    """One token for each of `rows` (rising), none for the others."""
    counts = np.zeros(num_rows + 1, dtype=np.int32)
    counts[rows + 1] = 1
    return Ragged(np.cumsum(counts, dtype=np.int32), tokens.astype(np.int32, copy=False))


def _lines(logprobs: LogprobArrays | None, keep: npt.NDArray[np.bool_]) -> LogprobArrays | None:
    """Only the lines of tokens that came out."""
    if logprobs is None or keep.all():
        return logprobs
    return LogprobArrays(logprobs.token_ids[keep], logprobs.logprobs[keep], logprobs.ranks[keep], logprobs.width[keep])
