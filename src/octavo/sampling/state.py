"""Sampling parameters of live requests by slot, and the batch's metadata made from them.

Promises: a request's parameters are taken apart once, when it enters its slot; metadata is rebuilt only when
the rows of the batch change (OUT-1).
Does not know: logits, or what the stations do with the values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, log
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.base.params import SamplingParams
from octavo.sampling.draw import derived_seed, seed_word
from octavo.sampling.penalties import Ids, TokenCounts, Tokens

# One row's parameters, for numpy and for the native core alike: `SampleRow` of native/include/octavo/sampling.h has the
# same fields in the same order. Addresses are those of arrays in `Rules`; 0 where there is none.
PARAMS = np.dtype(
    [
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),  # 0: all
        ("seed", np.uint64),
        ("sample_index", np.int64),
        ("min_tokens", np.int64),
        ("num_prompt", np.int64),
        ("allowed", np.uint64),
        ("num_allowed", np.int64),
        ("ends", np.uint64),
        ("num_ends", np.int64),
        ("bias_ids", np.uint64),
        ("bias_values", np.uint64),
        ("num_bias", np.int64),
        ("bad_words", np.uint64),
        ("num_bad_words", np.int64),
        ("counts", np.uint64),
        ("temperature", np.float32),
        ("floor", np.float32),  # least scaled logit that min-p keeps
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("logprobs", np.int32),  # columns of this row's log-probabilities: 0, or 1 + k
        ("prompt_logprobs", np.int32),
        ("greedy", np.bool_),
        ("restricted", np.bool_),  # only `allowed` may come
    ],
    align=True,
)
NO_IDS: Ids = np.zeros(0, dtype=np.int64)
NO_VALUES: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)


class NativeCounts(Protocol):
    """Token counts that the native core keeps; `address` is what it knows them by."""

    @property
    def address(self) -> int: ...


def no_counts(_with_prompt: bool) -> None:
    """Without the native core, `Rules.counts` is all there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What one request asks of the stations before the temperature; empty and None mean 'nothing'.

    `ends` are the ids that may not come before `min_tokens`. Arrays are contiguous: `PARAMS` holds their addresses.
    """

    allowed: Ids | None
    bad_words: tuple[tuple[int, ...], ...]
    flat_words: Ids  # the same for the native core: of each sequence its length, then its ids
    ends: Ids
    bias_ids: Ids
    bias_values: npt.NDArray[np.float32]
    counts: TokenCounts | None  # kept up to date by the sampler; None without penalties
    native_counts: NativeCounts | None


class SamplingMetadata:
    """The parameters of one batch, row by row; a value that holds until the rows change.

    `params` [N] has the fields of `PARAMS`. The lists name only the rows that need the station; they are made when
    asked for.
    """

    def __init__(
        self, slots: npt.NDArray[np.int32], params: npt.NDArray[np.void], rules: Sequence[Rules | None]
    ) -> None:
        self.slots = slots
        self.params = params
        self._live = tuple((row, r) for row, r in enumerate(rules) if r is not None)

    def take(self, index: npt.NDArray[np.int64]) -> "SamplingMetadata":
        """Those of the rows `index`, in that order."""
        rules = dict(self._live)
        return SamplingMetadata(self.slots[index], self.params[index], [rules.get(row) for row in index.tolist()])

    @cached_property
    def drawn(self) -> npt.NDArray[np.int64]:
        """Rows that are not greedy."""
        return np.flatnonzero(~self.params["greedy"])

    @cached_property
    def width(self) -> npt.NDArray[np.int32]:
        """Columns of log-probabilities that each row wants: 0, or 1 + k."""
        return self.params["logprobs"].copy()

    @cached_property
    def columns(self) -> int:
        """The most columns that a row wants."""
        return int(self.width.max(initial=0))

    @cached_property
    def scored(self) -> npt.NDArray[np.int64]:
        """Rows that want log-probabilities."""
        return np.flatnonzero(self.width)

    @cached_property
    def allowed(self) -> tuple[tuple[int, Ids], ...]:
        """The only ids that may come, by row."""
        return tuple((row, r.allowed) for row, r in self._live if r.allowed is not None)

    @cached_property
    def bad_words(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        """Sequences that may not come, by row."""
        return tuple((row, r.bad_words) for row, r in self._live if r.bad_words)

    @cached_property
    def ends(self) -> tuple[tuple[int, int, Ids], ...]:
        """Row, min_tokens, and the ids that may not come before it."""
        return tuple((row, int(self.params["min_tokens"][row]), r.ends) for row, r in self._live if r.ends.size)

    @cached_property
    def bias(self) -> tuple[Ids, Ids, npt.NDArray[np.float32]]:
        """Rows, ids and values of all biases."""
        biased = [(row, r) for row, r in self._live if r.bias_ids.size]
        return (
            np.repeat([row for row, _ in biased], [len(r.bias_ids) for _, r in biased]).astype(np.int64),
            np.concatenate([NO_IDS, *(r.bias_ids for _, r in biased)]),
            np.concatenate([NO_VALUES, *(r.bias_values for _, r in biased)]),
        )

    @cached_property
    def penalized(self) -> npt.NDArray[np.int64]:
        """Rows with penalties."""
        return np.asarray([row for row, r in self._live if r.counts is not None], dtype=np.int64)

    @cached_property
    def counts(self) -> tuple[TokenCounts, ...]:
        """Token counts of the penalized rows."""
        return tuple(r.counts for _, r in self._live if r.counts is not None)

    @cached_property
    def plain(self) -> bool:
        """True when no station changes a logit."""
        return not (self.allowed or self.bad_words or self.ends or self.bias[0].size or self.counts)


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

    def take(self, index: npt.NDArray[np.int64]) -> "SamplingRows":
        """The rows `index`, in that order."""
        return SamplingRows(metadata=self.metadata.take(index), token_ids=self.token_ids, lengths=self.lengths[index])

    def known(self, row: int) -> Tokens:
        """All tokens before the one about to be chosen."""
        return self.token_ids[self.metadata.slots[row], : self.lengths[row]]


class SamplingState:
    """Parameters by slot.

    `make_counts` makes what the native core counts a request's tokens in.

    Owns: the parameter array, each slot's rules, which slots want prompt scores, and the metadata made last.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_limit: int,
        engine_seed: int,
        make_counts: Callable[[bool], NativeCounts | None] = no_counts,
    ) -> None:
        self._make_counts = make_counts
        self._vocab_limit = vocab_limit
        self._engine_seed = engine_seed
        self._params = np.zeros(max_num_seqs, dtype=PARAMS)
        self._rules: list[Rules | None] = [None] * max_num_seqs
        self._made: SamplingMetadata | None = None
        self._made_for = b""
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
        row["floor"] = log(p.min_p) if p.min_p > 0 else -inf
        row["repetition"], row["frequency"] = p.repetition_penalty, p.frequency_penalty
        row["presence"] = p.presence_penalty
        row["seed"], row["sample_index"] = seed, sample_index
        row["min_tokens"], row["num_prompt"] = p.min_tokens, num_prompt_tokens
        row["logprobs"] = self._columns(p.logprobs)
        row["prompt_logprobs"] = self._columns(p.prompt_logprobs)
        (self._prompt_scored.discard if p.prompt_logprobs is None else self._prompt_scored.add)(slot)
        rules = self._rules[slot] = self._make_rules(p, eos_token_ids, bad_words_ids)
        _point_at(row, rules)
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
        asked = slots.tobytes()  # the quickest comparison of a few numbers
        if self._made is None or self._made_for != asked:
            rules = [self._rules[s] for s in slots.tolist()]
            self._made, self._made_for = SamplingMetadata(slots.copy(), self._params[slots], rules), asked
        return self._made

    def _columns(self, k: int | None) -> int:
        if k is None:
            return 0
        return 1 + (self._vocab_limit if k < 0 else min(k, self._vocab_limit))

    def _make_rules(self, p: SamplingParams, eos: Sequence[int], bad_words: Sequence[tuple[int, ...]]) -> Rules:
        bias = {t: v for t, v in (p.logit_bias or {}).items() if 0 <= t < self._vocab_limit}
        ends = (*(() if p.ignore_eos else eos), *p.stop_token_ids) if p.min_tokens else ()
        words = tuple(w for w in bad_words if w and 0 <= w[-1] < self._vocab_limit)
        penalized = p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0
        with_prompt = p.repetition_penalty != 1.0
        return Rules(
            allowed=None if p.allowed_token_ids is None else self._inside(p.allowed_token_ids),
            bad_words=words,
            flat_words=np.asarray([n for w in words for n in (len(w), *w)], dtype=np.int64),
            ends=self._inside(ends),
            bias_ids=np.fromiter(bias.keys(), dtype=np.int64, count=len(bias)),
            bias_values=np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
            counts=TokenCounts(with_prompt=with_prompt) if penalized else None,
            native_counts=self._make_counts(with_prompt) if penalized else None,
        )

    def _inside(self, ids: Sequence[int]) -> Ids:
        kept = [i for i in ids if 0 <= i < self._vocab_limit]
        return np.unique(np.asarray(kept, dtype=np.int64))


def _point_at(row: npt.NDArray[np.void], rules: Rules) -> None:
    """Write the addresses of the rules' arrays, which live as long as the rules."""
    allowed = NO_IDS if rules.allowed is None else rules.allowed
    row["restricted"] = rules.allowed is not None
    row["allowed"], row["num_allowed"] = _address(allowed), len(allowed)
    row["ends"], row["num_ends"] = _address(rules.ends), len(rules.ends)
    row["bias_ids"], row["bias_values"] = _address(rules.bias_ids), _address(rules.bias_values)
    row["num_bias"] = len(rules.bias_ids)
    row["bad_words"], row["num_bad_words"] = _address(rules.flat_words), len(rules.bad_words)
    row["counts"] = 0 if rules.native_counts is None else rules.native_counts.address


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data) if array.size else 0
