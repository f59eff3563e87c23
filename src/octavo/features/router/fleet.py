"""The servers behind the router: what is known of each, and who is chosen.

Promises: only servers that may be given requests are chosen; for each purpose those that are there for it come first.
Does not know: HTTP, sockets, or how anything about a server is learned.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from octavo.features.router.addresses import InstanceAddress, InstanceRole
from octavo.features.router.choice import Candidate, best
from octavo.features.router.health import InstanceHealth
from octavo.features.router.journey import Leg
from octavo.features.router.prompt import SHAREABLE, Prompt
from octavo.kvcache.published import Mirror

# For each purpose who is asked, those of the first role before those of the next.
ROLES: dict[Leg, tuple[InstanceRole, ...]] = {
    Leg.PREFILL: (InstanceRole.PREFILL,),
    Leg.DECODE: (InstanceRole.DECODE,),
    Leg.WHOLE: (InstanceRole.PLAIN, InstanceRole.DECODE, InstanceRole.PREFILL),
}


class Member:
    """One server.

    Owns: its health, the copy of what its cache holds, the requests under way there, and who is to be told when
    they are given up.
    """

    def __init__(self, address: InstanceAddress, health: InstanceHealth) -> None:
        self.name = address.name
        self.url = address.url
        self.roles = address.roles
        self.health = health
        self.mirror = Mirror()
        self.in_flight = 0
        self._runs: set[Callable[[], None]] = set()

    def begin(self, give_up: Callable[[], None]) -> None:
        """A request is on its way there; `give_up` is called when the server's checks fail meanwhile."""
        self.in_flight += 1
        self._runs.add(give_up)

    def end(self, give_up: Callable[[], None]) -> None:
        """The request has ended; calling it twice is harmless."""
        if give_up in self._runs:
            self._runs.remove(give_up)
            self.in_flight -= 1

    def give_up(self) -> None:
        """End what runs there."""
        for run in tuple(self._runs):
            run()

    @property
    def tells(self) -> bool:
        """True when it is known what its cache holds, under names that we can make."""
        scheme = self.mirror.scheme
        return scheme is not None and scheme.hash == SHAREABLE


class Fleet:
    """All servers.

    Owns: whose turn it is, for each purpose.
    """

    def __init__(self, members: Sequence[Member], *, load_weight: int) -> None:
        self.members = tuple(members)
        self._by_name = {member.name: member for member in self.members}
        self._load_weight = load_weight
        self._turns: Counter[Leg] = Counter()  # one for both would alternate in step with the purposes

    def __getitem__(self, name: str) -> Member:
        return self._by_name[name]

    @property
    def disaggregated(self) -> bool:
        """True when there are servers that compute prompts for others."""
        return any(InstanceRole.PREFILL in member.roles for member in self.members)

    def usable(self, leg: Leg, without: frozenset[str] = frozenset()) -> list[Member]:
        """Who may be asked now, of the first role of which there is anybody."""
        for role in ROLES[leg]:
            found = [m for m in self.members if role in m.roles and m.health.usable and m.name not in without]
            if found:
                return found
        return []

    def pick(self, leg: Leg, without: frozenset[str], prompt: Prompt) -> tuple[Member, int] | None:
        """The server to ask, and how many tokens of the prompt its cache is known to hold."""
        members = self.usable(leg, without)
        candidates = [Candidate(prompt.held_by(m.mirror), m.in_flight) for m in members]
        place = best(candidates, load_weight=self._load_weight, turn=self._turns[leg])
        if place is None:
            return None
        self._turns[leg] += 1
        return members[place], candidates[place].held_tokens

    def informed(self, leg: Leg) -> bool:
        """True when knowing the prompt's tokens could change who is chosen."""
        members = self.usable(leg)
        return len(members) > 1 and any(m.tells for m in members)

    def describe(self) -> str:
        """Every server's state, for people."""
        return ", ".join(
            f"{m.name} is {m.health.state}" + (m.health.why and f" ({m.health.why})") for m in self.members
        )
