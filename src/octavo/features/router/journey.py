"""The way of one request over servers: prefill, then decode; whole where that does not work out.

Promises: no server is tried twice for the same purpose; a request ends after a bounded number of failures; where
nobody can compute the prompt apart, or nobody can go on from it, one server answers the whole request.
Does not know: HTTP, or how a server is chosen.

Only failures before the client was sent anything come here: after that there is no other way (`may_retry`).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

MAX_FAILURES = 4  # a request that ends its servers must not end all of them
RETRIED_STATUS = frozenset({502, 503, 504})


class Leg(StrEnum):
    """What a server is asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


class Failure(StrEnum):
    """Why a server gave no answer."""

    CONNECT = "connect"  # nobody is there
    LOST = "lost"  # the connection ended before the answer began
    SLOW = "slow"  # no byte in time
    GIVEN_UP = "given_up"  # its checks failed meanwhile
    STATUS = "status"  # 502, 503 or 504
    MALFORMED = "malformed"  # not what such a server answers


_KEEPS_OUT = frozenset({Failure.CONNECT, Failure.SLOW, Failure.GIVEN_UP})  # not to be tried for another purpose either


def may_retry(failure: Failure | int, *, begun: bool) -> bool:
    """Whether another server may be asked after this failure, or this status of an answer."""
    return not begun and (failure in RETRIED_STATUS if isinstance(failure, int) else True)


Pick = Callable[[Leg, frozenset[str]], str | None]  # purpose, names to leave out -> the name of the chosen server


class Journey:
    """One request's way. Ask `next`, then tell `prefilled` or `failed`.

    Owns: the leg, who was tried for what, and the parameters of the hand-over.
    """

    def __init__(self, pick: Pick, *, disagg: bool) -> None:
        self._pick = pick
        self.leg = Leg.PREFILL if disagg else Leg.WHOLE
        self.params: Mapping[str, Any] | None = None
        self.fell_back_from: Leg | None = (
            None  # set once the request goes whole although it should have been handed over
        )
        self.num_failures = 0
        self._tried: dict[Leg, set[str]] = {leg: set() for leg in Leg}
        self._out: set[str] = set()
        self._at = ""

    def next(self) -> tuple[Leg, str] | None:
        """Whom to ask for what; None when nobody is left."""
        while self.num_failures < MAX_FAILURES:
            name = self._pick(self.leg, frozenset(self._tried[self.leg] | self._out))
            if name is not None:
                self._tried[self.leg].add(name)
                self._at = name
                return self.leg, name
            if self.leg is Leg.WHOLE:
                return None
            self._go_whole()
        return None

    def prefilled(self, params: Mapping[str, Any] | None) -> None:
        """The prompt is computed; `params` say where its KV is, None that nothing is kept."""
        if params is None:
            self._go_whole()
        else:
            self.leg, self.params = Leg.DECODE, params

    def failed(self, failure: Failure) -> None:
        """The server that `next` named gave no answer."""
        self.num_failures += 1
        if failure in _KEEPS_OUT:
            self._out.add(self._at)

    def _go_whole(self) -> None:
        self.fell_back_from = self.leg
        self.leg, self.params = Leg.WHOLE, None
