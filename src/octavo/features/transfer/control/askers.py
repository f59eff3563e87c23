"""What each request has learnt of the tiers, and how long it has waited for them.

Promises: nobody waits without end: a wait is over when no good news came for `patience_s`, and at the latest when it
has taken as long as computing what is waited for would have (TIR-10).
Does not know: chunks, rows or jobs.

Sets of tiers are bit masks: bit `number` stands for the tier of that number.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from octavo.features.transfer.control.evict import Key

UNKNOWN_WORTH: Final = 4  # times the patience: for how long to wait at most when nobody knows how long computing takes


@dataclass(slots=True)
class Asker:
    """One request. Owns: what it has learnt of tiers, and since when it waits."""

    tiers: int = 0  # those it may ask
    written: tuple[int, ...] = ()  # of those, the ones that what is computed goes to
    whole: tuple[int, ...] = ()  # of those, the ones that all of the request goes to
    worth: int | None = None  # of `tiers`, those that are not too slow for it; None: it has not asked
    absent: dict[Key, int] = field(default_factory=dict)  # tiers that do not have a chunk, or did not say in time
    present: dict[Key, int] = field(default_factory=dict)  # tiers that have it
    sources: dict[Key, int] = field(default_factory=dict)  # tier from which a chunk was promoted for it
    began: float | None = None  # when the wait under way began
    heard: float = 0.0  # when it last brought something
    tired: bool = False  # it waits no more
    parked: set[Key] = field(default_factory=set)  # to be written to `whole` once the primary has them
    stores: int = 0  # in flight
    ended: bool = False

    def lacks(self, key: Key, number: int) -> None:
        """That tier does not have it."""
        self.absent[key] = self.absent.get(key, 0) | 1 << number

    def learns(self, key: Key, number: int, now: float) -> None:
        """That tier has it."""
        self.present[key] = self.present.get(key, 0) | 1 << number
        self.heard = now

    def waits(self, now: float, patience_s: float, worth_s: float) -> bool:
        """It is told to wait, for what takes `worth_s` to compute (0: nobody knows). False: it has waited enough."""
        if self.tired:
            return False
        if self.began is None:
            self.began = self.heard = now
        most = patience_s + (worth_s or UNKNOWN_WORTH * patience_s)
        if now - self.heard > patience_s or now - self.began > most:
            self.tired = True
        return not self.tired


class Askers:
    """Owns: the requests that are known."""

    def __init__(self) -> None:
        self._askers: dict[str, Asker] = {}

    def __getitem__(self, request_id: str) -> Asker:
        return self._askers[request_id]

    def __len__(self) -> int:
        return len(self._askers)

    def open(self, request_id: str, asker: Asker) -> None:
        """A request may ask now."""
        self._askers[request_id] = asker

    def close(self, request_id: str) -> None:
        """The request has ended. What is known of it goes once nothing of it is under way (TIR-14)."""
        asker = self._askers.get(request_id)
        if asker is not None:
            asker.ended = True
            self.forget_ended(request_id)

    def forget_ended(self, request_id: str) -> None:
        """Forget it if it has ended and nothing of it is under way."""
        asker = self._askers[request_id]
        if asker.ended and not asker.stores and not asker.parked:
            del self._askers[request_id]

    def some(self, request_ids: Iterable[str]) -> list[Asker]:
        """Those of these that are still known."""
        return [self._askers[name] for name in request_ids if name in self._askers]

    @property
    def busy(self) -> bool:
        """Something is parked or being stored."""
        return any(asker.parked or asker.stores for asker in self._askers.values())

    def unpark(self, end: Callable[[Asker, Key], bool]) -> None:
        """Take from what is parked all that `end` says yes to."""
        for request_id, asker in tuple(self._askers.items()):
            if asker.parked:
                asker.parked = {key for key in asker.parked if not end(asker, key)}
                self.forget_ended(request_id)

    def drop_parked(self) -> None:
        """Nothing is parked any more."""
        for request_id, asker in tuple(self._askers.items()):
            asker.parked.clear()
            self.forget_ended(request_id)

    def check(self) -> None:
        """Raise `RuntimeError` when one is known that has nothing to do here."""
        if any(asker.ended and not asker.stores and not asker.parked for asker in self._askers.values()):
            raise RuntimeError("an ended request is still known")
