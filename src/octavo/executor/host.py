"""Data-side composition root: a worker from its configuration, answering in values that control understands.

Promises: the one place where loader, platform and worker meet; the worker's halves of features join here.
Does not know: threads or processes (see `uniproc`), or who plans.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from octavo import __version__
from octavo.base.kvspec import KVLayout
from octavo.base.step import StepPlan, StepResult
from octavo.config.facts import DeviceFacts, ModelFacts
from octavo.executor.api import LoadReport, ProfileReport, WorkerConfig
from octavo.models.build import BuildSettings
from octavo.models.contents import contents
from octavo.models.fingerprint import core_build
from octavo.models.loader import WeightSource, build_meta, load_model
from octavo.models.packed import PackedFolder, Writing
from octavo.ops.kernels import Kernels
from octavo.ops.kernels import choose as choose_kernels
from octavo.platforms import api as platforms
from octavo.plugins import features
from octavo.sampling.logprobs import LogprobsMode
from octavo.sampling.processors import LogitsProcessor, ProcessorContext, load_processors
from octavo.worker.recorded import RecordedForward
from octavo.worker.seams import DataPart, EagerForward, LateParts
from octavo.worker.worker import Worker, WorkerLimits, WorkerSeams

log = logging.getLogger(__name__)

Progress = Callable[[str], None]
ANY_KERNELS = Kernels()
NOT_COMPUTED = frozenset(  # keys of config.json: who wrote it, when a text ends, and how it was trained
    [
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "attention_dropout",
    ]
)
KV_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
KEEP_PATIENCE_S = 10.0  # how long a stop waits for packed weights that are being written


def probe(device: str, plugins: tuple[str, ...] | None = ()) -> DeviceFacts:
    """Facts of a device by kind; "auto" takes the best there is."""
    return platforms.probe(device, plugins)


def make_worker(config: WorkerConfig, parts: tuple[DataPart, ...] = ()) -> "HostedWorker":
    """A worker on the platform that `config.device` names, with the features that are installed and `parts`."""
    facts = probe(config.device, config.plugins)
    kernels = choose_kernels(config.kernels, facts.kind)
    forward = EagerForward() if kernels.make_tape is None else RecordedForward(kernels.make_tape)
    parts = (*parts, *_feature_parts(config, facts, kernels))
    return HostedWorker(
        config,
        facts,
        prober=lambda: probe(config.device, config.plugins),
        seams=WorkerSeams(parts=parts, forward=forward, processors=_processors(config, facts)),
        kernels=kernels,
    )


def _processors(config: WorkerConfig, device: DeviceFacts) -> tuple[LogitsProcessor, ...]:
    """Custom stations of the sampler."""
    vocab = config.facts.vocab_size
    context = ProcessorContext(
        vocab_size=min(vocab, config.sample_vocab_size or vocab),
        max_num_seqs=config.max_num_seqs,
        device=torch.device(device.kind),
    )
    return load_processors(config.logits_processors, config.plugins, context)


def _feature_parts(config: WorkerConfig, facts: DeviceFacts, kernels: Kernels) -> tuple[DataPart, ...]:
    """The worker's halves of the features that are asked for."""
    asked = features.active(config.features)
    if not asked:
        return ()
    context = features.DataContext(identity=kv_identity(config, facts, kernels))
    return tuple(part for each in asked for part in each.feature.data(each.options, context))


def kv_identity(config: WorkerConfig, device: DeviceFacts, kernels: Kernels) -> dict[str, str]:
    """All that a token's KV depends on besides the tokens before it, by name: equal values, equal KV.

    By what was chosen, not by what was asked for: an option left out and the same value given are one identity.
    """
    meta = build_meta(config.facts, build_settings(config, device, kernels))
    plan = config.quantization
    return {
        "version": __version__,
        "model": _digest(repr(_computed(config.facts))),
        "weights": _weights(config),
        "dtype": config.dtype,
        "KV dtype": _each(spec.dtype for spec in meta.specs),
        "block size": _each(spec.block_size for spec in meta.specs),
        "attention backend": meta.backend.name,
        "quantization": repr(None if plan is None else replace(plan, text="")),
        "kernels": _digest([sorted(kernels.forced), core_build()]),
    }


def _computed(facts: ModelFacts) -> ModelFacts:
    """What is computed of a model, without where it lies and what else its file says."""
    raw = {name: value for name, value in sorted(facts.raw.items()) if name not in NOT_COMPUTED}
    return replace(facts, source="", dtype="", bos_token_id=None, eos_token_ids=(), raw=raw)


def _each(values: Iterable[object]) -> str:
    """Different values, in order of their first."""
    return ", ".join(dict.fromkeys(map(str, values)))


def _weights(config: WorkerConfig) -> str:
    """By what is in their files: a copied checkpoint is the same one."""
    if config.load_format == "dummy":
        return _digest(["dummy", config.seed])
    kept = None if config.weight_cache is None else Path(config.weight_cache)
    return contents(Path(config.facts.source), kept=kept, num_threads=config.num_threads, say=log.info)[:16]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def describe(config: WorkerConfig) -> LoadReport:
    """The model built on the meta device: its layers' KV specs and the bytes of its weights."""
    began = time.perf_counter()
    device = probe(config.device, config.plugins)
    kernels = choose_kernels(config.kernels, device.kind)
    meta = build_meta(config.facts, build_settings(config, device, kernels))
    return LoadReport(
        specs=meta.specs,
        weight_bytes=meta.weight_bytes,
        seconds=time.perf_counter() - began,
        attention_backend=meta.backend.name,
    )


def build_settings(config: WorkerConfig, device: DeviceFacts, kernels: Kernels) -> BuildSettings:
    """How `config`'s model is built on a device."""
    return BuildSettings(
        dtype=getattr(torch, config.dtype),
        device_facts=device,
        max_model_len=config.max_model_len,
        attention_backend=config.attention_backend or kernels.attention_backend,
        block_size=config.block_size,
        kv_dtype=KV_DTYPES[config.kv_cache_dtype],
        forced_ops=kernels.forced,
        plugins=config.plugins,
        quantization=config.quantization,
    )


def weight_source(config: WorkerConfig) -> WeightSource:
    """Where `config`'s weights come from."""
    folder = config.weight_cache
    return WeightSource(
        load_format=config.load_format,
        seed=config.seed,
        packed=None if folder is None else PackedFolder(Path(folder), config.weight_cache_bytes),
        num_threads=config.num_threads,
    )


class HostedWorker:
    """A worker and its loader, with reports instead of tensors.

    Owns: the worker, and the writing of packed weights.
    """

    def __init__(
        self,
        config: WorkerConfig,
        device: DeviceFacts,
        *,
        prober: Callable[[], DeviceFacts],
        seams: WorkerSeams | None = None,
        kernels: Kernels = ANY_KERNELS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._device = device
        self._clock = clock
        self._kernels = kernels
        limits = WorkerLimits(
            facts=config.facts,
            device=config.device,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            seed=config.seed,
            sample_vocab_size=config.sample_vocab_size,
            logprobs_mode=LogprobsMode(config.logprobs_mode),
            native_sampling=not kernels.forced,
        )
        self._worker = Worker(limits, probe=prober, seams=seams)
        self._writing: Writing | None = None

    def load(self, progress: Progress) -> LoadReport:
        """Build the model and read its weights."""
        loaded = load_model(
            self._config.facts,
            build_settings(self._config, self._device, self._kernels),
            weight_source(self._config),
            progress=progress,
            clock=self._clock,
        )
        self._writing = loaded.writing
        self._worker.load(loaded)
        return LoadReport(
            specs=loaded.specs,
            weight_bytes=loaded.weight_bytes,
            seconds=loaded.seconds,
            attention_backend=loaded.backend.name,
            source=loaded.source,
            notes=(*self._kernels.notes, *loaded.notes),
        )

    def profile(self) -> ProfileReport:
        """Measure one step of the largest shape."""
        began = self._clock()
        memory = self._worker.profile()
        return ProfileReport(
            peak_activation_bytes=memory.peak_bytes,
            available_bytes=memory.available_bytes,
            seconds=self._clock() - began,
            prompt_tokens_per_s=memory.tokens_per_s,
            notes=memory.notes,
        )

    def allocate(self, layout: KVLayout) -> None:
        """Reserve KV memory and bind the layers to it."""
        self._worker.allocate(layout)

    def warm_up(self) -> float:
        """Run small steps; seconds."""
        began = self._clock()
        self._worker.warm_up()
        return self._clock() - began

    def step(self, plan: StepPlan, late: LateParts) -> StepResult:
        """Compute one plan."""
        return self._worker.step(plan, late)

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """An administrative call between steps."""
        return self._worker.call(method, args)

    def stop(self) -> None:
        """Let everything go."""
        if self._writing is not None:
            self._writing.stop(KEEP_PATIENCE_S)
            self._writing = None
        self._worker.stop()
