"""Loading a model: build on meta, check the checkpoint against it, then stream the weights in.

Promises: whatever is wrong with a checkpoint is found from headers, before weights are read, and named with its
file, tensor and likely cause (EXE-21); memory holds one copy of the weights and one tensor more; a model that comes
back is complete.
Does not know: file formats (see `models.weights`), or any architecture.
"""

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from octavo.attention.api import Backend
from octavo.base.errors import LoadError
from octavo.base.kvspec import KVSpec
from octavo.config.facts import DeviceFacts, ModelFacts
from octavo.distributed.context import ParallelContext
from octavo.models.build import (
    BuildContext,
    Placeable,
    Target,
    WeightMap,
    build_context,
    build_model,
    finish,
    place,
    wanted,
)
from octavo.models.registry import architectures, resolve
from octavo.models.weights import StoredTensor, open_checkpoint

Progress = Callable[[str], None]

_DUMMY_STD = 0.02  # what most models are initialized with
_PROGRESS_BYTES = 512 << 20  # between two lines
_QUANTIZED_ENDINGS = (
    ".qweight",
    ".qzeros",
    ".scales",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".absmax",
)


def _silent(line: str) -> None:
    """No progress is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and what loading it found out.

    `weight_bytes` are this rank's parameters and tables; `specs` are the attention layers' own, by layer id.
    """

    model: nn.Module  # satisfies models.build.Model
    specs: tuple[KVSpec, ...]
    weight_bytes: int
    seconds: float
    backend: Backend
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """What a model would need, found without its weights (REQ-18)."""

    specs: tuple[KVSpec, ...]
    weight_bytes: int
    backend: Backend


def load_model(
    facts: ModelFacts,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    device_facts: DeviceFacts,
    max_model_len: int,
    parallel: ParallelContext | None = None,
    load_format: str = "auto",
    attention_backend: str | None = None,
    block_size: int | None = None,
    plugins: tuple[str, ...] | None = (),
    seed: int = 0,
    progress: Progress = _silent,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadedModel:
    """Build `facts`' model on `device` and fill it: from its files, or with random values for load format "dummy".

    Raises `LoadError` for a checkpoint that is incomplete, damaged or does not fit the architecture, and
    `ConfigError` for settings that cannot be served.
    """
    started = clock()
    ctx = _meta_context(facts, dtype, device_facts, parallel, max_model_len, attention_backend, block_size, plugins)
    model = build_model(ctx)
    notes: tuple[str, ...] = ()
    places: Sequence[tuple[StoredTensor, Target]] = ()
    if load_format != "dummy":
        weight_map = _weight_map(facts, plugins)
        stored = open_checkpoint(facts, weight_map.gguf, load_format)
        places, notes = check_checkpoint(model, facts, weight_map, stored)
    for note in notes:
        progress(f"warning: {note}")
    model.to_empty(device=torch.device(device))
    weight_bytes = tensor_bytes(model)
    if load_format == "dummy":
        fill_randomly(model, seed)
    else:
        _stream(model, places, ctx.dtype, progress)
    finish(model)
    return LoadedModel(
        model=model,
        specs=_specs(model),
        weight_bytes=weight_bytes,
        seconds=clock() - started,
        backend=ctx.attention.backend,
        notes=notes,
    )


def build_meta(
    facts: ModelFacts,
    *,
    dtype: torch.dtype | str,
    device_facts: DeviceFacts,
    max_model_len: int,
    parallel: ParallelContext | None = None,
    attention_backend: str | None = None,
    block_size: int | None = None,
    plugins: tuple[str, ...] | None = (),
) -> MetaModel:
    """What the model needs on a device, from the layers themselves, without reading weights or using memory."""
    ctx = _meta_context(facts, dtype, device_facts, parallel, max_model_len, attention_backend, block_size, plugins)
    model = build_model(ctx)
    return MetaModel(specs=_specs(model), weight_bytes=tensor_bytes(model), backend=ctx.attention.backend)


def _meta_context(
    facts: ModelFacts,
    dtype: torch.dtype | str,
    device_facts: DeviceFacts,
    parallel: ParallelContext | None,
    max_model_len: int,
    attention_backend: str | None,
    block_size: int | None,
    plugins: tuple[str, ...] | None,
) -> BuildContext:
    resolve(facts.architecture, architectures(plugins))  # an unknown architecture is said before anything else
    return build_context(
        facts,
        dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        device="meta",
        device_facts=device_facts,
        parallel=ParallelContext.single() if parallel is None else parallel,
        max_model_len=max_model_len,
        attention_backend=attention_backend,
        block_size=block_size,
        plugins=plugins,
    )


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, on any device, meta included."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)


def _specs(model: nn.Module) -> tuple[KVSpec, ...]:
    return tuple(layer.spec for layer in model.attention_layers)  # type: ignore[union-attr]


def _weight_map(facts: ModelFacts, plugins: tuple[str, ...] | None) -> WeightMap:
    found: WeightMap = resolve(facts.architecture, architectures(plugins)).weight_map(facts)
    return found


# ---- the checkpoint against the model -----------------------------------------------------------


def check_checkpoint(
    model: nn.Module, facts: ModelFacts, weight_map: WeightMap, stored: Iterable[StoredTensor]
) -> tuple[list[tuple[StoredTensor, Target]], tuple[str, ...]]:
    """Where each tensor goes, and warnings about those that go nowhere; nothing is read. `model` is on meta.

    Raises `LoadError` when a tensor is missing, of a wrong shape, or not made of floats.
    """
    missing = set(wanted(model))
    places: list[tuple[StoredTensor, Target]] = []
    extra: list[str] = []
    for tensor in stored:
        target = weight_map.target(tensor.name)
        if target is None:
            continue
        if target in missing:
            _check_one(model, facts, tensor, target)
            missing.discard(target)
            places.append((tensor, target))
        elif _takes(model, target, tensor.shape):
            places.append((tensor, target))
        else:
            extra.append(tensor.stored_name)
    if missing:
        raise LoadError(_missing_message(facts, weight_map, missing, extra))
    return places, (_extra_message(facts, extra),) if extra else ()


def _check_one(model: nn.Module, facts: ModelFacts, tensor: StoredTensor, target: Target) -> None:
    where = f"tensor {tensor.stored_name!r} in {tensor.file.path}"
    if not tensor.is_float:
        hint = "the weights look quantized, but config.json has no quantization_config"
        raise LoadError(f"{where} has type {tensor.dtype}, but {facts.architecture} needs floats there: {hint}")
    try:  # on meta this compares shapes and moves nothing
        place(model, target, torch.empty(tensor.shape, device="meta"))
    except LoadError as error:
        why = str(error).partition("does not fit: ")[2] or str(error)
        raise LoadError(f"{where} does not fit {facts.architecture}: {why} (config.json of another model?)") from None


def _takes(model: nn.Module, target: Target, shape: tuple[int, ...]) -> bool:
    """True when a module accepts this tensor although it needs none, such as GGUF's rotary divisors."""
    try:  # with real memory, which nothing writes to: such a module may compute with the values at once
        if not isinstance(model.get_submodule(target.parameter.rpartition(".")[0]), Placeable):
            return False
        place(model, target, torch.empty(shape))
    except (AttributeError, LoadError):
        return False
    return True


def _missing_message(facts: ModelFacts, weight_map: WeightMap, missing: set[Target], extra: list[str]) -> str:
    names = sorted(_checkpoint_name(target, weight_map) for target in missing)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if any(name.endswith(_QUANTIZED_ENDINGS) for name in extra):
        why = "its tensors look quantized, but config.json has no quantization_config"
    elif extra:
        why = (
            f"it has others that {facts.architecture} does not know, such as {extra[0]}: config.json of another model?"
        )
    else:
        why = "an interrupted download? fetch it again"
    return f"{facts.source} lacks {len(names)} tensors that {facts.architecture} needs: {shown} ({why})"


def _extra_message(facts: ModelFacts, extra: list[str]) -> str:
    shown = ", ".join(sorted(extra)[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
    return f"{len(extra)} tensors of the checkpoint have no place in {facts.architecture} and were left out: {shown}"


def _checkpoint_name(target: Target, weight_map: WeightMap) -> str:
    """The checkpoint's name of what goes to `target`."""
    module, _, ending = target.parameter.rpartition(".")
    parent, _, ours = module.rpartition(".")
    for leaf, fused in weight_map.fused.items():
        if fused == (ours, target.shard):
            return f"{parent}.{leaf}.{ending}"
    return target.parameter


# ---- filling ------------------------------------------------------------------------------------


def _stream(
    model: nn.Module, places: Sequence[tuple[StoredTensor, Target]], dtype: torch.dtype, progress: Progress
) -> None:
    total = sum(tensor.size for tensor, _ in places)
    done, said = 0, 0
    for tensor, target in places:
        place(model, target, tensor.read(dtype))
        tensor.forget()
        done += tensor.size
        if done - said >= _PROGRESS_BYTES:
            said = done
            progress(f"weights: {done / total:.0%} of {total / 2**30:.1f} GiB read")


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Small random weights, the same for the same seed whatever the order; norms are 1 and biases 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                parameter.normal_(0.0, _DUMMY_STD, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
