"""The only mutable record of one request.

Promises: counters and token lists change together, through methods; readers get views that cannot be written;
illegal state transitions raise.
Does not know: queues, budgets, blocks' owners, or who else runs.

The counters obey, at every moment, for a request that is alive (checked by `check`, REQ-3)::

    0 <= num_computed_tokens <= num_tokens + num_placeholders + drafts in flight
    num_tokens == len(tokens), one hash for each full block of known tokens

Fields are plain attributes, since the step reads them for every row; outside this module they are read only, which
`tests/architecture/test_owners.py` holds.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from octavo.base.requests import EngineRequest
from octavo.base.types import FinishReason, RequestState, check_transition
from octavo.kvcache.hashing import BlockHash, HashChain
from octavo.kvcache.tables import LookupReason
from octavo.scheduler.timeline import Timeline
from octavo.scheduler.tokens import TokensView, end_for_length, stop_ids

NEVER = 1 << 62  # a step number that does not come


class Rule(Protocol):
    """What is kept of a constraint that applies to a request; by shape, see `seams.Constraint`."""

    limits_decode: bool

    def wait(self, req: "Request") -> Any: ...
    def crowd(self, req: "Request") -> BlockHash | None: ...
    def admits(self, req: "Request", builder: Any) -> bool: ...
    def cap(self, req: "Request", n: int, builder: Any) -> int: ...
    def commit(self, req: "Request", n: int, builder: Any) -> None: ...
    def undo(self, req: "Request", builder: Any) -> None: ...
    def forget(self, req: "Request") -> None: ...


class Request:
    """One request inside the scheduler; made from an `EngineRequest`, changed by the scheduler side only.

    `max_total_tokens` is where it ends for length: prompt plus `max_tokens`, at most the context.
    `num_computed_tokens` counts what steps already planned will have computed; `num_placeholders` counts tokens
    that such steps will sample and that have not come back. `num_reserved_tokens` is what its blocks have room for.
    Results of steps before `valid_from` are stale: the request was preempted or ended after they were planned.
    `steady` is True when it decodes one token a step and no rule limits that: the hot path.
    Raises `ContextLengthError` when the prompt leaves no room in the context.

    Owns: every field of the request's state, the token list and its hash chain.
    """

    __slots__ = (
        "_chain",
        "_hash_size",
        "_next_hash",
        "_tokens",
        "cached_by_source",
        "constraints",
        "decode_constraints",
        "finish_reason",
        "holds_blocks",
        "key",
        "last_seq",
        "lost_blocks",
        "max_total_tokens",
        "min_total_tokens",
        "next_commit",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_scored",
        "num_prompt_tokens",
        "num_reserved_tokens",
        "num_stale_output_tokens",
        "num_tokens",
        "promised_shares",
        "promised_source",
        "promised_tokens",
        "reads_prefix_cache",
        "request_id",
        "sampling",
        "slot",
        "source",
        "state",
        "steady",
        "stop_ids",
        "times",
        "valid_from",
        "waits_for",
        "wants_logprobs",
    )

    def __init__(self, source: EngineRequest, chain: HashChain, *, block_size: int, max_model_len: int, now: float):
        sampling = source.sampling
        self.source: Final = source
        self.request_id: Final = source.request_id
        self.sampling: Final = sampling
        self.state = RequestState.NEW
        self.finish_reason: FinishReason | None = None
        self.slot: int | None = None
        self.times: Final = Timeline(source.arrival_s, now)
        # ---- tokens
        self._tokens = list(source.prompt_token_ids)
        self._chain = chain
        self._hash_size = block_size
        self._next_hash = block_size
        self.num_tokens = self.num_prompt_tokens = len(self._tokens)
        self.max_total_tokens: Final = end_for_length(self.num_tokens, sampling.max_tokens, max_model_len)
        self.min_total_tokens: Final = self.num_prompt_tokens + sampling.min_tokens
        self.stop_ids: Final = stop_ids(source)
        self.wants_logprobs: Final = sampling.logprobs is not None
        # Every prompt position must be computed to be scored.
        self.reads_prefix_cache: Final = sampling.prompt_logprobs is None
        self._hash()
        # ---- counters
        self.num_computed_tokens = 0
        self.num_placeholders = 0
        self.num_drafts = 0
        self.num_reserved_tokens = 0
        self.num_cached_tokens = 0
        self.cached_by_source: dict[str, int] | None = None
        self.num_preemptions = 0
        self.num_stale_output_tokens = 0
        self.num_prompt_scored = 1  # position 0 has nothing before it and is never scored
        # ---- where it stands
        self.key: tuple[float, ...] = ()
        self.constraints: tuple[Rule, ...] = ()
        self.decode_constraints: tuple[Rule, ...] = ()
        self.waits_for: set[str] = set()
        self.holds_blocks = False
        self.lost_blocks = False  # it had some once: what it finds now may be its own
        self.promised_tokens = 0
        self.promised_source = ""
        self.promised_shares: tuple[tuple[int, str], ...] = ()
        self.steady = False
        self.valid_from = NEVER
        self.last_seq = 0
        self.next_commit = block_size

    # ---- what readers may see ---------------------------------------------------------------

    @property
    def tokens(self) -> TokensView:
        """All known tokens, prompt first."""
        return TokensView(self._tokens)

    @property
    def prompt_tokens(self) -> TokensView:
        """The prompt."""
        return TokensView(self._tokens, 0, self.num_prompt_tokens)

    @property
    def output_tokens(self) -> TokensView:
        """What was generated so far."""
        return TokensView(self._tokens, self.num_prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        """Known tokens and the drafts that the next step may verify."""
        return self.num_tokens + self.num_drafts

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that exist, or will, and that no planned step computes."""
        return self.num_tokens + self.num_placeholders + self.num_drafts - self.num_computed_tokens

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the full blocks of known tokens."""
        return self._chain.hashes

    @property
    def finished(self) -> bool:
        """True once it ended."""
        return self.state is RequestState.FINISHED

    @property
    def lookup(self) -> LookupReason:
        """What finding its prefix counts as: tokens that it computed itself, or its sibling did, are no hits."""
        if self.lost_blocks:
            return LookupReason.RESUMED
        return LookupReason.SIBLING if self.source.sample_index else LookupReason.FRESH

    def known_tokens(self) -> tuple[int, ...]:
        """All known tokens as a value, for a message."""
        return tuple(self._tokens)

    # ---- changes: where it stands -----------------------------------------------------------

    def move(self, state: RequestState) -> None:
        """Change state; raises `RuntimeError` when the table in `base.types` does not allow it."""
        check_transition(self.state, state)
        self.state = state

    def obey(self, rules: Sequence[Rule]) -> None:
        """The rules that apply to it, for its whole life."""
        self.constraints = tuple(rules)
        self.decode_constraints = tuple(rule for rule in rules if rule.limits_decode)

    def rank(self, key: tuple[float, ...]) -> None:
        """Its place among all requests: given once, and kept through preemptions (SCH-30)."""
        self.key = key

    def wait_for(self, part: str) -> None:
        """Out of the queues until `part` has spoken; who waits for anybody is in no queue."""
        self.waits_for.add(part)

    def heard_from(self, part: str) -> None:
        """`part` has spoken. Raises `KeyError` when it was not waited for."""
        self.waits_for.remove(part)

    def run(self, slot: int, seq: int, now: float) -> None:
        """Admitted by step `seq`. It has a slot exactly while it is RUNNING; results from `seq` on are its own."""
        self.move(RequestState.RUNNING)
        self.slot = slot
        self.valid_from = seq
        if not self.times.scheduled_s:
            self.times.scheduled_s = now

    def leave_prompt(self) -> None:
        """All of its prompt is in a step: from here on it decodes, which is the hot path when no rule limits that."""
        self.steady = not self.decode_constraints

    def preempt(self, now: float) -> None:
        """Leave the running ones: results in flight become stale (SCH-30, SCH-31)."""
        self.move(RequestState.PREEMPTED)
        self.num_stale_output_tokens += self.num_placeholders
        self.num_placeholders = 0
        self.num_preemptions += 1
        self.times.preempted_s.append(now)
        self.slot = None
        self.valid_from = NEVER
        self.lose_blocks()

    def end(self, reason: FinishReason, now: float) -> None:
        """The last change of all: results in flight become stale, and its slot is another's."""
        self.move(RequestState.FINISHED)
        self.finish_reason = reason
        self.valid_from = NEVER
        self.times.finished_s = now
        self.slot = None

    # ---- changes: what a step computes ------------------------------------------------------

    def schedule(self, n: int, *, sample: int, drafts: int, seq: int) -> None:
        """Step `seq` computes its next `n` tokens, within what is reserved, the last `drafts` of them guesses, and
        samples `sample` (0 or 1)."""
        self.num_computed_tokens += n
        self.num_placeholders += sample
        self.num_drafts -= drafts
        self.last_seq = seq

    def schedule_next(self, seq: int) -> int | None:
        """`schedule` of one token that is sampled from, in a block that it has: the hot path. The position that it
        computes; None, and nothing changes, when that is not what comes next."""
        start = self.num_computed_tokens
        if not self.steady or start >= self.num_reserved_tokens or self.num_drafts:
            return None
        known = self.num_tokens + self.num_placeholders
        if known - start != 1 or (known >= self.max_total_tokens and self.num_placeholders):
            return None
        self.num_computed_tokens = start + 1
        self.num_placeholders += 1
        self.last_seq = seq
        return start

    def unschedule(self, start: int, *, sample: int, drafts: int) -> None:
        """The inverse of `schedule` from `start` (SCH-12); `last_seq` stays, since to wait longer is safe."""
        self.num_computed_tokens = start
        self.num_placeholders -= sample
        self.num_drafts += drafts

    def append(self, token: int) -> None:
        """A token came back: it is known now, and its block is hashed when it became full (REQ-2)."""
        self._tokens.append(token)
        self.num_tokens += 1
        if self.num_tokens >= self._next_hash:
            self._hash()

    def accept(self, token: int) -> None:
        """The one token that a step was to sample, the hot path: what was a placeholder is known, so their sum stays."""
        self._tokens.append(token)
        self.num_tokens += 1
        self.num_placeholders -= 1
        if self.num_tokens >= self._next_hash:
            self._hash()

    def resolve(self, num_rejected: int) -> None:
        """What a step sampled was appended: its placeholder goes, and rejected drafts count as not computed."""
        self.num_placeholders -= 1
        self.num_computed_tokens -= num_rejected

    def propose(self, num_drafts: int) -> None:
        """So many guesses may follow; one token is always sampled after them, and must still be wanted."""
        self.num_drafts = min(num_drafts, max(0, self.max_total_tokens - self.num_tokens - 1))

    def scored(self, num_tokens: int) -> None:
        """Scores of the first `num_tokens` prompt tokens were delivered; the count never falls, also when it starts over."""
        self.num_prompt_scored = num_tokens

    def note_first_token(self, now: float) -> None:
        """Its first output token came; a preemption does not bring another first one."""
        self.times.first_token_s = now

    def _hash(self) -> None:
        self._chain.extend(self._tokens)
        self._next_hash = (len(self._chain.hashes) + 1) * self._hash_size

    # ---- changes: its blocks ----------------------------------------------------------------

    def start_from(self, num_tokens: int) -> None:
        """The first `num_tokens` tokens need no computing: found in a cache, or loaded."""
        self.num_computed_tokens = num_tokens
        self.committed(num_tokens)

    def committed(self, num_tokens: int) -> None:
        """The first `num_tokens` tokens were offered to the prefix cache: ask again when the next block is full."""
        self.next_commit = (num_tokens // self._hash_size + 1) * self._hash_size

    def reserved(self, num_tokens: int) -> None:
        """Its blocks have room for `num_tokens` tokens at least: round up to what a block holds."""
        size = self._hash_size
        self.num_reserved_tokens = -(-num_tokens // size) * size
        self.holds_blocks = True

    def unreserve(self, num_tokens: int) -> None:
        """The last `reserved` was cancelled: there is room for `num_tokens` as before it; 0: it holds none."""
        self.num_reserved_tokens = num_tokens
        self.holds_blocks = num_tokens > 0

    def promise(self, num_tokens: int, source: str = "", shares: tuple[tuple[int, str], ...] = ()) -> None:
        """A part is to bring its prefix up to there (0: nothing is owed any more); `source` and `shares` as in
        `seams.Match`. Only blocks that it holds can be filled: who loses them is promised nothing."""
        self.promised_tokens = num_tokens
        self.promised_source = source
        self.promised_shares = shares

    def note_cached(
        self, local_tokens: int, source: str, source_tokens: int, shares: Sequence[tuple[int, str]] = ()
    ) -> None:
        """What the first admission found; a resumed request's own tokens are no hit (REQ-3). `shares`: see
        `seams.Match`; what is beyond them is the source's."""
        if self.num_preemptions or not local_tokens + source_tokens:
            return
        at, total = local_tokens, local_tokens + source_tokens
        self.num_cached_tokens = total
        found = {"device": local_tokens}
        for end, name in (*shares, (total, source or "external")):
            found[name] = found.get(name, 0) + max(0, min(end, total) - at)
            at = max(at, min(end, total))
        self.cached_by_source = {name: n for name, n in found.items() if n}

    def lose_blocks(self) -> None:
        """Nothing of it is in KV memory any more: compute again from the start, or from a hit."""
        self.start_from(0)
        self.num_reserved_tokens = 0
        self.num_drafts = 0
        self.lost_blocks = self.lost_blocks or self.holds_blocks
        self.holds_blocks = False
        self.promised_tokens = 0
        self.steady = False

    def check(self) -> None:
        """Raise `RuntimeError` when a counter broke its invariant (REQ-3)."""
        ahead = self.num_computed_tokens - self.num_tokens - self.num_placeholders
        faults = (
            ("num_tokens", self.num_tokens != len(self._tokens)),
            ("block_hashes", len(self._chain.hashes) != self.num_tokens // self._hash_size),
            ("num_placeholders", self.num_placeholders < 0),
            ("num_computed_tokens", self.num_computed_tokens < 0 or (self.num_placeholders == 0 and ahead > 0)),
            ("num_reserved_tokens", self.slot is not None and self.num_computed_tokens > self.num_reserved_tokens),
            ("slot", (self.slot is not None) != (self.state is RequestState.RUNNING)),
            ("max_total_tokens", self.num_tokens > self.max_total_tokens),
            (
                "num_cached_tokens",
                not sum((self.cached_by_source or {}).values()) <= self.num_cached_tokens <= self.num_tokens,
            ),
            ("num_preemptions", self.num_preemptions != len(self.times.preempted_s)),
            ("num_stale_output_tokens", self.num_stale_output_tokens < 0),
        )
        for name, broken in faults:
            if broken:
                raise RuntimeError(f"request {self.request_id}: {name} breaks its invariant ({self!r})")

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.state.name}, tokens={self.num_tokens}+{self.num_placeholders}, "
            f"computed={self.num_computed_tokens}/{self.num_reserved_tokens}, slot={self.slot})"
        )
