"""Ids, enums and the state machine of a request.

Promises: one definition of each state and reason, and one table of legal transitions.
Does not know: how anything is stored, scheduled or sent.
"""

from enum import IntEnum, StrEnum
from typing import Final


class RequestState(IntEnum):
    """Where a request stands. Ordered: everything before RUNNING waits (REQ-4)."""

    NEW = 0
    WAITING = 1
    WAITING_GRAMMAR = 2
    WAITING_KV = 3
    WAITING_INPUT = 4
    PREEMPTED = 5
    RUNNING = 6
    FINISHED = 7


_S = RequestState
_PARKED: Final = frozenset({_S.WAITING_GRAMMAR, _S.WAITING_KV, _S.WAITING_INPUT})
TRANSITIONS: Final[dict[RequestState, frozenset[RequestState]]] = {
    _S.NEW: frozenset({_S.WAITING, _S.FINISHED}) | _PARKED,
    _S.WAITING: frozenset({_S.RUNNING, _S.FINISHED}) | _PARKED,
    _S.WAITING_GRAMMAR: frozenset({_S.WAITING, _S.FINISHED}),
    _S.WAITING_KV: frozenset({_S.WAITING, _S.FINISHED}),
    _S.WAITING_INPUT: frozenset({_S.WAITING, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.WAITING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.WAITING_INPUT, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}


def check_transition(old: RequestState, new: RequestState) -> None:
    """Raise `RuntimeError` when a request may not go from `old` to `new`."""
    if new not in TRANSITIONS[old]:
        raise RuntimeError(f"illegal request transition {old.name} -> {new.name}")


class FinishReason(StrEnum):
    """Why a request ended: data on the one terminal state (REQ-4)."""

    STOP = "stop"  # EOS, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the client went away or asked for it
    IGNORED = "ignored"  # never ran: it could not have been served
    ERROR = "error"  # this request failed; the others go on
    REPETITION = "repetition"  # the repetition guard ended it (OUT-26)

    @property
    def api_name(self) -> str:
        """The reason in OpenAI's vocabulary, where it has a word for it."""
        return {"ignored": "length", "repetition": "stop"}.get(self.value, self.value)


class Medium(StrEnum):
    """Where KV blocks can live."""

    DEVICE = "device"
    HOST = "host"
    FILE = "file"
    REMOTE = "remote"


class UsageContext(StrEnum):
    """Through which door the engine was opened (INP-2)."""

    LLM_CLASS = "llm_class"
    API_SERVER = "api_server"
    COMMAND_LINE = "command_line"
    TEST = "test"


class OutputKind(StrEnum):
    """What one `RequestOutput` carries (OUT-25)."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"
