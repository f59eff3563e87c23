"""The blocking twin of `AsyncEngine`, for scripts: many requests in, all results back in order.

Promises: one result for each request, in the order they were given (OFL-01); a request that cannot be served
is refused before any is sent; whatever interrupts the wait aborts what was sent; any number of threads may call
`generate` at once and each gets its own results.
Does not know: prompts as text, or how the engine computes.

Each call reads its deltas from a queue of its own and makes text on its own thread; the client's thread only
sorts deltas into queues.
"""

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from octavo.base.errors import ClientError, EngineDead
from octavo.base.outputs import EngineOutputs, RequestDelta, RequestOutput
from octavo.base.params import SamplingParams
from octavo.base.types import OutputKind
from octavo.engine.client import EngineClient
from octavo.outputs.assembler import OutputAssembler
from octavo.outputs.detokenizer import TokenDecoder
from octavo.serving.info import EngineInfo
from octavo.serving.intake import Intake, PreparedRequest, RequestIds, RequestOptions, placed
from octavo.serving.progress import NoProgress, StartProgress

if TYPE_CHECKING:
    from octavo.inputs.limits import RequestLimits
    from octavo.inputs.renderer import EngineInput

Inbox = SimpleQueue["EngineOutputs | Exception"]
Item = tuple["EngineInput", SamplingParams]


class _Call(NamedTuple):
    """One `generate` under way."""

    prepared: list[PreparedRequest]
    assembler: OutputAssembler
    inbox: Inbox


class SyncEngine:
    """The engine of a script.

    Owns: which call waits for which answer.
    """

    def __init__(
        self,
        client: EngineClient,
        decoder: TokenDecoder,
        limits: "RequestLimits",
        info: EngineInfo,
        clock: Callable[[], float] = time.monotonic,
        *,
        id_prefix: str = "",
    ) -> None:
        self._client = client
        self._decoder = decoder
        self._clock = clock
        self._intake = Intake(limits, info, RequestIds(id_prefix), clock)
        # Written by callers, read by the client's thread; single operations on a dict are atomic.
        self._routes: dict[str, Inbox] = {}  # by answer's id
        self._death: Exception | None = None
        client.start(self._on_outputs, self._on_death)

    def generate(
        self, items: Sequence[Item], *, progress: StartProgress | None = None, **options: Unpack[RequestOptions]
    ) -> list[RequestOutput]:
        """Results of all `items`, in their order; `options` hold for each of them.

        A request that fails inside the engine gives a result with `error`; the others go on. Raises
        `ClientError` when one cannot be served (then none was sent) and `EngineDead` when the engine is gone.
        """
        prepared = [self._prepare(place, items, options) for place in range(len(items))]
        if not prepared:
            return []
        call = _Call(prepared, OutputAssembler(self._decoder), SimpleQueue())
        try:
            self._submit(call)
            return self._collect(call, progress or NoProgress())
        except BaseException:
            self._abort(call.assembler.open_ids())
            raise
        finally:
            for one in prepared:
                for request in one.requests:
                    self._routes.pop(request.request_id, None)

    def call(self, method: str, timeout_s: float = 30.0, **args: Any) -> Any:
        """An administrative call on the engine."""
        return self._client.call(method, timeout_s, **args)

    def alive(self) -> bool:
        """False once the engine is gone or closed."""
        return self._death is None and self._client.alive()

    def forget_calls(self) -> None:
        """Leave calls under way unanswered: the program ends, and a thread that woke now would only print an error."""
        self._routes.clear()

    def close(self) -> None:
        """Stop the engine; calls under way raise `EngineDead`. May be called twice."""
        self._on_death(EngineDead("the engine was closed"))
        self._client.close()

    def _prepare(self, place: int, items: Sequence[Item], options: RequestOptions) -> PreparedRequest:
        input, params = items[place]
        try:
            return self._intake.prepare(input, params, options, kind=OutputKind.FINAL_ONLY)
        except ClientError as error:
            raise placed(error, place, len(items)) from None

    def _submit(self, call: _Call) -> None:
        """Expect all answers, then send all requests at once."""
        for one in call.prepared:
            call.assembler.open(one.opening)
            for request in one.requests:
                self._routes[request.request_id] = call.inbox
        if self._death is not None:  # it may have died before our routes were there to be told
            raise EngineDead(str(self._death))
        self._client.submit(tuple(request for one in call.prepared for request in one.requests))

    def _collect(self, call: _Call, progress: StartProgress) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        try:
            while len(results) < len(call.prepared):
                got = call.inbox.get()
                if isinstance(got, Exception):
                    raise EngineDead(str(got))
                pushed = call.assembler.push(got, self._clock())
                for output in pushed.outputs:
                    results[output.request_id] = output
                self._abort(tuple(pushed.aborts))
                num_tokens = sum(len(delta.new_token_ids) for delta in got.deltas)
                progress.advance(requests=len(pushed.outputs), tokens=num_tokens)
        finally:
            progress.close()
        return [results[one.opening.parent_id] for one in call.prepared]

    def _abort(self, ids: tuple[str, ...]) -> None:
        if ids and self.alive():
            self._client.abort(ids)

    # ---- on the client's thread ----

    def _on_outputs(self, outputs: EngineOutputs) -> None:
        shares: dict[int, tuple[Inbox, list[RequestDelta]]] = {}
        for delta in outputs.deltas:
            if (inbox := self._routes.get(delta.request_id)) is not None:
                shares.setdefault(id(inbox), (inbox, []))[1].append(delta)
        for inbox, deltas in shares.values():
            inbox.put(EngineOutputs(deltas=tuple(deltas)))

    def _on_death(self, error: Exception) -> None:
        if self._death is None:
            self._death = error
        for inbox in {id(i): i for i in list(self._routes.values())}.values():
            inbox.put(error)
