"""What control asks of the data plane: the one bridge between the two.

Promises: everything the engine core calls; arguments and answers are values without tensors.
Does not know: processes, devices, or how a step is computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.base.kvspec import KVLayout, KVSpec
from octavo.base.step import PlanPart, StepPlan, StepResult
from octavo.config.facts import DeviceFacts, ModelFacts
from octavo.config.quantization import QuantPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Everything a worker is started with; resolved, so nothing here is None or 'auto' but where said."""

    facts: ModelFacts
    dtype: str
    load_format: str
    block_size: int | None  # None: the attention backend's preferred size
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    device: str
    attention_backend: str | None
    seed: int
    quantization: QuantPlan | None = None  # None: floats where the checkpoint can be had so
    plugins: tuple[str, ...] | None = ()  # installed packages that may bring architectures and backends; None: all
    weight_cache: str | None = None  # folder of packed weights; None: neither read nor written
    weight_cache_bytes: int = 0  # that the folder may hold
    sample_vocab_size: int | None = None  # ids from here on are never sampled; None: the model's whole vocabulary
    logprobs_mode: str = "raw_logprobs"  # one of `sampling.logprobs.LogprobsMode`
    kv_cache_dtype: str = "auto"  # the type that is computed in; or "bfloat16", "fp8", "int8"
    logits_processors: tuple[str, ...] = ()  # "module:Class" each, besides those that `plugins` bring
    kernels: str = "auto"  # or "reference", or a level of the native core
    features: Mapping[str, Any] = field(default_factory=dict)  # options of those that are asked for, by feature


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What loading gave: the layers' own KV specs by layer id, bytes, and what filled the seams."""

    specs: tuple[KVSpec, ...]
    weight_bytes: int
    seconds: float
    attention_backend: str
    source: str = ""  # where weights were read from, for people
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """Memory after loading: what one step of the largest shape needs, and what is left."""

    peak_activation_bytes: int
    available_bytes: int  # that KV memory may take, weights and the peak already subtracted
    seconds: float
    prompt_tokens_per_s: float = 0.0  # in a step of a few prompts; 0: not measured
    notes: tuple[str, ...] = ()  # what a person should know of how the model runs


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for the step; raises `EngineDead` when the worker died."""

    def done(self) -> bool:
        """True when `result()` returns at once."""

    def supply(self, parts: Sequence[PlanPart]) -> None:
        """Hand over the plan's late parts; the runner waits for them before sampling."""


class Executor(Protocol):
    """One worker or many, looking like one."""

    def probe(self) -> DeviceFacts:
        """Facts of the device; callable before `load`."""

    def describe(self, config: WorkerConfig) -> LoadReport:
        """What `load` would give, from the layers themselves, without reading weights or using memory (REQ-18)."""

    def load(self, config: WorkerConfig, progress: Callable[[str], None]) -> LoadReport:
        """Build the model and read its weights."""

    def profile(self) -> ProfileReport:
        """Measure one step of the largest shape."""

    def allocate(self, layout: KVLayout) -> None:
        """Reserve KV memory and bind the layers to it."""

    def warm_up(self) -> float:
        """Run small steps so that the first request is not slower than the second; seconds."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step; steps run in the order they are submitted."""

    def call(self, method: str, **args: Any) -> Any:
        """An administrative call, run between steps on every worker; the first worker's answer."""

    def healthy(self) -> bool:
        """False once a worker is gone; from any thread."""

    def progress(self) -> tuple[int, float]:
        """Steps and calls done so far, and the processor time in seconds of the threads that do them; from any thread.

        Whoever watches tells a long step from one that hangs by it (EXE-3).
        """

    def stop(self) -> None:
        """End all workers and free everything; may be called twice."""
