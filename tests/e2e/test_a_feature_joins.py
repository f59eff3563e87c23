"""A whole feature joins at the seams without an edit to the spine: it forbids every row its own last token.

Its control half needs tokens that may still be in flight, so its share of a plan comes late; its data half masks
the logits; its report comes back with the result. At depth 1 and 2 the text is the reference's.
"""

import queue

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.base.step import PlanPart, ResultPart
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.client import InprocClient
from octavo.engine.startup import build_core
from octavo.executor.host import HostedWorker, probe
from octavo.executor.uniproc import UniprocExecutor
from octavo.scheduler import seams as control_seams
from octavo.worker import seams as data_seams
from octavo.worker.worker import WorkerSeams
from tests.support import checkpoints

PROMPTS = [(5, 6, 7), (9, 10, 11, 12, 13), tuple(range(40, 75)), (100,)]
LENGTH = 24


class BanPlan(PlanPart, frozen=True):
    """The token that each sampling row must not get, in row order."""

    tokens: tuple[int, ...]


class BanReport(ResultPart, frozen=True):
    """How many rows were masked so far."""

    masked: int


class BanControl(control_seams.NullControlPart):
    """Owns: the requests of plans in flight, and the last report."""

    name = "ban"

    def __init__(self):
        self.rows, self.reported, self.late = {}, 0, 0

    def plan(self, builder):
        self.rows[builder.seq] = list(builder.rows)
        return control_seams.Late("BanPlan")

    def supply(self, plan):
        rows = self.rows.pop(plan.seq)
        self.late += 1
        return BanPlan(
            tuple(
                int(req.tokens[-1])
                for req, count in zip(rows, plan.batch.num_sampled_tokens, strict=True)
                if count
            )
        )  # fmt: skip

    def absorb(self, result):
        self.reported = result.part(BanReport).masked
        return control_seams.Absorbed()


class BanData(data_seams.NullDataPart):
    """Owns: how many rows it masked."""

    name = "ban"

    def __init__(self):
        self.masked = 0

    def mask(self, plan, batch, late):
        (part,) = (p for p in late if isinstance(p, BanPlan))
        self.masked += len(part.tokens)

        def forbid(logits):
            assert logits.shape[0] == len(part.tokens)
            logits[torch.arange(len(part.tokens)), list(part.tokens)] = -float("inf")

        return forbid if part.tokens else None

    def report(self):
        return BanReport(self.masked)


@torch.inference_mode()
def reference(path, prompt):
    """Greedy text in which no token follows itself."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = list(prompt)
    for _ in range(LENGTH):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        logits[tokens[-1]] = -float("inf")
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [64, 6])
def test_a_feature_with_both_halves_joins_the_engine(depth, num_blocks):
    path = checkpoints.tiny_llama()
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=64),
        cache=CacheConfig(num_kv_blocks=num_blocks, block_size=16),
        scheduler=SchedulerConfig(async_scheduling=depth == 2, max_num_batched_tokens=16),
        device=DeviceConfig(num_threads=1),
    )
    control, data = BanControl(), BanData()

    def make(worker_config):
        seams = WorkerSeams(parts=(data,))
        return HostedWorker(worker_config, probe("cpu"), prober=lambda: probe("cpu"), seams=seams)

    started = build_core(config, lambda line: None, parts=(control,), executor=UniprocExecutor("cpu", make=make))
    assert started.report.depth == depth
    client, inbox = InprocClient(started.core), queue.SimpleQueue()
    client.start(inbox.put, inbox.put)
    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    client.submit(
        tuple(EngineRequest(request_id=str(i), prompt_token_ids=p, sampling=sampling) for i, p in enumerate(PROMPTS))
    )
    got, left = {str(i): [] for i in range(len(PROMPTS))}, len(PROMPTS)
    while left:
        outputs = inbox.get(timeout=60)
        assert not isinstance(outputs, Exception), outputs
        for delta in outputs.deltas:
            got[delta.request_id] += delta.new_token_ids
            left -= delta.finish is not None
    preemptions = client.call("stats").preemptions
    client.close()
    for i, prompt in enumerate(PROMPTS):
        assert got[str(i)] == reference(path, prompt)
    assert control.late > 0
    assert control.reported == data.masked >= LENGTH * len(PROMPTS)
    if num_blocks == 6:
        assert preemptions > 0
