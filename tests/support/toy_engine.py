"""An engine without a model: a deterministic rule gives the next token. For tests of what stands in front of it.

Promises: satisfies `EngineClient`; one token a step for each running request, in order of arrival, at most
`max_running` at once; ends requests as the real engine does (EOS, stop ids, max_tokens, abort); every step
carries figures. With `manual`, steps happen only when `step()` is called.
Does not know: KV memory or scheduling.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo.base.errors import EngineDead
from octavo.base.outputs import EngineOutputs, RequestDelta, RequestTimes, StatsSnapshot
from octavo.base.requests import EngineRequest
from octavo.base.step import LogprobArrays, PromptLogprobs
from octavo.base.types import FinishReason
from octavo.engine.heartbeat import Heartbeat

Rule = Callable[[EngineRequest, Sequence[int]], int]  # request, its output so far -> next token


def hashed(vocab_size: int, low: int = 0) -> Rule:
    """Any token, decided by the prompt, the seed, the sample and the position alone."""

    def rule(request: EngineRequest, output: Sequence[int]) -> int:
        key = hash((request.prompt_token_ids, request.sampling.seed, request.sample_index, len(output)))
        return low + key % (vocab_size - low)

    return rule


def scripted(tokens: Sequence[int], last: int) -> Rule:
    """These tokens, then `last` for ever."""
    return lambda request, output: tokens[len(output)] if len(output) < len(tokens) else last


class ToyClient:
    """The engine.

    Owns: its requests, its thread and its figures.
    """

    def __init__(self, rule: Rule, *, max_running: int = 4, manual: bool = False, chunk: int = 1) -> None:
        self._rule = rule
        self._max_running = max_running
        self._manual = manual
        self._chunk = chunk  # tokens a step gives a request
        self._changed = threading.Condition()
        self._requests: dict[str, tuple[EngineRequest, list[int], float]] = {}
        self._aborted: list[str] = []
        self._closing = False
        self._dead: Exception | None = None
        self.said: Heartbeat | None = None  # what it tells of how far it is
        self._seq = 0
        self._num_output = 0
        self._thread: threading.Thread | None = None
        self._on_outputs: Callable[[EngineOutputs], None] = lambda outputs: None
        self._on_death: Callable[[Exception], None] = lambda error: None
        self.submitted: list[EngineRequest] = []
        self.aborts: list[str] = []  # every id that an abort named
        self.calls: list[str] = []

    # ---- EngineClient ----

    def start(self, on_outputs: Callable[[EngineOutputs], None], on_death: Callable[[Exception], None]) -> None:
        self._on_outputs, self._on_death = on_outputs, on_death
        if not self._manual:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def submit(self, requests: tuple[EngineRequest, ...]) -> None:
        with self._changed:
            if self._dead is not None or self._closing:
                raise EngineDead(str(self._dead or "closed"))
            for request in requests:
                if request.request_id in self._requests:
                    raise RuntimeError(f"id {request.request_id} is in use")
                self._requests[request.request_id] = (request, [], time.monotonic())
            self.submitted.extend(requests)
            self._changed.notify()

    def abort(self, request_ids: tuple[str, ...]) -> None:
        with self._changed:
            self.aborts.extend(request_ids)
            self._aborted.extend(request_ids)
            self._changed.notify()

    def call(self, method: str, timeout_s: float = 30.0, **args: Any) -> Any:
        self.calls.append(method)
        return True

    def heartbeat(self) -> Heartbeat | None:
        return self.said

    def give_up(self, error: Exception) -> None:
        self._dead = EngineDead(str(error))

    def alive(self) -> bool:
        return self._dead is None and not self._closing

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(10)

    # ---- for tests ----

    def die(self, message: str = "the worker was killed") -> None:
        """As if the engine process had gone."""
        with self._changed:
            self._dead = EngineDead(message)
            self._changed.notify()
        self._on_death(self._dead)

    @property
    def num_alive(self) -> int:
        """Requests in the engine."""
        with self._changed:
            return len(self._requests)

    def step(self) -> None:
        """One step, by hand."""
        with self._changed:
            outputs = self._step()
        self._on_outputs(outputs)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._requests or self._aborted or self._closing or self._dead):
                    self._changed.wait()
                if self._closing or self._dead:
                    return
                outputs = self._step()
            self._on_outputs(outputs)

    def _step(self) -> EngineOutputs:
        deltas = []
        for request_id in self._aborted:
            if self._requests.pop(request_id, None) is not None:
                deltas.append(RequestDelta(request_id=request_id, finish=FinishReason.ABORT))
        self._aborted.clear()
        running = list(self._requests)[: self._max_running]
        for request_id in running:
            deltas.append(self._advance(*self._requests[request_id]))
        for delta in deltas:
            if delta.finish is not None:
                self._requests.pop(delta.request_id, None)
        self._seq += 1
        num_running = min(len(self._requests), self._max_running)
        stats = StatsSnapshot(
            seq=self._seq,
            num_running=num_running,
            num_waiting=len(self._requests) - num_running,
            num_blocks_total=100,
            num_blocks_used=num_running,
            kv_usage=num_running / 100,
            output_tokens=self._num_output,
            step_rows=len(running),
            step_tokens=len(running),
            step_s=0.001,
        )
        return EngineOutputs(deltas=tuple(deltas), stats=stats)

    def _advance(self, request: EngineRequest, output: list[int], submitted_s: float) -> RequestDelta:
        params, new = request.sampling, []
        finish, stop_reason = None, None
        first = not output
        while finish is None and len(new) < self._chunk:
            if params.max_tokens == 0:
                finish = FinishReason.LENGTH
                break
            token = self._rule(request, tuple(output))
            output.append(token)
            new.append(token)
            finish, stop_reason = _finish(request, token, len(output))
        self._num_output += len(new)
        now_s = time.monotonic()
        times = RequestTimes(request.arrival_s, submitted_s, now_s, now_s, now_s if finish else 0.0)
        return RequestDelta(
            request_id=request.request_id,
            new_token_ids=tuple(new),
            finish=finish,
            stop_reason=stop_reason,
            logprobs=toy_logprobs(new, params.logprobs) if params.logprobs is not None else None,
            prompt_logprobs=_score(request) if first and params.prompt_logprobs is not None else (),
            times=times if first or finish else None,
        )


def _finish(request: EngineRequest, token: int, length: int) -> tuple[FinishReason | None, int | None]:
    params = request.sampling
    if length >= params.min_tokens:
        if token in params.stop_token_ids:
            return FinishReason.STOP, token
        if token in request.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
    return (FinishReason.LENGTH if length == params.max_tokens else None), None


def toy_logprobs(tokens: Sequence[int], top: int) -> LogprobArrays:
    """The chosen token is second after its successor; log-probabilities are -1, -2, ... by column."""
    count = len(tokens)
    ids = np.array([[t, *(t + 1 - i if i else t + 1 for i in range(top))] for t in tokens], dtype=np.int32)
    values = np.tile(-np.arange(1, top + 2, dtype=np.float32), (count, 1))
    return LogprobArrays(
        ids.reshape(count, top + 1), values, np.full(count, 2, np.int32), np.full(count, top + 1, np.int32)
    )


def _score(request: EngineRequest) -> tuple[PromptLogprobs, ...]:
    """Two chunks, as a chunked prefill gives them."""
    prompt, half = request.prompt_token_ids, (len(request.prompt_token_ids) + 1) // 2
    chunks = []
    for start, end in ((1, half), (half, len(prompt))):
        if start < end:
            arrays = toy_logprobs(prompt[start:end], request.sampling.prompt_logprobs or 0)
            chunks.append(PromptLogprobs(0, start, arrays.token_ids, arrays.logprobs, arrays.ranks))
    return tuple(chunks)
