"""The device's memory: what one step needs, and the one buffer that holds all KV.

Promises: KV memory is reserved at once, in large pages, and touched page by page as blocks are used, but for the first
blocks, which can be made ready ahead; every layer's views follow from the `KVLayout` alone.
Does not know: which block holds what, or who decided how many there are.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.base.kvspec import SCALE_BYTES, KVGroup, KVLayout, KVSpec, LayerPlace, dtype_bytes
from octavo.forward.context import LayerBinding
from octavo.ops.pages import Populating, reserve

READY_BYTES = 256 << 20  # of KV, touched while nobody waits: a fresh page costs the system longer than computing its KV


class KVMemory:
    """All KV blocks of one device, in one flat buffer.

    Owns: the buffer, and the thread that makes its first pages ready.
    """

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self.layout = layout
        self.buffer = _reserve(layout.total_bytes, device)
        self.bindings: tuple[LayerBinding, ...] = tuple(
            _bind(self.buffer, place, layout.groups[place.group].spec, layout.num_blocks) for place in layout.places
        )
        self._populating: Populating | None = None

    def make_ready(self) -> None:
        """Have the first blocks' pages given by the system from now on, beside whatever else runs."""
        if self.buffer.device.type == "cpu" and self._populating is None:
            self._populating = Populating(self.buffer[:READY_BYTES])

    def close(self) -> None:
        """No thread of ours touches the buffer after this."""
        if self._populating is not None:
            self._populating.stop()
            self._populating = None

    def zero(self, blocks: Sequence[int]) -> None:
        """Clear these blocks in every layer."""
        pages = {(p.offset, p.block_stride, self.layout.groups[p.group].spec.page_bytes) for p in self.layout.places}
        for offset, stride, size in pages:  # layers of several groups may share a page
            for block in blocks:
                start = offset + block * stride
                self.buffer[start : start + size] = 0


def _reserve(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes that cost nothing until they are touched, and read as zero then."""
    try:
        if device.type == "cpu":
            return reserve(num_bytes, "KV blocks; lower --kv-cache-memory")
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise ConfigError(f"the device has no {num_bytes} bytes left for KV blocks; lower --kv-cache-memory") from None


def _bind(buffer: Tensor, place: LayerPlace, spec: KVSpec, num_blocks: int) -> LayerBinding:
    """Views [blocks, kv heads, states, head dim]: in a page, K lies before V, and scales lie behind both."""
    size = dtype_bytes(spec.dtype)
    if place.offset % size or place.block_stride % size:
        raise RuntimeError(f"layer {place.layer}'s pages are not aligned to {spec.dtype}")
    flat = buffer.view(getattr(torch, spec.dtype))
    shape = (num_blocks, spec.num_kv_heads, spec.states_per_block, spec.head_dim)
    strides = (place.block_stride // size, spec.states_per_block * spec.head_dim, spec.head_dim, 1)
    half = spec.num_kv_heads * spec.states_per_block * spec.head_dim
    key = torch.as_strided(flat, shape, strides, place.offset // size)
    value = torch.as_strided(flat, shape, strides, place.offset // size + half)
    key_scale, value_scale = _bind_scales(buffer, place, spec, num_blocks) if spec.is_scaled else (None, None)
    return LayerBinding(key=key, value=value, group=place.group, key_scale=key_scale, value_scale=value_scale)


def _bind_scales(buffer: Tensor, place: LayerPlace, spec: KVSpec, num_blocks: int) -> tuple[Tensor, Tensor]:
    """K's and V's, [blocks, kv heads, states] each."""
    count = spec.num_kv_heads * spec.states_per_block
    first = place.offset + spec.content_bytes - 2 * count * SCALE_BYTES
    if first % SCALE_BYTES or place.block_stride % SCALE_BYTES:
        raise RuntimeError(f"layer {place.layer}'s scales are not aligned")
    flat = buffer.view(torch.float32)
    shape = (num_blocks, spec.num_kv_heads, spec.states_per_block)
    strides = (place.block_stride // SCALE_BYTES, spec.states_per_block, 1)
    key = torch.as_strided(flat, shape, strides, first // SCALE_BYTES)
    return key, torch.as_strided(flat, shape, strides, first // SCALE_BYTES + count)


def scratch_layout(specs: Sequence[KVSpec], lengths: Sequence[int]) -> KVLayout:
    """A layout of just enough blocks for requests of these lengths and one token more, to measure a step with."""
    kinds = list(dict.fromkeys(specs))
    groups = tuple(
        KVGroup(index=i, spec=kind, layers=tuple(n for n, spec in enumerate(specs) if spec == kind))
        for i, kind in enumerate(kinds)
    )
    num_blocks = 1 + sum(-(-(length + 1) // kind.block_size) for kind in kinds for length in lengths)
    places, offset = [], 0
    for layer, spec in enumerate(specs):
        places.append(LayerPlace(layer=layer, group=kinds.index(spec), offset=offset, block_stride=spec.page_bytes))
        offset += num_blocks * spec.page_bytes
    return KVLayout(
        groups=groups,
        places=tuple(places),
        num_blocks=num_blocks,
        block_bytes=sum(spec.page_bytes for spec in specs),
        total_bytes=offset,
    )


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Most bytes that `run` had beyond what was there before; 0 where the system cannot tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    before = _reset_peak()
    run()
    return max(0, _status_bytes("VmHWM") - before) if before else 0


def _reset_peak() -> int:
    """Let Linux forget this process's highest resident size; what is resident now, or 0 elsewhere."""
    if sys.platform != "linux":
        return 0
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
