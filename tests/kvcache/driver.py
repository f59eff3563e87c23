"""A small world around the manager: requests, a memory that remembers what was written, and every promise checked.

Each position of a request has an id that names the whole prefix up to it (and the salt). Computing a
position writes its id to the block slot that the table names, after checking that every key the query
would see holds the right id. So a wrong hit, a block owned twice, a block reused too early or a window
cut too short shows as a wrong id.
"""

from dataclasses import dataclass, field
from typing import Any

from octavo.base.kvspec import FullAttentionSpec, KVGroup, KVLayout, KVSpec, SlidingWindowSpec
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.kvcache.hashing import HashChain, make_hasher
from octavo.kvcache.manager import KVCacheManager, PrefixHit, Reservation

MAX_LEN = 64
MAX_BATCHED = 12


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=8, dtype="float32")


def window(tokens: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_dim=8, dtype="float32", window=tokens)


def layout(num_blocks: int, *specs: KVSpec) -> KVLayout:
    groups = tuple(KVGroup(index=i, spec=s, layers=(i,)) for i, s in enumerate(specs))
    return KVLayout(groups=groups, places=(), num_blocks=num_blocks, block_bytes=1, total_bytes=num_blocks)


def manager(num_blocks: int, *specs: KVSpec, **options: Any) -> KVCacheManager:
    options = {
        "hasher_block_size": 4,
        "enable_prefix_caching": True,
        "watermark_blocks": 0,
        "max_model_len": MAX_LEN,
        "max_batched_tokens": MAX_BATCHED,
    } | options
    return KVCacheManager(layout(num_blocks, *(specs or (full(),))), **options)


@dataclass
class Req:
    """A request by shape, with what the world knows of it."""

    request_id: str
    tokens: list[int]
    salt: str | None = None
    reads_prefix_cache: bool = True
    num_computed_tokens: int = 0
    certain: int = 0
    hash_size: int = 4
    ids: list[int] = field(default_factory=list)
    weights: int = 0  # which weights computed its KV

    def __post_init__(self) -> None:
        message = EngineRequest(
            request_id=self.request_id, prompt_token_ids=(), sampling=SamplingParams(), cache_salt=self.salt
        )
        self.chain = HashChain(make_hasher("sha256"), self.hash_size, message)
        self.grow()

    def grow(self, *tokens: int) -> None:
        self.tokens.extend(tokens)
        self.chain.extend(self.tokens)
        while len(self.ids) < len(self.tokens):
            before = self.ids[-1] if self.ids else hash((self.salt, self.weights))
            self.ids.append(hash((before, self.tokens[len(self.ids)])))

    def restart(self, weights: int) -> None:
        """Computed anew, perhaps with other weights."""
        self.weights, self.ids = weights, []
        self.grow()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[Any]:
        return self.chain.hashes


def snapshot(kv: KVCacheManager) -> tuple[Any, ...]:
    """Everything that a cancelled reservation must leave as it was."""
    tables = {
        i: (
            [list(r) for r in t.blocks],
            list(t.passed),
            list(t.nulls),
            list(t.committed),
            t.capacity,
            t.commit_at,
            t.owed,
        )
        for i, t in kv._tables.items()
    }
    index = {k: (set(v) if isinstance(v, set) else v) for k, v in kv._index._blocks.items()}
    stats = kv.stats()
    return kv._pool.plain(), kv._pool.kept(), kv._pool.free_order(), kv._index.items(), index, tables, stats, kv._owed


class World:
    """Requests around one manager; every method is one thing a scheduler may do."""

    def __init__(self, num_blocks: int, specs: tuple[KVSpec, ...], *, watermark: int = 0, caching: bool = True) -> None:
        self.specs = specs
        self.kv = manager(
            num_blocks, *specs, watermark_blocks=watermark, enable_prefix_caching=caching, record_events=True
        )
        self.watermark = watermark
        self.caching = caching
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.memory: dict[int, dict[int, int]] = {}  # block -> slot -> id
        self.fenced: list[tuple[int, list[tuple[int, int]]]] = []  # late writes of steps in flight
        self.findable: set[tuple[int, bytes]] = set()
        self.weights = 0
        self.seq = 0
        self.retired = 0
        self.count = 0
        self.hit_tokens = 0
        self.admitted = 0
        self.cancelled = 0
        self.preempted = 0

    # ---- what a scheduler does ---------------------------------------------------------------

    def arrive(self, tokens: list[int], salt: str | None = None, reads: bool = True) -> None:
        self.count += 1
        self.waiting.append(Req(f"r{self.count}", list(tokens), salt, reads))

    def match(self, req: Req) -> PrefixHit:
        req.restart(self.weights)
        before = snapshot(self.kv)
        hit = self.kv.match(req)
        assert snapshot(self.kv) == before
        assert hit.num_tokens < max(1, req.num_tokens)
        if not req.reads_prefix_cache or not self.caching:
            assert hit.num_tokens == 0
        for spec, row in zip(self.specs, hit.blocks, strict=True):
            assert len(row) * spec.block_size == hit.num_tokens
            self.check_keys(req, spec, row, hit.num_tokens)
        return hit

    def admit(self, chunk: int, external: int, cancel: bool) -> bool:
        """The head of waiting gets blocks, and computes `chunk` tokens; True when it was admitted."""
        if not self.waiting:
            return False
        req = self.waiting[0]
        hit = self.match(req)
        external = min(external, req.num_tokens - 1 - hit.num_tokens)
        start = hit.num_tokens + external
        chunk = min(chunk, req.num_tokens - start)
        before = snapshot(self.kv)
        beside = bool(self.running)
        res = self.kv.reserve(req, chunk, hit=hit, external_tokens=external, admission=True, beside_others=beside)
        self.kv.check()
        if res is None:
            assert snapshot(self.kv) == before
            assert beside or self.fenced, "a request alone that fits the layout was refused"
            return False
        assert self.kv.num_free_blocks >= (self.watermark if beside else 0)
        if cancel:
            self.undo(res, before)
            return False
        self.waiting.pop(0)
        self.running.append(req)
        self.admitted += 1
        self.hit_tokens += hit.num_tokens
        req.num_computed_tokens = hit.num_tokens
        self.load(req, external)
        self.compute(req, chunk)
        return True

    def advance(self, which: int, chunk: int, lookahead: int, cancel: bool) -> bool:
        """A running request computes up to `chunk` tokens, or decodes one; False when there was no room."""
        if not self.running:
            return True
        req = self.running[which % len(self.running)]
        if req.num_computed_tokens >= req.num_tokens:
            if req.num_tokens >= MAX_LEN:
                return True
            req.grow((req.tokens[-1] * 7 + 1) % 5)
        n = min(chunk, req.num_tokens - req.num_computed_tokens)
        self.kv.reserve(req, 0)  # lets windows pass, which is not part of what a reservation takes
        before = snapshot(self.kv)
        res = self.kv.reserve(req, n, lookahead_tokens=lookahead)
        self.kv.check()
        if res is None:
            assert snapshot(self.kv) == before
            total = min(req.num_computed_tokens + n + lookahead, MAX_LEN)
            rows = self.kv.blocks(req.request_id)
            need = sum(-(-total // s.block_size) - len(r) for s, r in zip(self.specs, rows, strict=True))
            assert need > self.kv.num_free_blocks
            return False
        if cancel:
            self.undo(res, before)
            return True
        self.compute(req, n)
        return True

    def undo(self, res: Reservation, before: tuple[Any, ...]) -> None:
        self.kv.cancel(res)
        self.cancelled += 1
        assert snapshot(self.kv) == before
        self.kv.check()

    def plan(self, chunks: list[int], order: list[int], admit: bool) -> None:
        """A plan that comes to nothing: several requests reserve, then all are cancelled, in any order."""
        for req in self.running:
            self.kv.reserve(req, 0)
        before = snapshot(self.kv)
        taken: list[Reservation] = []
        if admit and self.waiting:
            hit = self.match(self.waiting[0])
            res = self.kv.reserve(self.waiting[0], 1, hit=hit)
            taken += [] if res is None else [res]
        for req, chunk in zip(self.running, chunks, strict=False):
            n = min(chunk, MAX_LEN - req.num_computed_tokens)
            res = self.kv.reserve(req, n)
            taken += [] if res is None else [res]
        self.kv.check()
        if not order:
            taken.reverse()
        left = sorted(range(len(taken)), key=lambda i: order[i % len(order)] if order else i)
        for i in left:
            self.kv.cancel(taken[i])
            self.cancelled += 1
            self.kv.check()
        after = snapshot(self.kv)
        if not order:
            assert after == before
        else:  # the same blocks are free and findable; their order may differ
            assert after[3:] == before[3:]
            assert sorted(after[2]) == sorted(before[2])

    def commit(self, which: int, back: int) -> None:
        """A step's result came: all but `back` computed tokens are certain."""
        if not self.running:
            return
        req = self.running[which % len(self.running)]
        req.certain = max(req.certain, req.num_computed_tokens - back)
        first, hashes = self.kv.commit(req, req.certain)
        assert list(hashes) == req.block_hashes[first : first + len(hashes)]
        assert (first + len(hashes)) * req.hash_size <= req.certain or not hashes
        self.kv.check()

    def leave(self, which: int, fenced: bool, preempt: bool) -> None:
        """A request ends, or is preempted and waits again under the same id."""
        if not self.running:
            return
        req = self.running.pop(which % len(self.running))
        rows = self.kv.blocks(req.request_id)
        after = self.seq if fenced else None
        self.kv.release(req.request_id, after=after)
        assert self.kv.blocks(req.request_id) == tuple(() for _ in self.specs)
        if fenced and self.seq > self.retired:
            last = req.num_computed_tokens - 1
            late = [(row[last // s.block_size], last % s.block_size) for s, row in zip(self.specs, rows, strict=True)]
            self.fenced.append((self.seq, [(b, slot) for b, slot in late if b not in self.kv._index]))
        if preempt:
            self.preempted += 1
            req.num_computed_tokens = req.certain = 0
            self.waiting.insert(0, req)
        self.kv.check()

    def retire(self) -> None:
        """All steps so far are processed; until now their writes could still land in fenced blocks."""
        for _, late in self.fenced:
            for block, slot in late:
                if block:
                    self.memory.setdefault(block, {})[slot] = -1
        self.fenced = []
        self.retired = self.seq
        self.kv.retire(self.seq)
        self.kv.check()

    def reset(self) -> None:
        """New weights: nothing computed with the old ones may be hit, now or later."""
        self.weights += 1
        assert self.kv.reset_prefix_cache()
        assert self.kv.stats().num_cached_blocks == 0
        self.kv.check()

    def read_events(self) -> None:
        """Whoever follows the events knows exactly what can be found."""
        for event in self.kv.take_events():
            if event.kind == "cleared":
                self.findable.clear()
            elif event.kind == "stored":
                self.findable.add((event.group, event.block_hash))
            else:
                self.findable.remove((event.group, event.block_hash))
        assert self.findable == {(int.from_bytes(k[-4:], "big"), k[:-4]) for k in self.kv._index.items().values()}

    def finish(self) -> None:
        """Everybody leaves: nothing may be missing."""
        while self.running:
            self.leave(0, fenced=False, preempt=False)
        self.retire()
        assert self.kv.num_free_blocks == self.kv.num_total_blocks
        assert self.kv.usage == 0.0
        self.read_events()

    # ---- the memory --------------------------------------------------------------------------

    def load(self, req: Req, external: int) -> None:
        """Another tier brings the KV of `external` positions."""
        for position in range(req.num_computed_tokens, req.num_computed_tokens + external):
            self.write(req, position)
        req.num_computed_tokens += external

    def compute(self, req: Req, n: int) -> None:
        self.seq += 1
        start = req.num_computed_tokens
        rows = self.kv.blocks(req.request_id)
        for spec, row in zip(self.specs, rows, strict=True):
            assert len(row) * spec.block_size >= start + n
            self.check_keys(req, spec, row, start)
        for position in range(start, start + n):
            self.write(req, position)
        req.num_computed_tokens += n

    def write(self, req: Req, position: int) -> None:
        for spec, row in zip(self.specs, self.kv.blocks(req.request_id), strict=True):
            block = row[position // spec.block_size]
            if block:
                self.memory.setdefault(block, {})[position % spec.block_size] = req.ids[position]
            else:
                assert isinstance(spec, SlidingWindowSpec), "a null block stands where a key must be written"

    def check_keys(self, req: Req, spec: KVSpec, row: tuple[int, ...], num_tokens: int) -> None:
        """The next query, at position `num_tokens`, finds every key it sees."""
        first = max(0, num_tokens - spec.window + 1) if isinstance(spec, SlidingWindowSpec) else 0
        for position in range(first, num_tokens):
            block = row[position // spec.block_size]
            assert block, f"position {position} is needed and its block is gone"
            assert self.memory[block][position % spec.block_size] == req.ids[position]
