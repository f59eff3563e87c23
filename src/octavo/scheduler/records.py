"""What the ledger keeps beside requests: steps in flight, blocks held after an end, and figures.

Promises: each changes by its own methods.
Does not know: requests' state, or queues.
"""

from octavo.base.types import FinishReason
from octavo.scheduler.request import Request
from octavo.scheduler.seams import ControlPart


class Flight:
    """A plan that was submitted and has not come back: its rows and where they start, when it was made, and which
    parts are late.

    Owns: nothing that changes.
    """

    __slots__ = ("late", "made_s", "num_computed_tokens", "rows")

    def __init__(
        self, rows: list[Request], num_computed_tokens: list[int], late: tuple[ControlPart, ...], made_s: float
    ) -> None:
        self.rows = rows
        self.num_computed_tokens = num_computed_tokens
        self.late = late
        self.made_s = made_s


class Counters:
    """Figures that only grow, and those of the last step.

    Owns: its fields, which change by these methods only.
    """

    __slots__ = ("finished", "output_tokens", "preemptions", "prompt_tokens", "step_rows", "step_s", "step_tokens")

    def __init__(self) -> None:
        self.preemptions = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.finished: dict[str, int] = {}
        self.step_tokens = 0
        self.step_rows = 0
        self.step_s = 0.0

    def ended(self, reason: FinishReason) -> None:
        """A request ended."""
        self.finished[reason.value] = self.finished.get(reason.value, 0) + 1

    def preempted(self) -> None:
        """A request lost its place."""
        self.preemptions += 1

    def prompt_done(self, num_tokens: int) -> None:
        """A prompt was computed; the answers to one prompt count it once."""
        self.prompt_tokens += num_tokens

    def step_done(self, *, rows: int, tokens: int, outputs: int, seconds: float) -> None:
        """A step came back; of it all but `outputs` are figures of the last one only."""
        self.step_rows = rows
        self.step_tokens = tokens
        self.output_tokens += outputs
        self.step_s = seconds


class HeldBlocks:
    """Blocks of a request that ended, kept for the parts in `parts`.

    Owns: which parts still hold them.
    """

    __slots__ = ("last_seq", "parts")

    def __init__(self, parts: set[str], last_seq: int) -> None:
        self.parts = parts
        self.last_seq = last_seq

    def let_go(self, part: str) -> bool:
        """`part` needs them no longer. True: nobody does."""
        self.parts.discard(part)
        return not self.parts
