"""A toy engine for the HTTP door: bytes are tokens, and answers are scripted.

Promises: deterministic tokens without a model; behaves towards a front as `EngineClient` says: deltas in
order, one last delta after an abort, figures with every change. Beside `tests.support.toy_engine` because
these tests choose texts byte by byte, and slow, failing and waiting engines.
Does not know: KV memory, scheduling, or HTTP.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.base.errors import EngineDead
from octavo.base.outputs import EngineOutputs, RequestDelta, RequestTimes, StatsSnapshot
from octavo.base.requests import EngineRequest
from octavo.base.step import LogprobArrays, PromptLogprobs
from octavo.base.types import FinishReason
from octavo.engine.heartbeat import Heartbeat

BOS, EOS, MARK = 256, 257, 258
VOCAB_SIZE = 259
_SPECIAL = {BOS: "<s>", EOS: "</s>", MARK: "<mark>"}


class ToyTokenizer:
    """One token a byte, and three special tokens. Satisfies `inputs.tokenizer.Tokenizer` by shape."""

    def __init__(self, *, adds_bos: bool = False) -> None:
        self.vocab_size = VOCAB_SIZE
        self.bos_token_id: int | None = BOS
        self.eos_token_id: int | None = EOS
        self.special_ids = frozenset(_SPECIAL)
        self.adds_bos = adds_bos
        self.template_variables: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens and self.adds_bos else []
        if not any(special in text for special in _SPECIAL.values()):
            return [*ids, *text.encode("utf-8", "replace")]
        place = 0
        while place < len(text):
            token = next((i for i, s in _SPECIAL.items() if text.startswith(s, place)), None)
            ids.extend(text[place].encode("utf-8", "replace") if token is None else [token])
            place += 1 if token is None else len(_SPECIAL[token])
        return ids

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        out, run = [], bytearray()
        for token in ids:
            if token < 256:
                run.append(token)
                continue
            out.append(run.decode("utf-8", "replace"))
            run.clear()
            if not skip_special_tokens:
                out.append(_SPECIAL[token])
        return "".join(out) + run.decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return _SPECIAL.get(token_id) or bytes([token_id]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return _SPECIAL[token_id].encode() if token_id in _SPECIAL else bytes([token_id])

    def open_stream(self, *, skip_special_tokens: bool) -> None:
        return None

    def protect(self, text: str) -> str:
        return text

    def unprotect(self, text: str) -> str:
        return text


Script = Callable[[EngineRequest], Sequence[int]]


def default_script(request: EngineRequest) -> Sequence[int]:
    """An answer that depends on the prompt, the seed and the sample, and ends with EOS."""
    heard = bytes(t for t in request.prompt_token_ids[-12:] if t < 256).decode("utf-8", "replace")
    seed = "" if request.sampling.seed is None else f" seed {request.sampling.seed}"
    return [*f"answer {request.sample_index}{seed} to {heard}".encode(), EOS]


def text_script(text: str) -> Script:
    """The same text for everybody."""
    return lambda _: [*text.encode(), EOS]


def endless(_: EngineRequest) -> Sequence[int]:
    """Thousands of tokens."""
    return [120] * 10_000


@dataclass
class _Live:
    request: EngineRequest
    script: Sequence[int]
    made: int = 0
    sent_prompt: bool = False
    started_s: float = field(default_factory=time.monotonic)


class ToyClient:
    """An `EngineClient` whose engine is a thread that gives each live request a token a step.

    Owns: the live requests, the thread, and what tests read and set.
    """

    def __init__(self, script: Script = default_script, *, step_s: float = 0.0) -> None:
        self.script = script
        self.step_s = step_s
        self.max_running = 1_000_000
        self.fail_with: str | None = None
        self.seen: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.num_tokens = 0
        self._live: dict[str, _Live] = {}
        self._lock = threading.Condition()
        self._ended = False
        self._dead: Exception | None = None
        self.said: Heartbeat | None = None  # what it tells of how far it is
        self._seq = 0

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        with self._lock:
            return len(self._live)

    def start(self, on_outputs: Callable[[EngineOutputs], None], on_death: Callable[[Exception], None]) -> None:
        self._on_outputs, self._on_death = on_outputs, on_death
        self._thread = threading.Thread(target=self._run, name="toy-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: tuple[EngineRequest, ...]) -> None:
        with self._lock:
            if self._dead is not None:
                raise EngineDead(str(self._dead))
            for request in requests:
                self.seen.append(request)
                self._live[request.request_id] = _Live(request, self.script(request))
            self._on_outputs(EngineOutputs(stats=self._stats()))
            self._lock.notify()

    def abort(self, request_ids: tuple[str, ...]) -> None:
        with self._lock:
            for request_id in request_ids:
                if self._live.pop(request_id, None) is not None:
                    self.aborted.append(request_id)
                    delta = RequestDelta(request_id=request_id, finish=FinishReason.ABORT)
                    self._on_outputs(EngineOutputs(deltas=(delta,), stats=self._stats()))
            self._lock.notify()

    def call(self, method: str, timeout_s: float = 30.0, **args: Any) -> Any:
        return {"reset_prefix_cache": True}[method]

    def heartbeat(self) -> Heartbeat | None:
        return self.said

    def give_up(self, error: Exception) -> None:
        self._dead = EngineDead(str(error))

    def alive(self) -> bool:
        return self._dead is None and not self._ended

    def kill(self) -> None:
        """The engine dies, as a crashed process would."""
        with self._lock:
            self._dead = EngineDead("the engine was killed by the test")
            self._lock.notify()

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self._lock.notify()
        self._thread.join(10)

    def _stats(self) -> StatsSnapshot:
        self._seq += 1
        running = min(len(self._live), self.max_running)
        return StatsSnapshot(
            seq=self._seq, num_running=running, num_waiting=len(self._live) - running, output_tokens=self.num_tokens
        )

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._live and not self._ended and self._dead is None:
                    self._lock.wait()
                if self._ended:
                    return
                if self._dead is not None:
                    break
                running = list(self._live.values())[: self.max_running]
                if running:
                    deltas = tuple(self._step(live) for live in running)
                    self._on_outputs(EngineOutputs(deltas=deltas, stats=self._stats()))
            time.sleep(self.step_s if running else 0.005)
        self._on_death(self._dead)

    def _step(self, live: _Live) -> RequestDelta:
        request, params = live.request, live.request.sampling
        request_id = request.request_id
        if self.fail_with is not None:
            del self._live[request_id]
            return RequestDelta(request_id=request_id, finish=FinishReason.ERROR, error=self.fail_with)
        scores: tuple[PromptLogprobs, ...] = ()
        if params.prompt_logprobs is not None and not live.sent_prompt and len(request.prompt_token_ids) > 1:
            live.sent_prompt = True
            scores = (prompt_scores(request.prompt_token_ids, params.prompt_logprobs),)
        if params.max_tokens == 0:
            del self._live[request_id]
            return RequestDelta(request_id=request_id, finish=FinishReason.LENGTH, prompt_logprobs=scores)
        token = live.script[live.made] if live.made < len(live.script) else ord("x")
        if token == EOS and (params.ignore_eos or live.made < params.min_tokens):
            token = ord("x")
        live.made += 1
        self.num_tokens += 1
        finish = _finish(live, token)
        if finish is not None:
            del self._live[request_id]
        now_s = time.monotonic()
        return RequestDelta(
            request_id=request_id,
            new_token_ids=(token,),
            finish=finish,
            stop_reason=token if finish is FinishReason.STOP and token != EOS else None,
            logprobs=None if params.logprobs is None else token_scores(token, params.logprobs),
            prompt_logprobs=scores,
            times=RequestTimes(live.started_s, live.started_s, live.started_s, now_s, now_s),
        )


def _finish(live: _Live, token: int) -> FinishReason | None:
    params = live.request.sampling
    if token == EOS or (token in params.stop_token_ids and live.made > params.min_tokens):
        return FinishReason.STOP
    return FinishReason.LENGTH if live.made >= (params.max_tokens or 0) else None


def token_scores(token: int, num_top: int) -> LogprobArrays:
    """The chosen token at -0.5 (rank 1) and the next ids below it."""
    top = [(token + i) % VOCAB_SIZE for i in range(num_top)]
    values = [-0.5, *(-0.5 * (i + 1) for i in range(num_top))]
    return LogprobArrays(
        np.array([[token, *top]], np.int32),
        np.array([values], np.float32),
        np.array([1], np.int32),
        np.array([1 + num_top], np.int32),
    )


def prompt_scores(prompt: Sequence[int], num_top: int) -> PromptLogprobs:
    """Token i of the prompt at -i/8 with rank 2, minus infinity for every ninth; other ids above it."""
    lines = range(1, len(prompt))
    ids = [[prompt[i], *((prompt[i] + 1 + j) % VOCAB_SIZE for j in range(num_top))] for i in lines]
    values = [[float("-inf") if i % 9 == 8 else -i / 8] + [-0.1 - j for j in range(num_top)] for i in lines]
    return PromptLogprobs(
        slot=0,
        start=1,
        token_ids=np.array(ids, np.int32),
        logprobs=np.array(values, np.float32),
        ranks=np.full(len(ids), 2, np.int32),
    )
