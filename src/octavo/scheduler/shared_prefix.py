"""Requests whose prompts begin alike wait for the one that computes that beginning.

Promises: a long shared beginning (a system prompt, a document) is computed once although many requests with it arrive
at the same moment; who shares only a little never waits; nobody waits for a request that does not run.
Does not know: the blocks, or whether a beginning is cached already: who waits is looked up afterwards like anybody.

Without this, prompts that are computed side by side in chunks would all compute the same tokens, since blocks become
findable only when their step was applied.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from octavo.base.types import RequestState
from octavo.kvcache.hashing import BlockHash
from octavo.scheduler.draft import StepDraft
from octavo.scheduler.request import Request

LEAST_TOKENS: Final = 256  # a shorter beginning is computed twice sooner than waited for


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

    def admits(self, req: Request, draft: StepDraft) -> bool:
        """False while the beginning that it shares with a running request is being computed."""
        others = self._computing.get(self._key(req))
        if not others:
            return True
        others[:] = [other for other in others if self._computes(other)]
        return all(other is req or self._done(other) >= self._shared(req, other) for other in others)

    def cap(self, req: Request, n: int, draft: StepDraft) -> int:
        """No limit once admitted."""
        return n

    def commit(self, req: Request, n: int, draft: StepDraft) -> None:
        """It computes a part of its prompt: others with the same beginning may follow it."""
        others = self._computing.setdefault(self._key(req), [])
        if req not in others:
            others.append(req)
        self._agree.pop(req.request_id, None)

    def undo(self, req: Request, draft: StepDraft) -> None:
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

    def _computes(self, req: Request) -> bool:
        return req.state is RequestState.RUNNING and self._done(req) < req.num_prompt_tokens - self._block_size

    def _done(self, req: Request) -> int:
        """Tokens whose blocks can be found."""
        return req.next_commit - self._block_size

    def _shared(self, req: Request, other: Request) -> int:
        """Tokens of whole blocks on which both agree. Hashes are chained: the first that differs ends it."""
        known = self._agree.get(req.request_id)
        if known is None or known[0] is not other:
            known = (other, _agreement(req.block_hashes, other.block_hashes) * self._block_size)
            self._agree[req.request_id] = known
        return known[1]


def _agreement(a: Sequence[BlockHash], b: Sequence[BlockHash]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
