"""What a model is built from, and its making.

Promises: building does no work that fails on the meta device; a `WeightMap` is data, not code, so that
readers of any format can use it.
Does not know: file formats, any architecture, or how weights come in (see `models.filling`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

import torch
from torch import nn

from octavo.attention.api import AttentionNeed
from octavo.attention.layer import Attention, AttentionFactory
from octavo.attention.select import backends, choose, choose_block_size
from octavo.config.facts import DeviceFacts, ModelFacts
from octavo.config.quantization import QuantPlan, float_plan
from octavo.distributed.context import ParallelContext
from octavo.distributed.group import split_evenly
from octavo.models.registry import architectures, resolve
from octavo.ops.pages import ModelMemory
from octavo.ops.registry import OpRegistry, Ops
from octavo.platforms import lean
from octavo.quant.api import LinearScheme, NamedLinear, NamedScheme, Piece
from octavo.quant.schemes import make_scheme

# Tensors that checkpoints hold and no model computes with, with the reason (whole names).
NO_WEIGHTS: Final[Mapping[str, str]] = {
    r".*\.rotary_emb\.inv_freq": "a table that is made anew",
    r".*\.rotary_emb\.(cos|sin)_cached": "a table that is made anew",
    r".*\.masked_bias": "a constant of old attention code",
    r".*\.(attn|attention|self_attn)\.bias": "a causal mask",
    r".*\.self_attn\.(attn\.)?[kv]_scale": "a scale for an fp8 cache; this one measures its own",
    r".*\.[kv]_proj\.([kv]_scale|output_scale)": "a scale for an fp8 cache; this one measures its own",
}


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where one checkpoint tensor goes: a parameter by its full name, or one shard of a fused one.

    `model.layers.0.self_attn.qkv_proj.weight` with shard "q", for example.
    """

    parameter: str
    shard: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFNames:
    """GGUF tensor names to Hugging Face names.

    `names` maps a name without its `.weight` / `.bias` ending; `{}` stands for the layer number on both sides.
    `exact` maps whole names.
    `interleaved` are the ones whose rows hold each head's rotary pairs side by side (llama.cpp's conversion of
    its "llama" architecture) and must be taken apart: `interleaved_heads`.
    """

    names: Mapping[str, str]
    exact: Mapping[str, str] = field(default_factory=dict)
    interleaved: Mapping[str, str] = field(default_factory=dict)  # GGUF stem -> "query" or "key"

    def hf_name(self, name: str) -> str | None:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None when it is not in the map."""
        if name in self.exact:
            return self.exact[name]
        stem, _, ending = name.rpartition(".")
        generic, layer = _without_layer(stem)
        mapped = self.names.get(generic)
        return None if mapped is None else f"{mapped.format(layer)}.{ending}"

    def interleaved_heads(self, name: str, facts: ModelFacts) -> int | None:
        """How many heads' rows are interleaved in this tensor; None when rows are in Hugging Face's order.

        Undo with `t.view(heads, head_dim // 2, 2, ...).transpose(1, 2).reshape(t.shape)`.
        """
        role = self.interleaved.get(_without_layer(name.rpartition(".")[0])[0])
        if role is None:
            return None
        return facts.num_heads if role == "query" else facts.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """How a checkpoint's names (Hugging Face's) map to a model's parameters.

    `fused[leaf] = (module, shard)`: the checkpoint's module `leaf` is one shard of our `module`.
    `renamed` replaces the beginning of a name, first match wins. `skipped` are patterns (whole name) of tensors
    that are read elsewhere. `tied` are tensors that are another one's, as the configuration says (a head).
    """

    fused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    gguf: GGUFNames = field(default_factory=lambda: GGUFNames(names={}))

    def target(self, name: str) -> WeightTarget | None:
        """Where the tensor `name` goes; None when it may be skipped. An unknown name maps to itself."""
        if name in self.tied or any(re.fullmatch(pattern, name) for pattern in (*self.skipped, *NO_WEIGHTS)):
            return None
        for old, new in self.renamed:
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        module, _, ending = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if leaf in self.fused:
            ours, shard = self.fused[leaf]
            return WeightTarget(f"{parent}.{ours}.{ending}" if parent else f"{ours}.{ending}", shard)
        return WeightTarget(name)

    def checkpoint_module(self, module: str, shard: str | None) -> str:
        """The checkpoint's name of one of our modules, or of one shard of it: what `target` is the way back from."""
        parent, _, ours = module.rpartition(".")
        for leaf, fused in self.fused.items():
            if fused == (ours, shard):
                module = f"{parent}.{leaf}" if parent else leaf
                break
        for old, new in self.renamed:
            if module.startswith(new):
                return old + module[len(new) :]
        return module


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Everything a model's constructor asks for."""

    facts: ModelFacts
    dtype: torch.dtype
    device: torch.device  # may be "meta"
    memory: ModelMemory  # where weights and tables will lie, on the real device
    memory_available_bytes: int  # there, before anything was loaded
    parallel: ParallelContext
    scheme: LinearScheme
    attention: AttentionFactory
    ops: Ops
    max_model_len: int  # tokens
    plugins: tuple[str, ...] | None = ()  # installed packages that may bring architectures; None: all

    def need(self, layer: int) -> AttentionNeed:
        """What layer `layer`'s attention asks of a backend, on this rank."""
        return replace(
            attention_need(
                self.facts, self.dtype, self.attention.kv_dtype, self.parallel, window_of(self.facts, layer)
            ),
            block_size=self.attention.block_size,
        )


class Model(Protocol):
    """What a model class offers; an `nn.Module` besides."""

    attention_layers: tuple[Attention, ...]  # by layer id

    @staticmethod
    def weight_map(facts: ModelFacts) -> WeightMap:
        """Where a checkpoint's tensors go."""

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids and positions [T] int64 -> hidden states [T, hidden], inside a forward context."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden] -> logits [N, vocab] in the model's type."""


@runtime_checkable
class Placeable(Protocol):
    """A module that takes its own tensors, because they are fused, sharded or packed."""

    def pieces(self) -> Mapping[str, tuple[str | None, ...]]:
        """Parameter name -> the shards that it is made of; `(None,)` when it comes whole."""

    def expects(self, parameter: str, shard: str | None) -> tuple[int, ...]:
        """The shape of a checkpoint's tensor for one of the pieces."""

    def check(self, parameter: str, shard: str | None, piece: Piece) -> None:
        """Raises `ValueError` when a tensor's shape or type is wrong, `KeyError` when it has no place; reads nothing."""

    def place(self, parameter: str, shard: str | None, piece: Piece) -> None:
        """Take this rank's share of one checkpoint tensor. Raises as `check` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """How a model is built, whatever model it is.

    `device_facts` describe where it will run. `plugins` may bring architectures and attention backends (None: all
    that are installed). What is None is chosen.
    """

    dtype: torch.dtype
    device_facts: DeviceFacts
    max_model_len: int  # tokens
    parallel: ParallelContext = field(default_factory=ParallelContext.single)
    attention_backend: str | None = None
    block_size: int | None = None
    kv_dtype: torch.dtype | None = None  # None: the type that is computed in
    forced_ops: Mapping[str, str] | None = None  # implementation by operator, instead of the first that can serve
    plugins: tuple[str, ...] | None = ()
    quantization: QuantPlan | None = None  # None: floats where the checkpoint can be had so


def build_context(facts: ModelFacts, settings: BuildSettings, device: torch.device | str = "meta") -> BuildContext:
    """Choose operators, weight scheme, attention backend and block size for a model on a device.

    `device` is where its parameters are made: "meta", or where it will run.
    Raises `ConfigError` when something asked for cannot be served.
    """
    dtype, device_facts, parallel = settings.dtype, settings.device_facts, settings.parallel
    plan = settings.quantization or float_plan(facts, device_facts)
    ops = OpRegistry().bind(device_facts, dtype, forced=settings.forced_ops)
    memory = ModelMemory(device_facts.kind)
    windows = {window_of(facts, layer) for layer in range(facts.num_layers)}
    kv_dtype = settings.kv_dtype or dtype
    needs = [attention_need(facts, dtype, kv_dtype, parallel, w) for w in sorted(windows, key=lambda w: w or 0)]
    wanted = [replace(need, block_size=settings.block_size) for need in needs]
    backend = choose(wanted, settings.attention_backend, device_facts, backends(settings.plugins))
    size = choose_block_size([backend], settings.block_size)
    return BuildContext(
        facts=facts,
        dtype=dtype,
        device=torch.device(device),
        memory=memory,
        memory_available_bytes=device_facts.memory_available_bytes,
        parallel=parallel,
        scheme=make_scheme(plan, dtype=dtype, ops=ops, memory=memory),
        attention=AttentionFactory(backend=backend, device=device_facts, ops=ops, block_size=size, kv_dtype=kv_dtype),
        ops=ops,
        max_model_len=settings.max_model_len,
        plugins=settings.plugins,
    )


def build_model(ctx: BuildContext) -> nn.Module:
    """The model with empty weights on `ctx.device`; see the module's first lines for what comes next.

    It satisfies `Model`. Raises `LoadError` for an unknown architecture.
    """
    cls = resolve(ctx.facts.architecture, architectures(ctx.plugins))
    with torch.device(ctx.device):
        try:
            model: nn.Module = cls(ctx)
        except NotImplementedError:  # an operator on meta; torch may have been imported without its rare ones
            if not lean.complete():
                raise
            model = cls(ctx)
    _name_linears(model, cls.weight_map(ctx.facts), ctx.scheme)
    return model.eval()


def _name_linears(model: nn.Module, weight_map: WeightMap, scheme: LinearScheme) -> None:
    """Tell the weights that ask for it what a checkpoint calls them."""
    found: list[str] = []
    for name, module in model.named_modules():
        stored = getattr(module, "stored", None)
        if stored is None:
            continue
        shards = next(iter(module.pieces().values())) if isinstance(module, Placeable) else (None,)
        names = tuple(weight_map.checkpoint_module(name, shard) for shard in shards)
        found += names
        if isinstance(stored, NamedLinear):
            stored.named(names)
    if isinstance(scheme, NamedScheme):
        scheme.check_names(found)


def window_of(facts: ModelFacts, layer: int) -> int | None:
    """Layer `layer`'s sliding window in tokens; None for full attention."""
    return facts.layer_windows[layer] if facts.layer_windows else None


def attention_need(
    facts: ModelFacts, dtype: torch.dtype, kv_dtype: torch.dtype, parallel: ParallelContext, window: int | None
) -> AttentionNeed:
    """What plain decoder attention asks of a backend, on one rank."""
    return AttentionNeed(
        num_heads=split_evenly(facts.num_heads, parallel.tp, "the number of attention heads"),
        num_kv_heads=max(1, facts.num_kv_heads // parallel.tp.size),
        head_dim=facts.head_dim,
        scale=facts.head_dim**-0.5,
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=window,
    )


def _without_layer(stem: str) -> tuple[str, str]:
    """`blk.3.attn_q` -> (`blk.{}.attn_q`, `3`)."""
    found = re.search(r"\.(\d+)\.", stem)
    if found is None:
        return stem, ""
    return f"{stem[: found.start()]}.{{}}.{stem[found.end() :]}", found[1]
