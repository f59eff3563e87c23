"""Who gets a request: what a server's cache holds of the prompt, weighed against what it has to do.

Promises: a pure function; where nothing is known of caches it is the least load, in turns.
Does not know: servers, health, or requests.
"""

from collections.abc import Sequence

import msgspec


class Candidate(msgspec.Struct, frozen=True):
    """A server that could be chosen."""

    held_tokens: int  # at the start of the prompt, known to be in its cache
    in_flight: int  # requests of ours under way there


def best(candidates: Sequence[Candidate], *, load_weight: int, turn: int = 0) -> int | None:
    """The place of the one to choose; None when there is none.

    A request under way counts as `load_weight` tokens more to compute. Of equals the one with fewer requests is
    chosen, then the next in turn.
    """
    if not candidates:
        return None
    count = len(candidates)

    def cost(place: int) -> tuple[int, int, int]:
        one = candidates[place]
        return load_weight * one.in_flight - one.held_tokens, one.in_flight, (place - turn) % count

    return min(range(count), key=cost)
