"""The attention layer that models hold, and the factory that makes it for a chosen backend.

Promises: a model gives q, k and v and gets its answer; which kernel runs is the backend's matter (ATT-2). This is
the one place that reads the forward context for attention.
Does not know: any model or backend.
"""

from dataclasses import dataclass

import torch
from torch import nn

from octavo.attention.api import AttentionNeed, Backend, Impl
from octavo.base.errors import ConfigError
from octavo.base.kvspec import FullAttentionSpec, KVSpec, SlidingWindowSpec
from octavo.config.facts import DeviceFacts
from octavo.forward.context import current
from octavo.ops.registry import Ops, dtype_name


class Attention(nn.Module):
    """Attention over the paged cache for one layer.

    `layer_id` finds its memory in the forward context; `spec` says what it needs of the cache.

    Owns: `sinks` [H] float32, a parameter, when the layer has them; keys and values live in the worker's memory.
    """

    def __init__(self, layer_id: int, spec: KVSpec, impl: Impl, sinks: nn.Parameter | None = None) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.spec = spec
        self._impl = impl
        self.sinks = sinks

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [T, H, D], key and value [T, G, D], position embedding applied: [T, H, D]."""
        context = current()
        binding = context.layers[self.layer_id]
        group = context.groups[binding.group]
        self._impl.write(key, value, binding, group.slot_mapping)
        return self._impl.run(query, key, value, binding, group.plan, self.sinks)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFactory:
    """Makes a model's attention layers for one backend and block size."""

    backend: Backend
    device: DeviceFacts
    ops: Ops
    block_size: int  # tokens
    kv_dtype: torch.dtype

    def layer(self, layer_id: int, need: AttentionNeed) -> Attention:
        """The attention of one layer. Raises `ConfigError` when the backend objects to what it needs."""
        if objections := self.backend.objections(need, self.device):
            raise ConfigError(
                f"attention backend {self.backend.name!r} cannot serve layer {layer_id}: {', '.join(objections)}"
            )
        sinks = nn.Parameter(torch.empty(need.num_heads, dtype=torch.float32)) if need.sinks else None
        return Attention(layer_id, self._spec(need), self.backend.impl(need, self.ops), sinks)

    def _spec(self, need: AttentionNeed) -> KVSpec:
        dtype = dtype_name(self.kv_dtype)
        if need.window is None:
            return FullAttentionSpec(
                block_size=self.block_size, num_kv_heads=need.num_kv_heads, head_dim=need.head_dim, dtype=dtype
            )
        return SlidingWindowSpec(
            block_size=self.block_size,
            num_kv_heads=need.num_kv_heads,
            head_dim=need.head_dim,
            dtype=dtype,
            window=need.window,
        )
