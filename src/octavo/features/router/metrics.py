"""What the router counts, in Prometheus' text format (OPS-6).

Promises: these names and labels are stable; a scrape asks no server.
Does not know: HTTP.

| Metric | Kind | Means |
|---|---|---|
| `octavo_router_requests_total{outcome}` | counter | requests by how they ended: see `Outcome` |
| `octavo_router_retries_total{leg,failure}` | counter | servers that gave no answer, after which another was asked |
| `octavo_router_fallbacks_total{leg}` | counter | requests answered whole by one server because this leg did not work out |
| `octavo_router_choices_total{leg,reason}` | counter | choices of a server: `held` when its cache holds some of the prompt, else `load` |
| `octavo_router_held_tokens_total` | counter | prompt tokens that chosen servers were known to hold |
| `octavo_router_instance_up{instance}` | gauge | 1 while it may be given requests |
| `octavo_router_instance_state{instance,state}` | gauge | 1 for the state that it is in: unknown, up, draining, down |
| `octavo_router_instance_in_flight{instance}` | gauge | requests under way there |
| `octavo_router_instance_known_blocks{instance}` | gauge | blocks that its cache is known to hold |
"""

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from octavo.features.router.fleet import Fleet
from octavo.features.router.health import InstanceState
from octavo.features.router.journey import Failure, Leg


class Outcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"  # a server's 4xx or 5xx was relayed
    UNSERVED = "unserved"  # no server was there, or none answered
    BROKEN = "broken"  # the server ended after the answer had begun
    CLIENT_GONE = "client_gone"


class RouterMetrics:
    """The counters, and a reader of the fleet.

    Owns: the counters.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.outcomes: Counter[Outcome] = Counter()
        self.retries: Counter[tuple[Leg, Failure]] = Counter()
        self.fallbacks: Counter[Leg] = Counter()
        self.choices: Counter[tuple[Leg, str]] = Counter()
        self.held_tokens = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def chose(self, leg: Leg, held_tokens: int) -> None:
        """A server was chosen."""
        self.choices[leg, "held" if held_tokens else "load"] += 1
        self.held_tokens += held_tokens

    def render(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """No metric is known before it is collected; keeps registration from collecting."""
        return []

    def collect(self) -> Iterator[Metric]:
        """For `prometheus_client`."""
        requests = CounterMetricFamily("octavo_router_requests", "Requests by how they ended", labels=("outcome",))
        for outcome in Outcome:
            requests.add_metric((outcome.value,), self.outcomes[outcome])
        retries = CounterMetricFamily(
            "octavo_router_retries", "Servers that gave no answer, after which another was asked", labels=("leg", "failure")
        )  # fmt: skip
        for (leg, failure), count in sorted(self.retries.items()):
            retries.add_metric((leg.value, failure.value), count)
        fallbacks = CounterMetricFamily(
            "octavo_router_fallbacks", "Requests answered whole because this leg did not work out", labels=("leg",)
        )
        for leg in (Leg.PREFILL, Leg.DECODE):
            fallbacks.add_metric((leg.value,), self.fallbacks[leg])
        choices = CounterMetricFamily("octavo_router_choices", "Choices of a server", labels=("leg", "reason"))
        for (leg, reason), count in sorted(self.choices.items()):
            choices.add_metric((leg.value, reason), count)
        held = CounterMetricFamily("octavo_router_held_tokens", "Prompt tokens that chosen servers were known to hold")
        held.add_metric((), self.held_tokens)
        yield from (requests, retries, fallbacks, choices, held)
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        one = ("instance",)
        up = GaugeMetricFamily("octavo_router_instance_up", "1 while it may be given requests", labels=one)
        states = GaugeMetricFamily("octavo_router_instance_state", "1 for its state", labels=(*one, "state"))
        in_flight = GaugeMetricFamily("octavo_router_instance_in_flight", "Requests under way there", labels=one)
        known = GaugeMetricFamily("octavo_router_instance_known_blocks", "Blocks that its cache is known to hold", labels=one)  # fmt: skip
        for member in self._fleet.members:
            up.add_metric((member.name,), float(member.health.usable))
            for state in InstanceState:
                states.add_metric((member.name, state.value), float(member.health.state is state))
            in_flight.add_metric((member.name,), member.in_flight)
            known.add_metric((member.name,), len(member.mirror))
        yield from (up, states, in_flight, known)
