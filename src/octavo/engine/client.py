"""How a front reaches an engine core: in this process, or over a socket.

Promises: one protocol, two implementations; requests go in, `EngineOutputs` come out in order.
Does not know: text, HTTP, or the scheduler.
"""

from collections.abc import Callable
from typing import Any, Protocol

from octavo.base.outputs import EngineOutputs
from octavo.base.requests import EngineRequest


class EngineClient(Protocol):
    """The engine as the front sees it. Every method may be called from any thread."""

    def start(self, on_outputs: Callable[[EngineOutputs], None], on_death: Callable[[Exception], None]) -> None:
        """Begin delivery. Both callbacks run on a thread of the client's own."""

    def submit(self, requests: "tuple[EngineRequest, ...]") -> None:
        """Send requests; raises `EngineDead` if the engine is gone."""

    def abort(self, request_ids: "tuple[str, ...]") -> None:
        """Stop requests; each that was alive yields a last delta with FinishReason.ABORT."""

    def call(self, method: str, timeout_s: float = 30.0, **args: Any) -> Any:
        """An administrative call (`reset_prefix_cache`, `stats`, ...), blocking."""

    def alive(self) -> bool:
        """False once the engine is gone."""

    def close(self) -> None:
        """Stop the engine and free everything; may be called twice."""
