"""Sampling parameters of live requests by slot, and the batch's metadata made from them.

Promises: a request's parameters are taken apart once, when it enters its slot; metadata is rebuilt only when
the rows of the batch change (OUT-1).
Does not know: logits, or what the stations do with the values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.base.params import SamplingParams
from octavo.sampling.draw import derived_seed, seed_word
from octavo.sampling.penalties import Ids, TokenCounts, Tokens

PARAMS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),  # 0: all
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("seed", np.uint64),
        ("sample_index", np.int64),
        ("min_tokens", np.int64),
        ("num_prompt", np.int64),
        ("logprobs", np.int32),  # columns of this row's log-probabilities: 0, or 1 + k
        ("prompt_logprobs", np.int32),
        ("greedy", np.bool_),
    ]
)
NO_IDS: Ids = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What one request asks of the stations before the temperature; empty and None mean 'nothing'.

    `ends` are the ids that may not come before `min_tokens`.
    """

    allowed: Ids | None
    bad_words: tuple[tuple[int, ...], ...]
    ends: Ids
    bias_ids: Ids
    bias_values: npt.NDArray[np.float32]
    counts: TokenCounts | None  # kept up to date by the sampler; None without penalties


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """The parameters of one batch, row by row; a value that holds until the rows change.

    `params` [N] has the fields of `PARAMS`. The lists name only the rows that need the station.
    """

    slots: npt.NDArray[np.int32]
    params: npt.NDArray[np.void]
    drawn: npt.NDArray[np.int64]  # rows that are not greedy
    scored: npt.NDArray[np.int64]  # rows that want log-probabilities
    allowed: tuple[tuple[int, Ids], ...]
    bad_words: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]
    ends: tuple[tuple[int, int, Ids], ...]  # row, min_tokens, ids
    bias_rows: npt.NDArray[np.int64]
    bias_ids: Ids
    bias_values: npt.NDArray[np.float32]
    penalized: npt.NDArray[np.int64]
    counts: tuple[TokenCounts, ...]  # of the penalized rows

    @property
    def plain(self) -> bool:
        """True when no station changes a logit."""
        return not (self.allowed or self.bad_words or self.ends or self.bias_rows.size or self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """One step's question to the sampler.

    Row i continues the first `lengths[i]` tokens of `token_ids[metadata.slots[i]]`.
    """

    metadata: SamplingMetadata
    token_ids: npt.NDArray[np.int32]  # [slots, max tokens]
    lengths: npt.NDArray[np.int64]

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Index in the output of the token about to be chosen, by row."""
        positions: npt.NDArray[np.int64] = self.lengths - self.metadata.params["num_prompt"]
        return positions

    def known(self, row: int) -> Tokens:
        """All tokens before the one about to be chosen."""
        return self.token_ids[self.metadata.slots[row], : self.lengths[row]]


class SamplingState:
    """Parameters by slot.

    Owns: the parameter array, each slot's rules, which slots want prompt scores, and the metadata made last.
    """

    def __init__(self, *, max_num_seqs: int, vocab_limit: int, engine_seed: int) -> None:
        self._vocab_limit = vocab_limit
        self._engine_seed = engine_seed
        self._params = np.zeros(max_num_seqs, dtype=PARAMS)
        self._rules: list[Rules | None] = [None] * max_num_seqs
        self._made: SamplingMetadata | None = None
        self._prompt_scored: set[int] = set()

    @property
    def scores_prompts(self) -> bool:
        """True when some slot's request wants its prompt scored."""
        return bool(self._prompt_scored)

    def enter(
        self,
        slot: int,
        request_id: str,
        sampling: SamplingParams,
        *,
        num_prompt_tokens: int,
        sample_index: int = 0,
        eos_token_ids: Sequence[int] = (),
        bad_words_ids: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """A request takes `slot`. Ids outside the vocabulary are passed over."""
        p = sampling
        seed = derived_seed(self._engine_seed, request_id) if p.seed is None else seed_word(p.seed)
        row = self._params[slot : slot + 1]
        row["temperature"], row["greedy"] = p.temperature, p.greedy
        row["top_p"], row["min_p"], row["top_k"] = p.top_p, p.min_p, p.top_k
        row["repetition"], row["frequency"] = p.repetition_penalty, p.frequency_penalty
        row["presence"] = p.presence_penalty
        row["seed"], row["sample_index"] = seed, sample_index
        row["min_tokens"], row["num_prompt"] = p.min_tokens, num_prompt_tokens
        row["logprobs"] = self._columns(p.logprobs)
        row["prompt_logprobs"] = self._columns(p.prompt_logprobs)
        (self._prompt_scored.discard if p.prompt_logprobs is None else self._prompt_scored.add)(slot)
        self._rules[slot] = self._make_rules(p, eos_token_ids, bad_words_ids)
        self._made = None

    def leave(self, slot: int) -> None:
        """The slot's request finished or was preempted."""
        self._rules[slot] = None
        self._prompt_scored.discard(slot)
        self._made = None

    def prompt_columns(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Columns of prompt log-probabilities that each of these slots wants: 0, or 1 + k."""
        columns: npt.NDArray[np.int32] = self._params["prompt_logprobs"][slots]
        return columns

    def metadata(self, slots: npt.NDArray[np.int32]) -> SamplingMetadata:
        """Metadata of a batch with these rows; the last answer again while nothing changed."""
        if self._made is None or not np.array_equal(self._made.slots, slots):
            self._made = self._build(slots.copy())
        return self._made

    def _columns(self, k: int | None) -> int:
        if k is None:
            return 0
        return 1 + (self._vocab_limit if k < 0 else min(k, self._vocab_limit))

    def _make_rules(self, p: SamplingParams, eos: Sequence[int], bad_words: Sequence[tuple[int, ...]]) -> Rules:
        bias = {t: v for t, v in (p.logit_bias or {}).items() if 0 <= t < self._vocab_limit}
        ends = (*(() if p.ignore_eos else eos), *p.stop_token_ids) if p.min_tokens else ()
        penalized = p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0
        return Rules(
            allowed=None if p.allowed_token_ids is None else self._inside(p.allowed_token_ids),
            bad_words=tuple(w for w in bad_words if w and 0 <= w[-1] < self._vocab_limit),
            ends=self._inside(ends),
            bias_ids=np.fromiter(bias.keys(), dtype=np.int64, count=len(bias)),
            bias_values=np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
            counts=TokenCounts(with_prompt=p.repetition_penalty != 1.0) if penalized else None,
        )

    def _inside(self, ids: Sequence[int]) -> Ids:
        kept = [i for i in ids if 0 <= i < self._vocab_limit]
        return np.unique(np.asarray(kept, dtype=np.int64))

    def _build(self, slots: npt.NDArray[np.int32]) -> SamplingMetadata:
        params = self._params[slots]
        rules = [self._rules[s] for s in slots.tolist()]
        live = [(row, r) for row, r in enumerate(rules) if r is not None]
        biased = [(row, r) for row, r in live if r.bias_ids.size]
        counted = [(row, r.counts) for row, r in live if r.counts is not None]
        return SamplingMetadata(
            slots=slots,
            params=params,
            drawn=np.flatnonzero(~params["greedy"]),
            scored=np.flatnonzero(params["logprobs"]),
            allowed=tuple((row, r.allowed) for row, r in live if r.allowed is not None),
            bad_words=tuple((row, r.bad_words) for row, r in live if r.bad_words),
            ends=tuple((row, int(params["min_tokens"][row]), r.ends) for row, r in live if r.ends.size),
            bias_rows=np.repeat([row for row, _ in biased], [len(r.bias_ids) for _, r in biased]).astype(np.int64),
            bias_ids=np.concatenate([NO_IDS, *(r.bias_ids for _, r in biased)]),
            bias_values=np.concatenate([np.zeros(0, dtype=np.float32), *(r.bias_values for _, r in biased)]),
            penalized=np.asarray([row for row, _ in counted], dtype=np.int64),
            counts=tuple(c for _, c in counted),
        )
