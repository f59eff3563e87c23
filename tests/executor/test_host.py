"""A tiny random Llama through the whole data plane, against Transformers (EXE-10..13, EXE-19, OUT-6, OUT-30)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.base.errors import OctavoError
from octavo.base.kvspec import KVLayout
from octavo.base.params import SamplingParams
from octavo.config.facts import read_model_facts
from octavo.executor.api import WorkerConfig
from octavo.executor.uniproc import UniprocExecutor
from octavo.kvcache.groups import plan_layout
from tests.support.checkpoints import tiny_llama, tiny_swa
from tests.support.plans import HandPlanner

MAX_LEN = 120


def config(folder: Path, **changes: object) -> WorkerConfig:
    fields: dict[str, object] = {
        "facts": read_model_facts(str(folder)),
        "dtype": "float32",
        "load_format": "auto",
        "block_size": 16,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 160,
        "num_threads": 1,
        "device": "cpu",
        "attention_backend": None,
        "seed": 0,
    }
    return WorkerConfig(**{**fields, **changes})  # type: ignore[arg-type]


class Data:
    """An executor with a model and KV memory."""

    def __init__(self, folder: Path, num_blocks: int = 40, **changes: object) -> None:
        self.executor = UniprocExecutor("cpu")
        self.lines: list[str] = []
        settings = config(folder, **changes)
        self.report = self.executor.load(settings, self.lines.append)
        self.profile = self.executor.profile()
        self.layout: KVLayout = plan_layout(
            self.report.specs,
            budget_bytes=None,
            num_blocks=num_blocks,
            max_model_len=settings.max_model_len,
            max_batched_tokens=settings.max_num_batched_tokens,
        )
        self.executor.allocate(self.layout)
        self.executor.warm_up()
        self.planner = HandPlanner(self.layout)

    def run(self, counts: dict[int, int], unsampled: tuple[int, ...] = ()) -> dict[int, list[int]]:
        result = self.executor.submit(self.planner.plan(counts, unsampled=unsampled)).result()
        assert not result.errors
        return {slot: result.tokens.row(i).tolist() for i, slot in enumerate(counts)}

    def decode(self, slots: list[int], steps: int) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {slot: [] for slot in slots}
        for _ in range(steps):
            for slot, tokens in self.run(dict.fromkeys(slots, 1)).items():
                out[slot] += tokens
        return out


class Reference:
    """Transformers' own model, greedy, one request at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0]

    def greedy(self, prompt: list[int], steps: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(steps):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


@pytest.fixture(scope="module", params=["llama", "sliding and full"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Data, Reference]]:
    folder = tiny_llama() if request.param == "llama" else tiny_swa(mixed=True, window=24)
    data = Data(folder)
    yield data, Reference(folder)
    data.executor.stop()


@pytest.fixture(autouse=True)
def empty_slots(pair: tuple[Data, Reference]) -> None:
    """Each test starts with all slots free."""
    planner = pair[0].planner
    for slot in tuple(planner._live):
        planner.leave(slot)


def test_greedy_tokens_are_those_of_transformers_through_chunks_reuse_and_preemption(
    pair: tuple[Data, Reference],
) -> None:
    data, reference = pair
    first, second, third = prompt(1, 37), prompt(2, 21), prompt(3, 18)
    expected = {0: reference.greedy(first, 14), 1: reference.greedy(second, 7), 2: reference.greedy(third, 5)}
    # a prompt in two chunks; the second request joins at the second chunk
    data.planner.enter(0, first)
    assert data.run({0: 20}, unsampled=(0,)) == {0: []}
    data.planner.enter(3, second)
    got = {slot: list(tokens) for slot, tokens in data.run({3: 21, 0: 17}).items()}
    for slot, tokens in data.decode([0, 3], 3).items():
        got[slot] += tokens
    assert got == {0: expected[0][:4], 3: expected[1][:4]}
    # one finishes and its slot is taken in the same plan; rows change their order; the first is preempted
    data.planner.leave(3)
    data.planner.enter(3, third)
    assert data.run({3: 18, 0: 1}) == {3: expected[2][:1], 0: expected[0][4:5]}
    data.planner.leave(0, preempted=True)
    assert data.decode([3], 2) == {3: expected[2][1:3]}
    # it comes back elsewhere with what it had, in two chunks
    data.planner.enter(1, first + expected[0][:5], prompt=len(first), resumed=True)
    assert data.run({1: 30, 3: 1}, unsampled=(1,)) == {1: [], 3: expected[2][3:4]}
    assert data.run({1: len(first) + 5 - 30}) == {1: expected[0][5:6]}
    assert data.decode([1], 8) == {1: expected[0][6:14]}


def test_two_steps_in_flight_give_the_same_tokens(pair: tuple[Data, Reference]) -> None:
    """Depth 2: the next plan is submitted before the last token is known here (EXE-13)."""
    data, reference = pair
    tokens = prompt(4, 12)
    data.planner.enter(2, tokens)
    plans = [data.planner.plan({2: 12}), *(data.planner.plan({2: 1}) for _ in range(7))]
    handles = [data.executor.submit(plan) for plan in plans]
    got = [int(h.result().tokens.row(0)[0]) for h in handles]
    assert got == reference.greedy(tokens, 8)


def test_logprobs_of_prompt_and_output_are_the_references_in_any_chunking(pair: tuple[Data, Reference]) -> None:
    """OUT-6."""
    data, reference = pair
    tokens = prompt(5, 30)
    params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2)
    logprobs = torch.log_softmax(reference.logits(tokens).double(), -1)
    for chunks in ([30], [1, 13, 16], [29, 1]):
        data.planner.enter(0, tokens, params)
        seen: dict[int, tuple[list[int], list[float]]] = {}
        for chunk in chunks:
            result = data.executor.submit(
                data.planner.plan({0: chunk}, unsampled=() if chunk is chunks[-1] else (0,))
            ).result()
            for part in result.prompt_logprobs:
                for j in range(len(part.token_ids)):
                    assert part.start + j not in seen
                    seen[part.start + j] = (part.token_ids[j].tolist(), part.logprobs[j].tolist())
        assert sorted(seen) == list(range(1, 30))
        for position, (ids, values) in seen.items():
            line = logprobs[position - 1]
            assert ids == [tokens[position], *line.topk(2).indices.tolist()]
            assert np.allclose(values, line[ids], atol=1e-4)
        assert result.logprobs is not None and result.logprobs.width.tolist() == [4]
        top = logprobs[-1].topk(3)
        assert result.logprobs.token_ids[0].tolist() == [top.indices[0], *top.indices]
        assert np.allclose(result.logprobs.logprobs[0, 1:], top.values, atol=1e-4)
        data.planner.leave(0)


def test_a_seeded_request_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(
    pair: tuple[Data, Reference],
) -> None:
    """OUT-4, OUT-30, SED-01."""
    data, _ = pair
    tokens, params = prompt(6, 10), SamplingParams(temperature=1.1, top_p=0.95, seed=42)
    data.planner.enter(0, tokens, params)
    alone = data.run({0: 10})[0] + data.decode([0], 9)[0]
    data.planner.leave(0)
    data.planner.enter(3, tokens, params, request_id="other")
    data.planner.enter(1, prompt(7, 33), SamplingParams(temperature=0.7))
    data.planner.enter(0, prompt(8, 5), SamplingParams(temperature=0.7, seed=1))
    together = data.run({1: 33, 3: 10, 0: 5})[3] + data.decode([0, 3, 1], 4)[3]
    data.planner.leave(3, preempted=True)
    data.planner.enter(2, tokens + together, params, prompt=10, resumed=True)
    together += data.run({2: 15, 0: 1})[2] + data.decode([2, 0], 4)[2]
    assert together == alone and len(set(alone)) > 2


def test_a_batch_of_nothing_and_an_unknown_call(pair: tuple[Data, Reference]) -> None:
    data, _ = pair
    result = data.executor.submit(data.planner.plan({})).result()
    assert len(result.tokens) == 0 and not result.errors
    assert data.executor.call("ping") == "pong"
    assert data.executor.call("memory")["kv_bytes"] == data.layout.total_bytes
    with pytest.raises(OctavoError, match="no call 'dance'; it has handshake, memory, ping"):
        data.executor.call("dance")
    assert data.executor.healthy()


def test_the_reports_say_what_was_found(pair: tuple[Data, Reference]) -> None:
    data, _ = pair
    assert len(data.report.specs) == 2 and data.report.weight_bytes > 100_000
    assert data.report.attention_backend
    assert data.profile.peak_activation_bytes > 4 * 512 * 16 and data.profile.available_bytes > 0
    assert data.profile.prompt_tokens_per_s > 0
