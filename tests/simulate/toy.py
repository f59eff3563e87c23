"""A toy model and a worker that follows plans to the letter.

The next token is a hash of all tokens so far. What the worker writes as "KV" of position p is the hash of tokens
0 .. p; before each row it reads every position that attention would read, and raises `Broken` when a block holds
anything else. So a block that was reused too early, shared wrongly or never written is seen at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.base.kvspec import KVLayout, SlidingWindowSpec
from octavo.base.requests import EngineRequest
from octavo.base.step import (
    LogprobArrays,
    NewRow,
    PromptLogprobs,
    Ragged,
    ResultPart,
    RowError,
    StepPlan,
    StepResult,
    ragged,
)

VOCAB = 50
EOS = 7
START = 1469598103934665603


class Broken(AssertionError):
    """The plan and the memory do not agree."""


def extend(chain: list[int], tokens: Sequence[int]) -> None:
    """Make `chain[p]` the hash of tokens 0 .. p, for all tokens."""
    last = chain[-1] if chain else START
    for token in tokens[len(chain) :]:
        last = ((last ^ (token + 1)) * 1099511628211 + 12345) % (1 << 61)
        chain.append(last)


def next_token(chain_value: int) -> int:
    return (chain_value >> 7) % VOCAB


def run_alone(req: EngineRequest, max_model_len: int) -> tuple[list[int], str]:
    """What the toy model answers when nobody else is there: output tokens and the finish reason."""
    tokens, chain = list(req.prompt_token_ids), []
    params = req.sampling
    assert params.max_tokens is not None
    end = min(len(tokens) + params.max_tokens, max_model_len)
    first = len(tokens)
    while len(tokens) < end:
        extend(chain, tokens)
        tokens.append(next_token(chain[-1]))
        stops = tokens[-1] in params.stop_token_ids or (tokens[-1] in req.eos_token_ids and not params.ignore_eos)
        if stops and len(tokens) - first >= params.min_tokens:
            return tokens[first:], "stop"
    return tokens[first:], "length"


@dataclass
class SlotState:
    """The worker's own record of one request."""

    row: NewRow
    tokens: list[int]
    tables: list[list[int]]
    computed: int
    chain: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    poisoned: bool = False  # its KV is known to be wrong: the scheduler must drop what comes of it


class Memory:
    """Fake KV memory: block -> what its positions hold."""

    def __init__(self, layout: KVLayout) -> None:
        self.block_sizes = [group.spec.block_size for group in layout.groups]
        self.windows = [g.spec.window if isinstance(g.spec, SlidingWindowSpec) else None for g in layout.groups]
        self.blocks = [[0] * max(self.block_sizes) for _ in range(layout.num_blocks)]

    def write(self, tables: Sequence[Sequence[int]], start: int, values: Sequence[int]) -> None:
        """KV of positions `start ..` in every group; the null block swallows what nobody will read."""
        for table, size in zip(tables, self.block_sizes, strict=True):
            for i, value in enumerate(values):
                index = (start + i) // size
                if index >= len(table):
                    raise Broken(f"position {start + i} has no block: table {table}")
                if table[index]:
                    self.blocks[table[index]][(start + i) % size] = value

    def verify(self, tables: Sequence[Sequence[int]], chain: Sequence[int], start: int) -> None:
        """What a query at `start` and later reads must be what was computed for these very tokens."""
        for group, (table, size) in enumerate(zip(tables, self.block_sizes, strict=True)):
            window = self.windows[group]
            first = 0 if window is None else max(0, start - window + 1)
            for index in range(first // size, -(-start // size)):
                low, high = max(first, index * size), min(start, (index + 1) * size)
                held = self.blocks[table[index]][low - index * size : high - index * size]
                if held != chain[low:high] or not table[index]:
                    raise Broken(
                        f"group {group}, positions {low}..{high - 1}: block {table[index]} holds other content"
                    )


class ToyWorker:
    """Applies plans in order. `draft_len` > 0 makes it propose drafts, every third of them wrong."""

    def __init__(self, layout: KVLayout, *, num_slots: int, draft_len: int = 0) -> None:
        self.memory = Memory(layout)
        self.num_slots = num_slots
        self.draft_len = draft_len
        self.slots: dict[int, SlotState] = {}
        self.fail_next: set[str] = set()  # request ids whose next row fails
        self.last_seq = 0

    def run(self, plan: StepPlan, poisoned: frozenset[str] = frozenset(), parts: tuple[ResultPart, ...] = ()) -> StepResult:  # fmt: skip
        """Compute one step."""
        if plan.seq != self.last_seq + 1:
            raise Broken(f"step {plan.seq} follows step {self.last_seq}")
        self.last_seq = plan.seq
        self._enter(plan)
        batch = plan.batch
        if len(set(batch.slots.tolist())) != batch.num_rows:
            raise Broken("a slot is in the batch twice")
        sampled: list[list[int]] = []
        drafts: list[list[int]] = []
        errors: list[RowError] = []
        scores: list[PromptLogprobs] = []
        for row in range(batch.num_rows):
            state = self.slots[int(batch.slots[row])]
            state.poisoned |= state.row.request_id in poisoned
            for group, table in enumerate(state.tables):
                table.extend(batch.new_blocks[group].row(row).tolist())
            tokens = self._row(state, row, plan, scores)
            if state.row.request_id in self.fail_next:
                self.fail_next.discard(state.row.request_id)
                errors.append(RowError(row, "injected"))
                tokens = []
            sampled.append(tokens)
            drafts.append(self._propose(state) if tokens else [])
        return StepResult(
            seq=plan.seq,
            tokens=ragged(sampled),
            logprobs=self._logprobs(plan, sampled),
            prompt_logprobs=tuple(scores),
            drafts=ragged(drafts) if self.draft_len else None,
            errors=tuple(errors),
            parts=parts,
        )

    def _enter(self, plan: StepPlan) -> None:
        for slot in (*plan.finished, *plan.preempted):
            if self.slots.pop(slot, None) is None:
                raise Broken(f"slot {slot} was dropped, but holds nothing")
        for new in plan.batch.new:
            if new.slot in self.slots or not 0 <= new.slot < self.num_slots:
                raise Broken(f"slot {new.slot} cannot be entered")
            row = plan.batch.slots.tolist().index(new.slot)
            tables: list[list[int]] = [[] for _ in self.memory.block_sizes]
            self.slots[new.slot] = SlotState(new, list(new.tokens), tables, int(plan.batch.num_computed_tokens[row]))

    def _row(self, state: SlotState, row: int, plan: StepPlan, scores: list[PromptLogprobs]) -> list[int]:
        batch = plan.batch
        start, count = int(batch.num_computed_tokens[row]), int(batch.num_scheduled_tokens[row])
        samples, num_drafts = int(batch.num_sampled_tokens[row]), int(batch.num_draft_tokens[row])
        if start != state.computed or count <= 0:
            raise Broken(f"row starts at {start}, but {state.computed} are computed")
        known = len(state.tokens)
        if start + count - num_drafts > known or (samples and start + count - num_drafts != known):
            raise Broken(f"row ends at {start + count} of {known} known tokens, {num_drafts} drafts")
        guesses = state.proposed[:num_drafts]
        if len(guesses) != num_drafts:
            raise Broken("more drafts are to be verified than were proposed")
        state.proposed = []
        del state.chain[known:]
        extend(state.chain, state.tokens)
        if not state.poisoned:
            self.memory.verify(state.tables, state.chain, start)
        if state.row.sampling.prompt_logprobs is not None:
            scores.extend(self._score(state, start, count))
        guessed = state.chain[:known]
        extend(guessed, state.tokens + guesses)
        self.memory.write(state.tables, start, guessed[start : start + count])
        state.computed = start + count
        if not samples:
            return []
        tokens = [next_token(guessed[known - 1])]
        for i, guess in enumerate(guesses):
            if guess != tokens[-1]:
                break
            tokens.append(next_token(guessed[known + i]))
        state.tokens.extend(tokens)
        state.computed = start + count - num_drafts + len(tokens) - 1
        return tokens

    def _score(self, state: SlotState, start: int, count: int) -> list[PromptLogprobs]:
        stop = min(start + count + 1, state.row.num_prompt_tokens)
        positions = list(range(start + 1, stop))
        if not positions:
            return []
        ids = np.array([[state.tokens[p]] for p in positions], dtype=np.int32)
        values = np.array([[-float(state.chain[p - 1] % 100)] for p in positions], dtype=np.float32)
        return [PromptLogprobs(state.row.slot, start + 1, ids, values, np.ones(len(positions), dtype=np.int32))]

    def _propose(self, state: SlotState) -> list[int]:
        extend(state.chain, state.tokens)
        guessed, drafts = list(state.chain), list(state.tokens)
        for i in range(self.draft_len):
            wrong = (guessed[-1] + i) % 3 == 0
            drafts.append((next_token(guessed[-1]) + wrong) % VOCAB)
            extend(guessed, drafts)
        state.proposed = drafts[len(state.tokens) :]
        return state.proposed

    def _logprobs(self, plan: StepPlan, sampled: list[list[int]]) -> LogprobArrays | None:
        rows = [self.slots[int(slot)] for slot in plan.batch.slots]
        if all(state.row.sampling.logprobs is None for state in rows):
            return None
        width = [
            0 if s.row.sampling.logprobs is None else 1 for s, tokens in zip(rows, sampled, strict=True) for _ in tokens
        ]
        ids = np.array([[t] for tokens in sampled for t in tokens], dtype=np.int32).reshape(len(width), 1)
        return LogprobArrays(ids, -ids.astype(np.float32), np.ones(len(width), dtype=np.int32), np.array(width, dtype=np.int32))  # fmt: skip


def rows_of(table: Ragged) -> list[list[int]]:
    """All rows as lists."""
    return [table.row(i).tolist() for i in range(len(table))]
