"""Stop strings across token borders (OUT-22).

Promises: the stop string that completes first wins, and of two that complete together the longer one; no
character of it leaves before it is certain that it belongs to none; never more than the longest stop string
less one character is held back, and in fact only an end of the text that begins a stop string.
Does not know: tokens.

Why only `held + new text` is searched: `held` is the longest end of the text so far that begins a stop string,
so a stop string that completes later cannot begin before it.
"""

from collections.abc import Sequence


class StopScanner:
    """Watches one answer's text.

    Owns: the text held back.
    """

    __slots__ = ("_include", "_stops", "held", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self.held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def feed(self, text: str) -> str:
        """The text that may be sent now; after a match (`matched`) nothing more ever comes."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        buffer = self.held + text
        if (found := self._first(buffer)) is not None:
            start, end = found
            self.matched = buffer[start:end]
            self.held = ""
            return buffer[:end] if self._include else buffer[:start]
        num_held = self._num_held(buffer)
        cut = len(buffer) - num_held
        self.held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """The text held back; the answer has ended without a stop string."""
        held, self.held = self.held, ""
        return held

    def _first(self, buffer: str) -> tuple[int, int] | None:
        """Span of the stop string that completes first."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            limit = len(buffer) if best is None else best[1]
            start = buffer.find(stop, 0, limit)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[1] or start < best[0]:
                best = (start, end)
        return best

    def _num_held(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            first = stop[0]
            # Looks no further back than could beat what was found.
            start = buffer.find(first, max(0, len(buffer) - len(stop) + 1))
            while start >= 0 and len(buffer) - start > longest:
                if stop.startswith(buffer[start:]):
                    longest = len(buffer) - start
                    break
                start = buffer.find(first, start + 1)
        return longest
