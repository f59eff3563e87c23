"""A progress line for long offline work.

Promises: one line on a terminal, rewritten a few times a second; nothing at all where there is no terminal.
Does not know: what is being counted beyond 'requests' and 'tokens'.
"""

from collections.abc import Callable
from typing import Protocol, TextIO

_WIDTH = 30
_PERIOD_S = 0.1


class StartProgress(Protocol):
    """Who wants to see how far the work is."""

    def advance(self, *, requests: int = 0, tokens: int = 0) -> None:
        """So much more is done."""

    def close(self) -> None:
        """The work is over, or was given up."""


class NoProgress:
    """Nobody wants to see.

    Owns: nothing.
    """

    def advance(self, *, requests: int = 0, tokens: int = 0) -> None:
        return None

    def close(self) -> None:
        return None


class ProgressLine:
    """Counts against a known total.

    Owns: what was done and when the line was written.
    """

    def __init__(self, total: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._total = total
        self._stream = stream
        self._clock = clock
        self._started_s = clock()
        self._written_s = float("-inf")
        self._requests = 0
        self._tokens = 0

    def advance(self, *, requests: int = 0, tokens: int = 0) -> None:
        """So much more is done."""
        self._requests += requests
        self._tokens += tokens
        now_s = self._clock()
        if now_s - self._written_s >= _PERIOD_S or self._requests == self._total:
            self._written_s = now_s
            self._stream.write("\r" + self._line(now_s))
            self._stream.flush()

    def close(self) -> None:
        """Leave the line as it is and go to the next."""
        self._stream.write("\r" + self._line(self._clock()) + "\n")
        self._stream.flush()

    def _line(self, now_s: float) -> str:
        share = self._requests / self._total if self._total else 1.0
        bar = "#" * round(share * _WIDTH)
        speed = self._tokens / max(now_s - self._started_s, 1e-9)
        return f"prompts [{bar:<{_WIDTH}}] {self._requests}/{self._total}  {speed:.0f} output tokens/s "


def open_progress(total: int, stream: TextIO | None, clock: Callable[[], float]) -> StartProgress:
    """A line on `stream` if it is a terminal."""
    return ProgressLine(total, stream, clock) if total and stream is not None and _shows(stream) else NoProgress()


def _shows(stream: TextIO) -> bool:
    """Whether somebody sees what is written; False for one that was closed."""
    try:
        return stream.isatty()
    except ValueError:
        return False
