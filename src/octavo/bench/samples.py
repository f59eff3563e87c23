"""What a run of requests gives: one sample a request, and what the client itself cost.

Promises: a request that failed is a sample with its error; nothing is left out.
Does not know: HTTP, or what the figures mean (see `report`).

Times are seconds after the start of the run, on one monotonic clock.
"""

from array import array

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as its client saw it.

    `due_s` is when it should have been sent, `start_s` when it was, before its connection was made. `token_times`
    has the arrival of each event that carried a token; an event may carry several tokens, so `output_tokens` comes
    from the server's usage where it says one (`counted` False), else from the number of events.
    """

    due_s: float
    start_s: float
    end_s: float
    first_token_s: float | None = None
    token_times: "array[float]" = msgspec.field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    counted: bool = False
    conversation: int | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """True when the whole answer came."""
        return self.error is None


class ClientCost(msgspec.Struct, frozen=True, kw_only=True):
    """What measuring cost, and how late the client was: figures that say whether to believe the others."""

    cpu_s: float = 0.0
    num_chunks: int = 0  # events read from streams
    max_lag_s: float = 0.0  # the longest time for which the event loop was late
    mean_lag_s: float = 0.0
    max_late_s: float = 0.0  # the longest time between when a request was due and when it was sent (open loop)

    @property
    def cpu_s_per_chunk(self) -> float:
        """CPU time of the whole client for one event."""
        return self.cpu_s / self.num_chunks if self.num_chunks else 0.0


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a sample for each item, in the order of the items."""

    name: str
    samples: tuple[Sample, ...]
    wall_s: float  # from the first request sent to the last answer's end
    client: ClientCost = ClientCost()
