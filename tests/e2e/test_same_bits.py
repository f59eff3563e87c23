"""The same request gives the same tokens and the same log-probabilities to the bit, whatever happens around it (OUT-30).

Random engines (chunks, blocks, preemption, prefix hits, two steps in flight, threads) under random load, in bfloat16 on
the native kernels: their sums have one order for every number of rows. Each request's truth is its answer when it is
alone on a plain engine.
"""

import queue
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from octavo.base.outputs import EngineOutputs
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.client import InprocClient
from octavo.engine.startup import build_core
from octavo.executor.uniproc import UniprocExecutor
from tests.support import checkpoints

pytest.importorskip("octavo.ops.native", exc_type=ImportError)

MAX_LEN = 160
BEGINNING = tuple(range(20, 84))  # shared by some prompts: they hit each other's blocks
PROMPTS = [(5, 6, 7), tuple(range(90, 141)), (*BEGINNING, 3, 4), (*BEGINNING, 9), BEGINNING[:33], (100,) * 17]
WAYS = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.5, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.4},
]
ALL = [(i, j) for i in range(len(PROMPTS)) for j in range(len(WAYS))]


@dataclass(frozen=True)
class Engine:
    """What is varied; the defaults are the plain engine."""

    blocks: int = 200
    block_size: int = 16
    chunk: int = 512
    seqs: int = 64
    depth: int = 1
    caching: bool = True
    threads: int = 1

    def config(self, model: str) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig(model=model, dtype="bfloat16", max_model_len=MAX_LEN),
            cache=CacheConfig(
                num_kv_blocks=self.blocks * 16 // self.block_size,
                block_size=self.block_size,
                enable_prefix_caching=self.caching,
            ),
            scheduler=SchedulerConfig(
                async_scheduling=self.depth == 2,
                max_num_batched_tokens=self.chunk,
                max_num_seqs=self.seqs,
                kv_watermark=0.0,
            ),
            device=DeviceConfig(num_threads=self.threads),
        )


ENGINES = st.builds(
    Engine,
    blocks=st.sampled_from([200, 200, 24, 14]),  # few: requests are preempted
    block_size=st.sampled_from([16, 32]),
    chunk=st.sampled_from([512, 64, 37, 16]),
    seqs=st.sampled_from([64, 5, 2]),
    depth=st.sampled_from([1, 2]),
    caching=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
Answer = tuple[tuple[int, ...], bytes]


class Truth(dict[tuple[int, int], Answer]):
    """What each request must give. Hypothesis writes arguments out: this one shortly."""

    def __repr__(self) -> str:
        return f"{len(self)} answers"


def request(name: str, which: tuple[int, int]) -> EngineRequest:
    prompt, way = which
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, seed=100 * prompt + way, logprobs=3, **WAYS[way])
    return EngineRequest(request_id=name, prompt_token_ids=PROMPTS[prompt], sampling=sampling)


class Running:
    """An engine, and the answers to what it was asked.

    Owns: the engine, and the tokens and log-probabilities by request.
    """

    def __init__(self, model: str, engine: Engine) -> None:
        started = build_core(engine.config(model), lambda line: None, executor=UniprocExecutor("cpu"))
        self.client = InprocClient(started.core)
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.client.start(self.inbox.put, self.inbox.put)
        self.tokens: dict[str, list[int]] = {}
        self.values: dict[str, list[bytes]] = {}
        self.num_ended = 0

    def submit(self, wave: Sequence[tuple[int, int]]) -> None:
        names = [str(len(self.tokens) + i) for i in range(len(wave))]
        for name in names:
            self.tokens[name], self.values[name] = [], []
        self.client.submit(tuple(request(name, which) for name, which in zip(names, wave, strict=True)))

    def hear(self) -> None:
        """Take in what one step gave."""
        outputs = self.inbox.get(timeout=120)
        assert isinstance(outputs, EngineOutputs), outputs
        for delta in outputs.deltas:
            assert delta.error is None, delta.error
            self.tokens[delta.request_id] += delta.new_token_ids
            if delta.logprobs is not None:
                self.values[delta.request_id].append(np.ascontiguousarray(delta.logprobs.logprobs).tobytes())
            self.num_ended += delta.finish is not None

    def finish(self) -> None:
        while self.num_ended < len(self.tokens):
            self.hear()

    def answers(self) -> list[Answer]:
        """Of every request, in the order of asking."""
        return [(tuple(self.tokens[name]), b"".join(self.values[name])) for name in self.tokens]


@pytest.fixture(scope="module")
def model() -> str:
    """A small Llama in bfloat16."""
    return str(checkpoints.tiny_llama(dtype="bfloat16"))


@pytest.fixture(scope="module")
def alone(model: str) -> Truth:
    """Each request's answer when it is the only one its engine has in hand, and nothing was computed before."""
    engine = Running(model, Engine(caching=False))
    try:
        for which in ALL:
            engine.submit([which])
            engine.finish()
        found = Truth(zip(ALL, engine.answers(), strict=True))
    finally:
        engine.client.close()
    assert len({tokens for tokens, _ in found.values()}) > len(ALL) // 2, "requests that can be told apart"
    return found


def check(model: str, engine: Engine, waves: Sequence[Sequence[tuple[int, int]]], alone: Truth) -> int:
    """Waves come one engine step apart. Returns how often a request was preempted."""
    running = Running(model, engine)
    try:
        for wave in waves:
            running.submit(wave)
            running.hear()
        running.finish()
        preemptions: int = running.client.call("stats").preemptions
    finally:
        running.client.close()
    asked = [which for wave in waves for which in wave]
    for which, (tokens, values) in zip(asked, running.answers(), strict=True):
        assert tokens == alone[which][0], which
        assert values == alone[which][1], f"{which}: other log-probabilities"
    return preemptions


WAVES = st.lists(st.lists(st.sampled_from(ALL), min_size=1, max_size=12), min_size=1, max_size=5)
ONCE = settings(
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # an engine an example: too slow to shrink
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@settings(ONCE, max_examples=8)
@given(engine=ENGINES, waves=WAVES)
def test_a_request_is_the_same_to_the_bit_under_random_load(
    model: str, alone: Truth, engine: Engine, waves: list[list[tuple[int, int]]]
) -> None:
    check(model, engine, waves, alone)


@pytest.mark.slow
@settings(ONCE, max_examples=150)
@given(engine=ENGINES, waves=WAVES)
def test_a_request_is_the_same_to_the_bit_under_much_random_load(
    model: str, alone: Truth, engine: Engine, waves: list[list[tuple[int, int]]]
) -> None:
    check(model, engine, waves, alone)


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests_in_chunks_on_hits_are_the_same_to_the_bit(model: str, alone: Truth, depth: int) -> None:
    engine = Engine(blocks=14, chunk=20, depth=depth, threads=2)
    assert check(model, engine, [ALL[:15], ALL[15:], ALL[::3]], alone) > 0
