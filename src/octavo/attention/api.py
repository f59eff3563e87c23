"""What an attention backend is: what it can do, how it plans a step, how it writes and attends.

Promises: a check on one full combination gives nothing or the reasons in words (ATT-1); writing K and V and
attending are two calls (ATT-2).
Does not know: any backend, or how one is chosen (see `attention.select`).

Shapes: T tokens of the step, H query heads, G key/value heads, D features a head; a cache view is
[blocks, G, block size, D] and need not be contiguous (ATT-6). Token slots count `block * block_size + offset`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from octavo.attention.batch import AttentionBatch
from octavo.base.kvspec import KVSpec
from octavo.config.facts import DeviceFacts
from octavo.forward.context import LayerBinding
from octavo.ops.registry import Ops

CPU = torch.device("cpu")


class AttentionKind(StrEnum):
    """Who attends to whom."""

    DECODER = "decoder"
    ENCODER = "encoder"
    CROSS = "cross"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeed:
    """One full combination that a layer asks for. `block_size` is None while it is not decided."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # on query times key
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int | None = None
    window: int | None = None  # a query sees this many positions, its own included
    kind: AttentionKind = AttentionKind.DECODER
    causal: bool = True
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    slopes: tuple[float, ...] | None = None  # ALiBi's, of each query head; None: those of its paper
    latent: bool = False  # MLA
    media_prefix: bool = False
    capture: bool = False

    def features(self) -> frozenset[str]:
        """The named features this combination makes use of."""
        used = {
            "sliding window": self.window is not None,
            "softcap": self.softcap is not None,
            "sinks": self.sinks,
            "ALiBi": self.alibi,
            "latent attention": self.latent,
            "media prefix": self.media_prefix,
            "non-causal attention": not self.causal,
            "graph capture": self.capture,
        }
        return frozenset(name for name, is_used in used.items() if is_used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do. An empty set of devices, dtypes or head sizes means any.

    A block size is accepted when it is in `block_sizes` or a multiple of `block_multiple`.
    """

    devices: frozenset[str] = frozenset()
    dtypes: frozenset[torch.dtype] = frozenset()
    other_kv_dtypes: frozenset[torch.dtype] = frozenset()  # besides the compute type itself
    head_dims: frozenset[int] = frozenset()
    block_sizes: frozenset[int] = frozenset()
    block_multiple: int | None = None
    preferred_block_size: int = 64
    kinds: frozenset[AttentionKind] = frozenset({AttentionKind.DECODER})
    features: frozenset[str] = frozenset()

    def accepts_block(self, size: int) -> bool:
        """True when KV blocks may have this many tokens (ATT-3)."""
        return size in self.block_sizes or (self.block_multiple is not None and size % self.block_multiple == 0)

    def objections(self, need: AttentionNeed, device: DeviceFacts) -> tuple[str, ...]:
        """Why this combination cannot be served, in words; empty when it can."""
        out = []
        if self.devices and device.kind not in self.devices:
            out.append(f"runs on {', '.join(sorted(self.devices))}, not on {device.kind}")
        if self.dtypes and need.dtype not in self.dtypes:
            out.append(f"does not compute in {need.dtype}")
        if need.kv_dtype != need.dtype and need.kv_dtype not in self.other_kv_dtypes:
            out.append(f"does not keep {need.kv_dtype} KV for {need.dtype}")
        if self.head_dims and need.head_dim not in self.head_dims:
            out.append(f"head size {need.head_dim} is not one of {', '.join(map(str, sorted(self.head_dims)))}")
        if need.num_heads % need.num_kv_heads:
            out.append(f"{need.num_heads} query heads do not divide over {need.num_kv_heads} key/value heads")
        if need.block_size is not None and not self.accepts_block(need.block_size):
            out.append(f"block size {need.block_size} is not {self.block_rule()}")
        if need.kind not in self.kinds:
            out.append(f"has no {need.kind} attention")
        out += [f"has no {feature}" for feature in sorted(need.features() - self.features)]
        return tuple(out)

    def block_rule(self) -> str:
        """Which block sizes are accepted, in words."""
        exact = ", ".join(map(str, sorted(self.block_sizes)))
        multiple = f"a multiple of {self.block_multiple}" if self.block_multiple is not None else ""
        return " or ".join(rule for rule in (f"one of {exact}" if exact else "", multiple) if rule) or "accepted"


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slope of each head (Press et al., 2022): a geometric row for powers of two, and between them the odd
    members of the next row."""

    def row(count: int) -> "list[float]":
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    whole = 1 << (num_heads.bit_length() - 1)
    return tuple(row(whole) + row(2 * whole)[0::2][: num_heads - whole])


class MetadataBuilder(Protocol):
    """Makes a backend's plan for one KV group, once a step."""

    def plan(self, batch: AttentionBatch) -> object:
        """All host work of the step: what `Impl.run` of every layer in the group will read."""


class Impl(Protocol):
    """One layer's attention."""

    def write(self, key: torch.Tensor, value: torch.Tensor, binding: LayerBinding, slot_mapping: torch.Tensor) -> None:
        """Store key and value [T, G, D] at their token slots [T] int64 (-1: padding)."""

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        binding: LayerBinding,
        plan: object,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: query [T, H, D] over the cache, in which key and value [T, G, D] were written: [T, H, D].

        `sinks` [H] float32 are scores of a key without a value, where the need has them. Rows of padding tokens are finite
        but have no meaning.
        """


class Backend(Protocol):
    """One way to attend. Made without arguments by the registry; holds no state of a model."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def objections(self, need: AttentionNeed, device: DeviceFacts) -> tuple[str, ...]:
        """Why it cannot serve this need here, in words; empty when it can."""

    def builder(self, spec: KVSpec, device: torch.device = CPU) -> MetadataBuilder:
        """A builder for one KV group whose tensors live on `device`."""

    def impl(self, need: AttentionNeed, ops: Ops) -> Impl:
        """One layer's attention; the layer's own window (`need.window`) wins over its group's (ATT-7)."""
