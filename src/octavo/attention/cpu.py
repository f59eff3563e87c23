"""The CPU backend: attention over the paged cache in native code, prompts and decode in one arithmetic.

Promises: the same query over the same keys gives the same bits whatever else is in the batch, however its prompt was
cut into chunks, for every number of threads, and whether or not rows share a prefix (ATT-13); float32 inside, rounded
once at the end.
Does not know: how partitions are computed or handed out (see `native/include/octavo/attention.h`).
"""

from typing import Any, Final

import torch

from octavo.attention.api import CPU, AttentionNeed, Capabilities, alibi_slopes
from octavo.attention.batch import AttentionBatch
from octavo.base.kvspec import KVSpec
from octavo.config.facts import DeviceFacts
from octavo.forward.context import LayerBinding
from octavo.ops.native import DTYPES, core, rows_apart
from octavo.ops.registry import Ops

DIM_MULTIPLE: Final = 8


class CpuBuilder:
    """Plans steps of one KV group.

    Owns: the native plan, one and the same for all steps, since recorded calls hold its address.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._plan = core.AttentionPlan()

    def plan(self, batch: AttentionBatch) -> object:
        self._plan.fill(batch.query_starts, batch.context_lens, batch.block_table, self._block_size)
        return self._plan


class CpuImpl:
    """One layer's attention.

    Owns: what native calls read of the layer, made for the cache that it was last called with.
    """

    def __init__(self, need: AttentionNeed, ops: Ops) -> None:
        self._need = need
        self._write = ops.write_kv
        self._binding: LayerBinding | None = None
        self._layer: Any = None
        self._slopes = _slopes(need)
        self._sinks: torch.Tensor | None = None

    def write(self, key: torch.Tensor, value: torch.Tensor, binding: LayerBinding, slot_mapping: torch.Tensor) -> None:
        if binding.key_scale is None:
            self._write(key, value, binding.key, binding.value, slot_mapping)
            return
        self._know(binding, self._sinks)
        dim = key.shape[2]
        if key.stride()[1:] != (dim, 1) or value.stride()[1:] != (dim, 1):
            key, value = key.contiguous(), value.contiguous()
        core.attention_write(
            self._layer,
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
            slot_mapping.data_ptr(),
            binding.key.shape[2],
            len(key),
        )

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        binding: LayerBinding,
        plan: object,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._know(binding, sinks)
        num_tokens, num_heads, dim = query.shape
        if query.stride(2) != 1 or query.stride(1) != dim:
            query = query.contiguous()
        out = rows_apart(num_tokens, num_heads * dim, query.dtype)
        core.attention(plan, self._layer, query.data_ptr(), query.stride(0), out.data_ptr(), out.stride(0), num_tokens)
        return out.view(num_tokens, num_heads, dim)

    def _know(self, binding: LayerBinding, sinks: torch.Tensor | None) -> None:
        """Prepare what native calls read, when it is not what it was."""
        if binding is not self._binding or sinks is not self._sinks:
            self._layer = self._native_layer(binding, sinks)
            self._binding, self._sinks = binding, sinks

    def _native_layer(self, binding: LayerBinding, sinks: torch.Tensor | None) -> Any:
        need, key, value = self._need, binding.key, binding.value
        _, heads, size, dim = key.shape
        if key.stride() != value.stride() or key.stride()[1:] != (size * dim, dim, 1):
            raise RuntimeError("KV pages must be contiguous, and keys and values laid out alike")
        if sinks is not None and (sinks.dtype != torch.float32 or not sinks.is_contiguous()):
            raise RuntimeError("sinks must be contiguous float32")
        return core.AttentionLayer(
            keys=key.data_ptr(),
            values=value.data_ptr(),
            key_scales=_address(binding.key_scale),
            value_scales=_address(binding.value_scale),
            block_stride=key.stride(0),
            scale_stride=0 if binding.key_scale is None else binding.key_scale.stride(0),
            heads=need.num_heads,
            kv_heads=heads,
            head_dim=dim,
            window=need.window or 0,
            scale=need.scale,
            softcap=need.softcap or 0.0,
            slopes=_address(self._slopes),
            sinks=_address(sinks),
            dtype=DTYPES[need.dtype],
            kv_dtype=DTYPES[need.kv_dtype],
        )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _slopes(need: AttentionNeed) -> torch.Tensor | None:
    """ALiBi's slopes; on the CPU wherever the model is being built."""
    if not need.alibi:
        return None
    return torch.tensor(need.slopes or alibi_slopes(need.num_heads), dtype=torch.float32, device="cpu")


class CpuBackend:
    """Attention in native code on the CPU.

    Owns: nothing.
    """

    name = "cpu"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        other_kv_dtypes=frozenset({torch.bfloat16, torch.float8_e4m3fn, torch.int8}),
        block_multiple=16,
        preferred_block_size=64,
        features=frozenset({"sliding window", "softcap", "sinks", "ALiBi"}),
    )

    def objections(self, need: AttentionNeed, device: DeviceFacts) -> tuple[str, ...]:
        reasons = self.capabilities.objections(need, device)
        if need.head_dim % DIM_MULTIPLE:
            reasons += (f"head size {need.head_dim} is not a multiple of {DIM_MULTIPLE}",)
        return reasons

    def builder(self, spec: KVSpec, device: torch.device = CPU) -> CpuBuilder:
        return CpuBuilder(spec.block_size)

    def impl(self, need: AttentionNeed, ops: Ops) -> CpuImpl:
        return CpuImpl(need, ops)
