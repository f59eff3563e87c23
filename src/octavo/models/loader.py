"""Loading a model: build on meta, check the checkpoint against it, then stream the weights in.

Promises: whatever is wrong with a checkpoint is found from headers, before weights are read, and named with its
file, tensor and likely cause (EXE-21); memory holds the packed weights once and one layer more; a second start takes
the packed weights from a file, if there is one and it is right; a model that comes back is complete.
Does not know: file formats (see `models.weights`, `models.packed`), or any architecture.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from octavo.attention.api import Backend
from octavo.base.errors import LoadError
from octavo.base.kvspec import KVSpec
from octavo.config.facts import ModelFacts
from octavo.models.build import BuildContext, BuildSettings, WeightMap, WeightTarget, build_context, build_model
from octavo.models.checkpoint import check_checkpoint, separate_head
from octavo.models.filling import Filling, check, expects, materialize, model_state, restore_state, wanted, weight_bytes
from octavo.models.fingerprint import fingerprint
from octavo.models.packed import DamagedError, PackedFile, PackedFolder, Writing
from octavo.models.registry import architectures, resolve
from octavo.models.weights import StoredTensor, open_checkpoint
from octavo.quant.api import WrongKindError

Progress = Callable[[str], None]
Places = Sequence[tuple[StoredTensor, WeightTarget]]

_DUMMY_STD = 0.02  # what most models are initialized with
_RANDOM_ROWS = 256  # drawn from one seed
_PROGRESS_BYTES = 512 << 20  # between two lines
_AHEAD_BYTES = 64 << 20  # that the system is asked to read before they are needed
_WORTH_KEEPING_BYTES = 16 << 20  # smaller models load as fast from their own files


def _silent(line: str) -> None:
    """No progress is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where weights come from: the model's files ("auto", or their format's name), or random numbers ("dummy").

    `packed` is the folder of packed weights; None: neither read nor written.
    """

    load_format: str = "auto"
    seed: int = 0
    packed: PackedFolder | None = None
    num_threads: int = 1  # that read packed weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and what loading it found out.

    `weight_bytes` are this rank's packed weights and tables; `specs` are the attention layers' own, by layer id;
    `source` says where the weights came from. `writing` is under way when packed weights are being kept for the next
    start; they must not change before it ends.
    """

    model: nn.Module  # satisfies models.build.Model
    specs: tuple[KVSpec, ...]
    weight_bytes: int
    seconds: float
    backend: Backend
    source: str
    notes: tuple[str, ...] = ()
    writing: Writing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """What a model would need, found without its weights (REQ-18)."""

    specs: tuple[KVSpec, ...]
    weight_bytes: int
    backend: Backend


def load_model(
    facts: ModelFacts,
    settings: BuildSettings,
    source: WeightSource | None = None,
    *,
    progress: Progress = _silent,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadedModel:
    """Build `facts`' model where `settings.device_facts` say, and fill it.

    Raises `LoadError` for a checkpoint that is incomplete, damaged or does not fit the architecture, and
    `ConfigError` for settings that cannot be served.
    """
    started = clock()
    source = source or WeightSource()
    ctx = _context(facts, settings)
    if source.load_format == "dummy":
        filled = _randomly(ctx, source.seed)
    else:
        filled = _from_files(_with_stored_head(ctx, settings, source, progress), source, progress)
    model = filled.model
    return LoadedModel(
        model=model,
        specs=_specs(model),
        weight_bytes=weight_bytes(model),
        seconds=clock() - started,
        backend=ctx.attention.backend,
        source=filled.source,
        notes=(*filled.notes, *ctx.scheme.notes()),
        writing=filled.writing,
    )


def build_meta(facts: ModelFacts, settings: BuildSettings) -> MetaModel:
    """What the model needs on a device, from the layers themselves, without reading weights or using memory."""
    ctx = _context(facts, settings)
    model = build_model(ctx)
    return MetaModel(specs=_specs(model), weight_bytes=weight_bytes(model), backend=ctx.attention.backend)


def _context(facts: ModelFacts, settings: BuildSettings) -> BuildContext:
    resolve(facts.architecture, architectures(settings.plugins))  # an unknown one is said before anything else
    return build_context(facts, settings)


def _specs(model: nn.Module) -> tuple[KVSpec, ...]:
    return tuple(layer.spec for layer in model.attention_layers)  # type: ignore[union-attr]


# ---- from the model's files, or what was packed from them ---------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filled:
    model: nn.Module
    source: str
    notes: tuple[str, ...] = ()
    writing: Writing | None = None


def _from_files(ctx: BuildContext, source: WeightSource, progress: Progress) -> _Filled:
    model = build_model(ctx)
    weight_map = _weight_map(ctx.facts, ctx.plugins)
    stored = open_checkpoint(ctx.facts, weight_map.gguf, source.load_format)
    places, notes = check_checkpoint(model, ctx.facts, weight_map, stored)
    for note in notes:
        progress(f"warning: {note}")
    key = "" if source.packed is None else fingerprint(ctx, stored)
    if source.packed is not None and (restored := _from_packed(ctx, source, key, progress)) is not None:
        return _Filled(model=restored, source=f"packed weights in {source.packed.path(key)}", notes=notes)
    materialize(model, ctx.memory)
    _stream(model, places, progress)
    writing = None if source.packed is None else _keep(model, source.packed, key, progress)
    return _Filled(model=model, source=_named(stored), notes=notes, writing=writing)


def _with_stored_head(
    ctx: BuildContext, settings: BuildSettings, source: WeightSource, progress: Progress
) -> BuildContext:
    """The same, or one without tied embeddings where the files hold a head that differs."""
    weight_map = _weight_map(ctx.facts, ctx.plugins)
    if not weight_map.tied:
        return ctx
    said = separate_head(ctx.facts, weight_map, open_checkpoint(ctx.facts, weight_map.gguf, source.load_format))
    if said is None:
        return ctx
    progress(f"warning: {said}")
    return _context(replace(ctx.facts, tie_embeddings=False), settings)


def _from_packed(ctx: BuildContext, source: WeightSource, key: str, progress: Progress) -> nn.Module | None:
    """The model over packed weights; None when there are none, or none that are right, which is said."""
    folder = source.packed
    if folder is None:
        return None
    try:
        found = folder.find(key)
        if found is None:
            return None
        model = build_model(ctx)
        materialize(model, ctx.memory)
        restore_state(model, _tensors(found, ctx, source.num_threads))
        return model
    except (DamagedError, OSError, KeyError, ValueError, RuntimeError) as error:
        progress(f"warning: packed weights in {folder.path(key)} are of no use and are made anew: {error}")
        return None


def _tensors(found: PackedFile, ctx: BuildContext, num_threads: int) -> dict[str, torch.Tensor]:
    device = ctx.memory.device
    tensors = found.tensors(num_threads, ctx.memory_available_bytes)
    return tensors if device.type == "cpu" else {name: t.to(device) for name, t in tensors.items()}


def _keep(model: nn.Module, folder: PackedFolder, key: str, progress: Progress) -> Writing | None:
    """Begin to write the packed weights for the next start, if they can be saved and are worth it."""
    if weight_bytes(model) < _WORTH_KEEPING_BYTES:
        return None
    try:
        state = model_state(model)
    except NotImplementedError:
        return None
    return Writing(folder, key, state, progress)


def _named(stored: Sequence[StoredTensor]) -> str:
    """The files, in words: `model.safetensors`, or the first of several."""
    names = list(dict.fromkeys(Path(t.file.path).name for t in stored))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more files"


def _weight_map(facts: ModelFacts, plugins: tuple[str, ...] | None) -> WeightMap:
    found: WeightMap = resolve(facts.architecture, architectures(plugins)).weight_map(facts)
    return found


# ---- filling ------------------------------------------------------------------------------------


def _stream(model: nn.Module, places: Places, progress: Progress) -> None:
    """Fill the model in the order given, in which each layer's tensors follow each other."""
    total = sum(tensor.size for tensor, _ in places)
    done, said, asked, ahead = 0, 0, 0, 0
    filling = Filling(model)
    for tensor, target in places:
        while ahead < len(places) and asked <= done + _AHEAD_BYTES:
            places[ahead][0].prefetch()
            asked, ahead = asked + places[ahead][0].size, ahead + 1
        filling.place(target, tensor)
        done += tensor.size
        if done - said >= _PROGRESS_BYTES:
            said = done
            progress(f"weights: {done / total:.0%} of {total / 2**30:.1f} GiB read")
    filling.finish()


def _randomly(ctx: BuildContext, seed: int) -> _Filled:
    """Small random weights, the same for the same seed whatever the order; norms are 1 and biases 0."""
    model = build_model(ctx)
    materialize(model, ctx.memory)
    filling = Filling(model)
    for target in sorted(wanted(model), key=lambda t: (t.parameter, t.shard or "")):
        filling.place(target, _random_piece(model, target, seed))
    filling.finish()
    return _Filled(model=model, source="random numbers")


def _random_piece(model: nn.Module, target: WeightTarget, seed: int) -> "_RandomPiece":
    """Of floats, or of 8-bit integers where the checkpoint's own scheme takes nothing else."""
    piece = _RandomPiece(f"{seed} {target.parameter} {target.shard}", expects(model, target))
    try:
        check(model, target, piece)
    except LoadError as error:
        if not isinstance(error.__cause__, WrongKindError):
            raise
        return replace(piece, kind="I8")
    return piece


@dataclass(frozen=True, slots=True)
class _RandomPiece:
    """A tensor of random numbers, or of one number (norms, biases, scales) where a model has those."""

    name: str
    shape: tuple[int, ...]
    kind: str = "F32"

    def rows(self, first: int, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if len(self.shape) == 1:
            value = 0.0 if ".bias" in self.name else _DUMMY_STD / 127 if ".weight_scale" in self.name else 1.0
            return torch.full((count,), value, dtype=dtype)
        blocks = range(first // _RANDOM_ROWS, -(-(first + count) // _RANDOM_ROWS))
        values = torch.cat([self._block(block, dtype or torch.float32) for block in blocks])
        return values[first - blocks.start * _RANDOM_ROWS :][:count]

    def _block(self, block: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {block}".encode()))
        if self.kind == "I8":
            return torch.randint(-127, 128, (_RANDOM_ROWS, *self.shape[1:]), dtype=torch.int8, generator=generator)
        return torch.empty(_RANDOM_ROWS, *self.shape[1:], dtype=dtype).normal_(0.0, _DUMMY_STD, generator=generator)

    def raw(self, first: int, count: int) -> None:
        return None

    def forget(self) -> None: ...
