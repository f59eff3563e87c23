"""Control-side composition root: facts -> configuration -> weights -> layout -> scheduler and core.

Promises: cheap checks come before slow ones; each stage reports one line with seconds and bytes; decisions that
need a measurement (context length, number of blocks) are values returned, never written into the configuration.
Does not know: tensors; the executor comes by name from a registry.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Final

from octavo.base.errors import ConfigError
from octavo.base.kvspec import KVLayout, KVSpec
from octavo.base.phases import Enter, Phases
from octavo.config.architectures import PLUGIN_GROUP
from octavo.config.facts import DeviceFacts, ModelFacts, read_model_facts
from octavo.config.quantization import NONE, plan_quantization
from octavo.config.resolve import Resolved, resolve
from octavo.config.schema import DeviceConfig, EngineConfig
from octavo.engine.core import EngineCore
from octavo.executor.api import Executor, LoadReport, ProfileReport, WorkerConfig
from octavo.kvcache.groups import FitReport, blocks_needed, fit_report, hash_block_size, longest_context, plan_layout
from octavo.kvcache.hashing import make_hasher
from octavo.kvcache.holders import Holders, TakeEvents
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.policies import PolicyRegistry, block_policies
from octavo.plugins import features
from octavo.plugins.features import Active, ControlContext
from octavo.plugins.registry import Registry, names_of
from octavo.scheduler.apply import ResultApplier
from octavo.scheduler.limits import SchedulerLimits, builtin_constraints
from octavo.scheduler.order import make_order
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.seams import ControlPart

Progress = Callable[[str], None]
HANDSHAKE = "handshake"  # the call that every worker answers
MIN_CONTEXT = 16  # tokens; a shorter context is an error of memory, not a setting


EXECUTORS: Final = {"uni": "octavo.executor.uniproc:UniprocExecutor"}
EXECUTOR_GROUP: Final = "octavo.executors"  # entry points of packages that bring more


def executor_class(name: str = "uni", plugins: tuple[str, ...] | None = ()) -> Callable[..., Executor]:
    """An executor by name, imported (EXE-2). Raises `ConfigError` for a name that is unknown or cannot be imported."""
    registry: Registry[Callable[..., Executor]] = Registry("executor", EXECUTORS)
    registry.discover(EXECUTOR_GROUP, plugins)
    return registry.load(name)


def make_executor(config: DeviceConfig, plugins: tuple[str, ...] | None) -> Executor:
    """The executor that the options name, for the device that they name; nothing is loaded yet."""
    return executor_class(config.distributed_executor_backend, plugins)(config.device, plugins=plugins)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupReport:
    """What start-up found and decided; shown in the summary and sent to the front (OPS-5)."""

    model: str
    architecture: str
    dtype: str
    device: str
    attention_backend: str
    weight_bytes: int
    kv_bytes: int
    block_size: int
    num_kv_blocks: int  # that requests can use
    max_model_len: int
    concurrency: float  # requests of max_model_len that fit at once
    depth: int
    seconds: Mapping[str, float]
    notes: tuple[str, ...]
    decisions: tuple[tuple[str, str, str, str], ...]  # field, old, new, why
    hash_block_size: int = 0  # tokens hashed together for the prefix cache
    first_block_size: int = 0  # tokens in a block of the first group of layers

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of cache."""
        return self.num_kv_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedCore:
    """A core that is ready to step."""

    core: EngineCore
    report: StartupReport


def build_core(
    config: EngineConfig,
    progress: Progress,
    *,
    sources: Mapping[str, str] | None = None,
    parts: Sequence[ControlPart] = (),
    executor: Executor | None = None,
    sample_vocab_size: int | None = None,
    plugins: tuple[str, ...] | None = (),
    clock: Callable[[], float] = time.monotonic,
    enter: Enter | None = None,
) -> StartedCore:
    """Bring an engine up. `config.model.model` is a path by now.

    Raises `ConfigError` or `LoadError` in one sentence; the executor is stopped before that. `enter` hears of each phase.
    """
    if config.model.model is None:
        raise ConfigError("no model was given; name a folder, a GGUF file or a model to pull.")
    phases = Phases("configuration", tell=enter)
    facts = read_model_facts(config.model.model, more=partial(names_of, PLUGIN_GROUP, plugins))
    executor = executor or make_executor(config.device, plugins)
    try:
        phases.enter("looking at the device")
        device = executor.probe()
        features.check(config)
        asked = features.active(config.features)
        resolved = resolve(config, facts, _device_beside(asked, device), sources)
        worker = worker_config(resolved.config, facts, device, sample_vocab_size, plugins)
        policies = block_policies(plugins)
        _check_policies(policies, executor.describe(worker).specs)
        phases.enter("loading weights")
        loaded = executor.load(worker, progress)
        plan = worker.quantization
        kept = "" if plan is None or plan.method == NONE else f" as {plan.text}"
        took_s = phases.now().seconds
        progress(f"weights: {size_text(loaded.weight_bytes)}{kept} from {loaded.source} in {took_s:.1f} s")
        phases.enter("measuring a step")
        profile = executor.profile()
        loaded = replace(loaded, notes=(*loaded.notes, *profile.notes))
        layout, max_len = decide_layout(
            resolved.config,
            loaded,
            _profile_beside(asked, profile),
            device,
            fit_length=config.model.max_model_len is None,
        )
        phases.enter("reserving the KV cache")
        executor.allocate(layout)
        phases.enter("warming up")
        executor.warm_up()
        progress(f"KV cache: {size_text(layout.total_bytes)} reserved; warm-up {phases.now().seconds:.1f} s")
        phases.enter("putting the engine together")
        measured = [each.feature.measure(each.options, executor.call, profile.prompt_tokens_per_s) for each in asked]
        core = _assemble(resolved.config, layout, max_len, executor, parts, clock, asked, measured, policies)
        notes = [each.feature.notes(each.options, layout, found) for each, found in zip(asked, measured, strict=True)]
        report = _report(resolved, facts, device, loaded, layout, max_len, phases.seconds(), notes)
        return StartedCore(core=core, report=report)
    except BaseException:
        executor.stop()
        raise


def worker_config(
    config: EngineConfig,
    facts: ModelFacts,
    device: DeviceFacts,
    sample_vocab_size: int | None = None,
    plugins: tuple[str, ...] | None = (),
) -> WorkerConfig:
    """A worker's share of a resolved configuration."""
    return WorkerConfig(
        facts=facts,
        dtype=config.model.dtype,
        load_format=config.model.load_format,
        weight_cache=_weight_cache(config.model.weight_cache),
        weight_cache_bytes=config.model.weight_cache_size,
        block_size=config.cache.block_size,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        max_model_len=_set(config.model.max_model_len),
        max_num_seqs=_set(config.scheduler.max_num_seqs),
        max_num_batched_tokens=_set(config.scheduler.max_num_batched_tokens),
        num_threads=_set(config.device.num_threads),
        device=config.device.device,
        attention_backend=config.device.attention_backend,
        seed=config.model.seed,
        quantization=plan_quantization(config.model.quantization, facts, device),
        plugins=plugins,
        sample_vocab_size=sample_vocab_size,
        logprobs_mode=config.model.logprobs_mode,
        kernels=config.device.kernels,
        logits_processors=config.plugins.logits_processors or (),
        features=config.features,
    )


def _weight_cache(option: str) -> str | None:
    """The folder; "auto" is one by now wherever there is a cache folder (see `serving.startup`)."""
    return None if option in ("auto", "off") else option


def _set(value: int | None) -> int:
    assert value is not None, "config.resolve sets every value that a worker needs"
    return value


def decide_layout(
    config: EngineConfig, loaded: LoadReport, profile: ProfileReport, device: DeviceFacts, *, fit_length: bool
) -> tuple[KVLayout, int]:
    """The cache's layout and the context length it is served with (REQ-17).

    With `fit_length` (the user did not ask for a length) the context is lowered to what fits; else a length that
    does not fit is an error.
    """
    max_len, batched = _set(config.model.max_model_len), _set(config.scheduler.max_num_batched_tokens)
    blocks = config.cache.num_kv_blocks
    budget = kv_budget(config, loaded, profile, device) if blocks is None else None

    def plan(budget_bytes: int | None, num_blocks: int | None) -> KVLayout:
        return plan_layout(
            loaded.specs,
            budget_bytes=budget_bytes,
            num_blocks=num_blocks,
            max_model_len=max_len,
            max_batched_tokens=batched,
            window_as_full=not config.cache.hybrid_kv_cache,
            order=config.cache.kv_cache_layout,
        )

    # The null block is ours: a user who asks for N blocks can use N.
    layout = plan(budget, None if blocks is None else blocks + 1)
    most = _set(config.scheduler.max_num_seqs) * blocks_needed(layout, max_len, batched) + 1
    if blocks is None and layout.num_blocks > most:  # more would never be touched
        layout = plan(None, most)
    if layout.total_bytes > profile.available_bytes:
        fits = profile.available_bytes // layout.block_bytes - 1
        remedy = f"use at most {fits}" if fits > 0 else "free some memory or take a smaller model"
        raise ConfigError(
            f"--num-kv-blocks {blocks} takes {size_text(layout.total_bytes)}, but {size_text(profile.available_bytes)} are left "
            f"beside the model; {remedy}."
        )
    if fit_length:
        longest = longest_context(layout, limit=max_len, max_batched_tokens=batched)
        max_len = longest if longest >= MIN_CONTEXT else max_len
    return layout, fit_report(layout, max_model_len=max_len, max_batched_tokens=batched).max_model_len


def kv_budget(config: EngineConfig, loaded: LoadReport, profile: ProfileReport, device: DeviceFacts) -> int:
    """Bytes for KV blocks: what was asked for, within what is left after weights and one step."""
    cache = config.cache
    if cache.kv_cache_memory is not None:
        wanted = cache.kv_cache_memory
    else:
        share = cache.gpu_memory_utilization or 0.0
        wanted = int(device.memory_total_bytes * share) - loaded.weight_bytes - profile.peak_activation_bytes
    budget = min(wanted, profile.available_bytes)
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: weights take {size_text(loaded.weight_bytes)} and one step "
            f"{size_text(profile.peak_activation_bytes)}; raise --gpu-memory-utilization, lower "
            "--max-num-batched-tokens, or take a smaller model."
        )
    return budget


def _assemble(
    config: EngineConfig,
    layout: KVLayout,
    max_len: int,
    executor: Executor,
    parts: Sequence[ControlPart],
    clock: Callable[[], float],
    asked: Sequence[Active],
    measured: Sequence[Mapping[str, float]],
    policies: PolicyRegistry,
) -> EngineCore:
    sched, batched = config.scheduler, _set(config.scheduler.max_num_batched_tokens)
    hasher = make_hasher(config.cache.prefix_hash)
    hash_block = hash_block_size(layout)
    kv = KVCacheManager(
        layout,
        hasher_block_size=hash_block,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        watermark_blocks=ceil(sched.kv_watermark * (layout.num_blocks - 1)),
        max_model_len=max_len,
        max_batched_tokens=batched,
        record_events=config.cache.kv_events,
        policies=policies,
    )
    depth = 2 if sched.async_scheduling else 1
    for each, found in zip(asked, measured, strict=True):
        context = ControlContext(
            layout=layout,
            hash_block_size=hash_block,
            blocks_of=kv.blocks,
            clock=clock,
            cache=config.cache,
            measured=found,
        )
        parts = (*parts, *each.feature.control(each.options, context))
    _introduce(parts, executor)
    limits = SchedulerLimits(
        max_num_seqs=_set(sched.max_num_seqs),
        max_num_active_seqs=_set(sched.max_num_active_seqs),
        max_num_scheduled_tokens=_set(sched.max_num_scheduled_tokens),
        max_num_batched_tokens=batched,
        max_model_len=max_len,
        long_prefill_token_threshold=sched.long_prefill_token_threshold,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    scheduler = Scheduler(
        limits=limits,
        kv=kv,
        order=make_order(sched.scheduling_policy, aging_s=sched.priority_aging_s, clock=clock),
        parts=tuple(parts),
        constraints=builtin_constraints(limits, hash_block),
        hasher=hasher,
        hash_block_size=hash_block,
        num_groups=len(layout.groups),
        clock=clock,
        debug=sched.check_invariants,
    )
    return EngineCore(
        scheduler, ResultApplier(scheduler), executor, depth=depth, take_events=_events(config, kv, parts)
    )


def _check_policies(policies: PolicyRegistry, specs: Sequence[KVSpec]) -> None:
    """Before weights are read: a kind of cache that nobody manages cannot be served (REQ-16)."""
    try:
        policies.check(specs)
    except ValueError as error:
        raise ConfigError(f"the model cannot be served: {error}.") from None


def _introduce(parts: Sequence[ControlPart], executor: Executor) -> None:
    """Tell each of the scheduler's halves what its other half offers for other engines to know (PDX-3)."""
    if parts:
        offered = executor.call(HANDSHAKE)
        for part in parts:
            part.handshake(offered.get(part.name, {}))


def _device_beside(asked: Sequence[Active], device: DeviceFacts) -> DeviceFacts:
    """The device with the memory that features leave to the KV cache. Raises `ConfigError` when that is nothing."""
    taken = sum(each.feature.reserve(each.options, device.memory_available_bytes) for each in asked)
    return replace(device, memory_available_bytes=device.memory_available_bytes - taken)


def _profile_beside(asked: Sequence[Active], profile: ProfileReport) -> ProfileReport:
    """The same of what was measured."""
    taken = sum(each.feature.reserve(each.options, profile.available_bytes) for each in asked)
    return replace(profile, available_bytes=profile.available_bytes - taken)


def _events(config: EngineConfig, kv: KVCacheManager, parts: Sequence[ControlPart]) -> TakeEvents:
    """What can be found without computing: in the cache, or by a part. Nothing is counted where nobody is told."""
    if not config.cache.kv_events or not parts:
        return kv.take_events
    return Holders([kv.take_events, *(part.take_events for part in parts)]).take


def _report(
    resolved: Resolved,
    facts: ModelFacts,
    device: DeviceFacts,
    loaded: LoadReport,
    layout: KVLayout,
    max_len: int,
    seconds: Mapping[str, float],
    notes: Sequence[tuple[str, ...]],
) -> StartupReport:
    config = resolved.config
    batched = _set(config.scheduler.max_num_batched_tokens)
    fit = fit_report(layout, max_model_len=max_len, max_batched_tokens=batched)
    decisions = [(d.field, _text(d.old), _text(d.new), d.why) for d in resolved.decisions]
    if max_len != config.model.max_model_len:
        why = f"longest context that {size_text(layout.total_bytes)} of KV cache hold"
        decisions.append(("model.max_model_len", _text(config.model.max_model_len), _text(max_len), why))
    return StartupReport(
        model=facts.source,
        architecture=facts.architecture,
        dtype=config.model.dtype,
        device=device.name,
        attention_backend=loaded.attention_backend,
        weight_bytes=loaded.weight_bytes,
        kv_bytes=layout.total_bytes,
        block_size=min(g.spec.block_size for g in layout.groups),
        num_kv_blocks=layout.num_blocks - 1,
        max_model_len=max_len,
        concurrency=fit.concurrency,
        depth=2 if config.scheduler.async_scheduling else 1,
        seconds=dict(seconds),
        notes=(*loaded.notes, *_groups_note(layout, fit), *(line for lines in notes for line in lines)),
        decisions=tuple(decisions),
        hash_block_size=hash_block_size(layout),
        first_block_size=layout.groups[0].spec.block_size,
    )


def _groups_note(layout: KVLayout, fit: FitReport) -> tuple[str, ...]:
    """The plan of KV memory, where it is not one group without a byte lost (REQ-13)."""
    return fit.lines if len(layout.groups) > 1 or layout.padding_share >= 0.001 else ()


def _text(value: object) -> str:
    return "not set" if value is None else str(value)


def size_text(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
