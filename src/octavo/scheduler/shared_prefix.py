"""Requests whose prompts begin alike wait for the one that computes that beginning.

Promises: a long shared beginning (a system prompt, a document) is computed once although many requests with it arrive
at the same moment; who shares only a little never waits; nobody waits for a request that does not run.
Does not know: the blocks, or whether a beginning is cached already: who waits is looked up afterwards like anybody.

Without this, prompts that are computed side by side in chunks would all compute the same tokens, since blocks become
findable only when their step was applied.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from octavo.base.types import RequestState
from octavo.kvcache.hashing import BlockHash
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.request import Request
from octavo.scheduler.seams import Wait

LEAST_TOKENS: Final = 256  # a shorter beginning is computed twice sooner than waited for


class _Behind(NamedTuple):
    """Waiting for the first `num_tokens` tokens of another request's prompt."""

    other: Request
    num_tokens: int
    block_size: int

    def over(self) -> bool:
        """They can be found, or it does not compute them any more."""
        return not computes(self.other, self.block_size) or done(self.other, self.block_size) >= self.num_tokens


def computes(req: Request, block_size: int) -> bool:
    """It runs, and more of its prompt is to come."""
    return req.state is RequestState.RUNNING and done(req, block_size) < req.num_prompt_tokens - block_size


def done(req: Request, block_size: int) -> int:
    """Tokens whose blocks can be found."""
    return req.next_commit - block_size


class SharedPrefix:
    """A waiting request is passed over while a running one computes a beginning that both have.

    Owns: who computes which beginning (by the hash of its first `LEAST_TOKENS` tokens), and how far pairs agree.
    """

    rank = 1
    limits_decode = False

    def __init__(self, block_size: int, least_tokens: int = LEAST_TOKENS) -> None:
        self._block_size = block_size
        self._least_blocks = -(-least_tokens // block_size)
        self._computing: dict[BlockHash, list[Request]] = {}
        self._agree: dict[str, tuple[Request, int]] = {}  # waiting request -> (the one it was compared to, tokens)

    def applies(self, req: Request) -> bool:
        """To prompts that are long enough and may read the prefix cache."""
        return req.reads_prefix_cache and len(req.block_hashes) >= self._least_blocks

    def wait(self, req: Request) -> Wait | None:
        """The beginning that it shares with a running request, while that is being computed."""
        others = self._computing.get(self._key(req))
        if not others:
            return None
        size = self._block_size
        others[:] = [other for other in others if computes(other, size)]
        for other in others:
            if other is not req and done(other, size) < (shared := self._shared(req, other)):
                return _Behind(other, shared, size)
        return None

    def crowd(self, req: Request) -> BlockHash | None:
        """Those who begin alike: one of them computes the beginning."""
        return self._key(req)

    def admits(self, req: Request, builder: PlanBuilder) -> bool:
        """Those who are held are not asked."""
        return True

    def cap(self, req: Request, n: int, builder: PlanBuilder) -> int:
        """No limit once admitted."""
        return n

    def commit(self, req: Request, n: int, builder: PlanBuilder) -> None:
        """It computes a part of its prompt: others with the same beginning may follow it."""
        others = self._computing.setdefault(self._key(req), [])
        if req not in others:
            others.append(req)
        self._agree.pop(req.request_id, None)

    def undo(self, req: Request, builder: PlanBuilder) -> None:
        """Nothing to give back: who does not run is not waited for."""

    def forget(self, req: Request) -> None:
        """The request ended."""
        self._agree.pop(req.request_id, None)
        others = self._computing.get(self._key(req))
        if others is not None and req in others:
            others.remove(req)
            if not others:
                del self._computing[self._key(req)]

    def _key(self, req: Request) -> BlockHash:
        return req.block_hashes[self._least_blocks - 1]

    def _shared(self, req: Request, other: Request) -> int:
        """Tokens of whole blocks on which both agree. Hashes are chained: the first that differs ends it."""
        known = self._agree.get(req.request_id)
        if known is None or known[0] is not other:
            known = (other, _agreement(req.block_hashes, other.block_hashes) * self._block_size)
            self._agree[req.request_id] = known
        return known[1]


def _agreement(a: Sequence[BlockHash], b: Sequence[BlockHash]) -> int:
    """How many hashes are equal from the start: each hashes what is before it too, so halving finds the first that differs."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle - 1] == b[middle - 1] else (low, middle - 1)
    return low
