"""One device: its weights, its KV memory, and one step at a time.

Promises: the stages load -> profile -> allocate -> warm_up -> step* -> stop, each answering with values; every
method must be called on one and the same thread.
Does not know: that thread, other devices, or who plans.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from octavo.attention.api import Backend
from octavo.base.errors import OctavoError
from octavo.base.kvspec import KVLayout, KVSpec, dtype_bytes
from octavo.base.params import SamplingParams
from octavo.base.step import PlanPart, StepPlan, StepResult
from octavo.config.facts import DeviceFacts, ModelFacts
from octavo.sampling.logprobs import LogprobsMode
from octavo.sampling.processors import LogitsProcessor
from octavo.worker import dummy
from octavo.worker.batch import InputBatcher
from octavo.worker.choose import SampleChooser
from octavo.worker.memory import KVMemory, peak_bytes, scratch_layout
from octavo.worker.runner import ContextBuilder, ModelRunner, RunnerParts
from octavo.worker.seams import (
    DataPart,
    Drafter,
    EagerForward,
    ForwardRunner,
    LateParts,
    NullDrafter,
    WatchedForward,
    WorkerModel,
)
from octavo.worker.table import RequestTable

PROFILE_TOKENS = 64  # measured on a CPU, where they are a good part of a start; a larger step's needs grow with tokens
LOGIT_BYTES = 16  # sampling scratch a logit: float32 twice, weights, a share of the sums
AGAIN_S = 0.5  # a measured step that took less is run again, to know how fast prompts are computed
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """The sizes that a worker's tables and buffers are made for."""

    facts: ModelFacts
    device: str
    max_model_len: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int = 0  # from which requests without one derive theirs
    sample_vocab_size: int | None = None  # ids from here on are never sampled; None: the model's whole vocabulary
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    native_sampling: bool = True  # on a CPU, where the core is there


class Loaded(Protocol):
    """What loading a model gives, by shape."""

    @property
    def model(self) -> Any: ...
    @property
    def specs(self) -> tuple[KVSpec, ...]: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def weight_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes that one step of the largest shape needs, and those that are left for KV beside it and the weights."""

    peak_bytes: int
    available_bytes: int
    tokens_per_s: float = 0.0  # of prompts, in the step that was measured
    notes: tuple[str, ...] = ()  # what a person should know of how the model runs


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeams:
    """What joins a worker from outside; the defaults are the null objects."""

    parts: tuple[DataPart, ...] = ()
    forward: ForwardRunner = field(default_factory=EagerForward)
    drafter: Drafter = field(default_factory=NullDrafter)
    processors: tuple[LogitsProcessor, ...] = ()


class NothingLate:
    """For plans without late parts.

    Owns: nothing.
    """

    def wait(self, names: Sequence[str]) -> tuple[PlanPart, ...]:
        return ()


class Worker:
    """Owns one device.

    `probe` says what the device has now.

    Owns: the loaded model, the KV memory and the runner, and what joins them.
    """

    def __init__(
        self,
        limits: WorkerLimits,
        *,
        probe: Callable[[], DeviceFacts],
        seams: WorkerSeams | None = None,
    ) -> None:
        self._limits = limits
        self._probe = probe
        self._seams = seams or WorkerSeams()
        self._device = torch.device(limits.device)
        self._bare = WorkerSeams(forward=self._seams.forward)  # for steps that nobody asked for
        self._loaded: Loaded | None = None
        self._runner: ModelRunner | None = None
        self._of: RunnerParts | None = None

    def load(self, loaded: Loaded) -> None:
        """Take a model whose weights are in."""
        self._loaded = loaded
        watched = WatchedForward(self._bare.forward, loaded.model.attention_layers, self._seams.parts)
        self._seams = replace(self._seams, forward=watched)

    def profile(self) -> StepMemory:
        """What the largest step needs beside weights and KV, and what is left for KV.

        On a CPU a smaller step is measured and scaled, so that starting stays quick; the vocabulary's share is
        computed, since logits exist only for rows that yield a token.
        """
        limits, facts, specs = self._limits, self._limits.facts, self._need_loaded().specs
        tokens = min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)
        measured_tokens = min(tokens, PROFILE_TOKENS) if self._device.type == "cpu" else tokens
        measured, seconds = self._measure(_split(measured_tokens, limits.max_model_len))
        measured = measured * tokens // measured_tokens
        heads = facts.num_heads + 2 * facts.num_kv_heads
        width = 4 * facts.hidden_size + 3 * facts.intermediate_size + 2 * heads * facts.head_dim
        least = tokens * width * max((dtype_bytes(spec.dtype) for spec in specs), default=4)
        logits = min(limits.max_num_seqs, tokens) * facts.vocab_size * LOGIT_BYTES
        forward = self._bare.forward
        peak = max(measured, least, forward.held_bytes) + logits
        forward.forget()
        available = max(0, self._probe().memory_available_bytes - peak)
        return StepMemory(
            peak_bytes=peak, available_bytes=available, tokens_per_s=measured_tokens / seconds, notes=forward.notes
        )

    def allocate(self, layout: KVLayout) -> None:
        """Reserve KV memory and bind the layers to it."""
        self._let_go()  # of an earlier memory, before the new one is reserved
        self._bare.forward.forget()
        self._of = self._compose(KVMemory(layout, self._device), self._seams)
        self._runner = ModelRunner(self._of)
        for part in self._seams.parts:
            part.bind(self._of.memory)

    def warm_up(self) -> None:
        """Run a small prompt and a decode step, so that the first request is not slower than the second."""
        of = self._need_runner_parts()
        layout = of.memory.layout
        length = min(WARM_UP_TOKENS, self._limits.max_num_batched_tokens, self._limits.max_model_len - 1)
        if length > 0 and dummy.blocks_used(layout, (length,)) <= layout.num_blocks:
            # Slots and features of its own, but the real steps' buffers and plans: a runner may capture them now.
            bare = self._compose(of.memory, self._bare)
            runner = ModelRunner(replace(bare, batcher=of.batcher, contexts=of.contexts))
            runner.step(dummy.prompt_plan(layout, (length,), SamplingParams(top_p=0.9)), NothingLate())
            runner.step(dummy.decode_plan(layout, (length,)), NothingLate())
        of.memory.make_ready()

    def step(self, plan: StepPlan, late: LateParts) -> StepResult:
        """Compute one plan."""
        if self._runner is None:
            raise RuntimeError("a step was submitted before KV memory was allocated")
        return self._runner.step(plan, late)

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """An administrative call between steps. Raises `OctavoError` for an unknown one, naming those there are."""
        calls: dict[str, Callable[..., Any]] = {"ping": lambda: "pong", "memory": self._memory}
        calls["handshake"] = lambda: {part.name: dict(part.handshake()) for part in self._seams.parts}
        for part in self._seams.parts:
            calls |= {f"{part.name}.{name}": answer for name, answer in part.calls().items()}
        if method not in calls:
            raise OctavoError(f"the worker has no call {method!r}; it has {', '.join(sorted(calls))}")
        return calls[method](**args)

    def stop(self) -> None:
        """Close the parts and let everything go; may be called twice."""
        if self._loaded is not None:
            for part in self._seams.parts:
                part.close()
        self._loaded = None
        self._let_go()
        self._bare.forward.forget()

    # ---- inside ---------------------------------------------------------------------------------

    def _let_go(self) -> None:
        if self._of is not None:
            self._of.memory.close()
        self._runner = self._of = None

    def _memory(self) -> dict[str, int]:
        weights = self._loaded.weight_bytes if self._loaded else 0
        kv = self._of.memory.layout.total_bytes if self._of else 0
        return {"weight_bytes": weights, "kv_bytes": kv, "available_bytes": self._probe().memory_available_bytes}

    def _need_loaded(self) -> Loaded:
        if self._loaded is None:
            raise RuntimeError("the worker has no model yet: call load first")
        return self._loaded

    def _need_runner_parts(self) -> RunnerParts:
        if self._of is None:
            raise RuntimeError("the worker has no KV memory yet: call allocate first")
        return self._of

    def _compose(self, memory: KVMemory, seams: WorkerSeams) -> RunnerParts:
        limits, loaded, layout = self._limits, self._need_loaded(), memory.layout
        sizes = [group.spec.block_size for group in layout.groups]
        vocab = limits.facts.vocab_size
        chooser = SampleChooser(
            max_num_seqs=limits.max_num_seqs,
            vocab_limit=min(vocab, limits.sample_vocab_size or vocab),
            seed=limits.seed,
            processors=seams.processors,
            mode=limits.logprobs_mode,
            native=limits.native_sampling and self._device.type == "cpu",
        )
        model: WorkerModel = loaded.model
        return RunnerParts(
            model=model,
            memory=memory,
            table=RequestTable(
                max_num_seqs=limits.max_num_seqs,
                max_model_len=limits.max_model_len,
                block_sizes=sizes,
                listeners=(chooser, *seams.parts),
            ),
            batcher=InputBatcher(max_num_tokens=limits.max_num_batched_tokens, block_sizes=sizes, device=self._device),
            contexts=ContextBuilder(
                [loaded.backend.builder(group.spec, self._device) for group in layout.groups], memory.bindings
            ),
            forward=seams.forward,
            chooser=chooser,
            drafter=seams.drafter,
            parts=seams.parts,
        )

    def _measure(self, lengths: tuple[int, ...]) -> tuple[int, float]:
        """Bytes that one step of prompts of these lengths needs at its peak, and how long it takes."""
        layout = scratch_layout(self._need_loaded().specs, lengths)
        runner = ModelRunner(self._compose(KVMemory(layout, self._device), self._bare))
        sampling = SamplingParams(top_p=0.9)
        runner.step(dummy.prompt_plan(layout, (1,), sampling), NothingLate())  # what is made once is no part of a step
        runner.step(dummy.free_plan(layout, 1), NothingLate())
        plan = dummy.prompt_plan(layout, lengths, sampling)

        took = 0.0

        def run() -> None:
            nonlocal took
            began = time.perf_counter()
            runner.step(plan, NothingLate())
            took = time.perf_counter() - began

        peak = peak_bytes(run, self._device)
        if took < AGAIN_S:  # the first time is slower than any later one, and where that is short it is most of it
            runner.step(dummy.free_plan(layout, len(lengths)), NothingLate())
            run()
        return max(0, peak - layout.total_bytes), max(took, 1e-9)


def _split(tokens: int, longest: int) -> tuple[int, ...]:
    """`tokens` as rows of at most `longest` tokens."""
    full, rest = divmod(tokens, longest)
    return (longest,) * full + ((rest,) if rest else ())
