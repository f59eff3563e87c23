"""What a model is built from, and how a checkpoint's tensors find their place in it.

Promises: building does no work that fails on the meta device; a `WeightMap` is data, not code, so that
readers of any format can use it.
Does not know: file formats, or any architecture.

The order of a load: `build_context` -> `build_model` (on 'meta' or on the device) -> `model.to_empty` when it was on meta ->
`place` for every tensor of the checkpoint -> `finish`. `wanted` says which pieces must have come.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from octavo.attention.api import Need
from octavo.attention.layer import Attention, AttentionFactory
from octavo.attention.select import backends, choose, choose_block_size
from octavo.base.errors import LoadError
from octavo.config.facts import DeviceFacts, ModelFacts
from octavo.distributed.context import ParallelContext
from octavo.distributed.group import split_evenly
from octavo.models.registry import architectures, resolve
from octavo.ops.registry import OpRegistry, Ops
from octavo.quant.api import LinearScheme, detect


@dataclass(frozen=True, slots=True)
class Target:
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
    that are not weights (rotary tables) or are shared with another (a tied head).
    """

    fused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
    gguf: GGUFNames = field(default_factory=lambda: GGUFNames(names={}))

    def target(self, name: str) -> Target | None:
        """Where the tensor `name` goes; None when it may be skipped. An unknown name maps to itself."""
        if any(re.fullmatch(pattern, name) for pattern in self.skipped):
            return None
        for old, new in self.renamed:
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        module, _, ending = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if leaf in self.fused:
            ours, shard = self.fused[leaf]
            return Target(f"{parent}.{ours}.{ending}" if parent else f"{ours}.{ending}", shard)
        return Target(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Everything a model's constructor asks for."""

    facts: ModelFacts
    dtype: torch.dtype
    device: torch.device  # may be "meta"
    parallel: ParallelContext
    scheme: LinearScheme
    attention: AttentionFactory
    ops: Ops
    max_model_len: int  # tokens
    plugins: tuple[str, ...] | None = ()  # installed packages that may bring architectures; None: all

    def need(self, layer: int) -> Need:
        """What layer `layer`'s attention asks of a backend, on this rank."""
        return replace(
            attention_need(self.facts, self.dtype, self.parallel, window_of(self.facts, layer)),
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


def build_context(
    facts: ModelFacts,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    device_facts: DeviceFacts,
    parallel: ParallelContext,
    max_model_len: int,
    attention_backend: str | None = None,
    block_size: int | None = None,
    plugins: tuple[str, ...] | None = (),
) -> BuildContext:
    """Choose operators, weight scheme, attention backend and block size for a model on a device.

    `device` is where it is built ("meta" included), `device_facts` describe where it will run. `plugins` may
    bring architectures and attention backends (None: all that are installed).
    Raises `ConfigError` when something asked for cannot be served.
    """
    ops = OpRegistry().bind(device_facts, dtype)
    windows = {window_of(facts, layer) for layer in range(facts.num_layers)}
    needs = [attention_need(facts, dtype, parallel, window) for window in sorted(windows, key=lambda w: w or 0)]
    wanted = [replace(need, block_size=block_size) for need in needs]
    backend = choose(wanted, attention_backend, device_facts, backends(plugins))
    size = choose_block_size([backend], block_size)
    return BuildContext(
        facts=facts,
        dtype=dtype,
        device=torch.device(device),
        parallel=parallel,
        scheme=detect(facts, dtype=dtype, linear=ops.linear),
        attention=AttentionFactory(backend=backend, device=device_facts, ops=ops, block_size=size, kv_dtype=dtype),
        ops=ops,
        max_model_len=max_model_len,
        plugins=plugins,
    )


def build_model(ctx: BuildContext) -> nn.Module:
    """The model with empty weights on `ctx.device`; see the module's first lines for what comes next.

    It satisfies `Model`. Raises `LoadError` for an unknown architecture.
    """
    cls = resolve(ctx.facts.architecture, architectures(ctx.plugins))
    with torch.device(ctx.device):
        model: nn.Module = cls(ctx)
    return model.eval()


def window_of(facts: ModelFacts, layer: int) -> int | None:
    """Layer `layer`'s sliding window in tokens; None for full attention."""
    return facts.layer_windows[layer] if facts.layer_windows else None


def attention_need(facts: ModelFacts, dtype: torch.dtype, parallel: ParallelContext, window: int | None) -> Need:
    """What plain decoder attention asks of a backend, on one rank."""
    return Need(
        num_heads=split_evenly(facts.num_heads, parallel.tp, "the number of attention heads"),
        num_kv_heads=max(1, facts.num_kv_heads // parallel.tp.size),
        head_dim=facts.head_dim,
        scale=facts.head_dim**-0.5,
        dtype=dtype,
        kv_dtype=dtype,
        window=window,
    )


@runtime_checkable
class Placeable(Protocol):
    """A module that takes its own tensors, because they are fused, sharded or packed."""

    def pieces(self) -> Mapping[str, tuple[str | None, ...]]:
        """Parameter name -> the shards that it is made of; `(None,)` when it comes whole."""

    def place(self, parameter: str, shard: str | None, tensor: torch.Tensor) -> None:
        """Copy this rank's share of one checkpoint tensor in. Raises `ValueError` on a wrong shape."""


@runtime_checkable
class Finishable(Protocol):
    """A module with work to do once all weights are in: packing, tables."""

    def finish(self) -> None:
        """Called once, on the real device."""


def wanted(model: nn.Module) -> frozenset[Target]:
    """Every piece that a checkpoint must bring."""
    return frozenset(_wanted(model, ""))


def _wanted(module: nn.Module, prefix: str) -> "list[Target]":
    if isinstance(module, Placeable):
        return [Target(prefix + name, shard) for name, shards in module.pieces().items() for shard in shards]
    own = [Target(prefix + name) for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        own += _wanted(child, f"{prefix}{name}.")
    return own


def place(model: nn.Module, target: Target, tensor: torch.Tensor) -> None:
    """Copy one checkpoint tensor into the model, converted to the parameter's type.

    Raises `LoadError` when the model has no such parameter or the shapes disagree; both are named.
    """
    module_name, _, parameter = target.parameter.rpartition(".")
    what = target.parameter + (f" (shard {target.shard})" if target.shard else "")
    try:
        module = model.get_submodule(module_name)
    except AttributeError:
        raise LoadError(f"the checkpoint has a tensor for {what}, which this architecture does not have") from None
    try:
        if isinstance(module, Placeable):
            module.place(parameter, target.shard, tensor)
        else:
            _copy(module, parameter, tensor)
    except (KeyError, AttributeError):
        raise LoadError(f"the checkpoint has a tensor for {what}, which this architecture does not have") from None
    except ValueError as error:
        raise LoadError(f"the checkpoint's tensor for {what} does not fit: {error}") from None


def _copy(module: nn.Module, parameter: str, tensor: torch.Tensor) -> None:
    mine = module.get_parameter(parameter)
    if mine.shape != tensor.shape:
        raise ValueError(f"its shape is {list(tensor.shape)}, the model's is {list(mine.shape)}")
    with torch.no_grad():
        mine.copy_(tensor)


def finish(model: nn.Module) -> None:
    """Let every module that has work after loading do it. Call once, when all weights are in."""
    for module in list(model.modules()):
        if isinstance(module, Finishable):
            module.finish()


def _without_layer(stem: str) -> tuple[str, str]:
    """`blk.3.attn_q` -> (`blk.{}.attn_q`, `3`)."""
    found = re.search(r"\.(\d+)\.", stem)
    if found is None:
        return stem, ""
    return f"{stem[: found.start()]}.{{}}.{stem[found.end() :]}", found[1]
