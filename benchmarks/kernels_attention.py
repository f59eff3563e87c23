"""What the native attention costs: paged decode, paged prefill, prefixes read once; beside torch and the machine's limit.

    python benchmarks/kernels_attention.py [decode|prefill|cascade] [--rounds N]

Decode is bound by memory: GB/s of keys and values, as a share of a streaming read measured between rounds. Prefill is
bound by arithmetic: GFLOP/s of both products below the diagonal, as a share of a probe of the widest instruction.
Torch's side is `scaled_dot_product_attention` over keys and values that lie dense already: no blocks to gather. All take
turns and the best of the rounds is shown, since a machine's neighbours are part of what is measured.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from octavo.attention.api import AttentionNeed
from octavo.attention.batch import AttentionBatch
from octavo.attention.cpu import CpuBackend
from octavo.base.kvspec import FullAttentionSpec
from octavo.config.facts import DeviceFacts
from octavo.forward.context import LayerBinding
from octavo.ops.native import core
from octavo.ops.pages import reserve
from octavo.ops.registry import OpRegistry, dtype_name

CPU = DeviceFacts(kind="cpu", name="here", memory_total_bytes=1, memory_available_bytes=1, num_cores=1)
CYCLED_BYTES = 200 << 20  # so that no cache holds what is read next
BLOCK = 64
GROUPS = ("decode", "narrow", "prefill", "cascade")


@dataclass(frozen=True, slots=True)
class Case:
    """`run` computes layer i; `twin` is torch's way of it. `amount`: bytes read or operations of one run."""

    group: str
    name: str
    run: Callable[[int], object]
    twin: "Callable[[int], object] | None"
    amount: float
    layers: int


def heads_need(heads: int, kv_heads: int, dim: int, kv_dtype: torch.dtype = torch.bfloat16) -> AttentionNeed:
    return AttentionNeed(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, dtype=torch.bfloat16, kv_dtype=kv_dtype
    )


def binding(key: torch.Tensor, value: torch.Tensor) -> LayerBinding:
    """A layer's memory; with scales where the type has them."""
    if key.dtype not in (torch.int8, torch.float8_e4m3fn):
        return LayerBinding(key=key, value=value, group=0)
    scales = torch.full((2, *key.shape[:3]), 0.01)
    return LayerBinding(key=key, value=value, group=0, key_scale=scales[0], value_scale=scales[1])


class Setting:
    """Rows of one length over scattered blocks of several layers.

    Owns: the cache memory.
    """

    def __init__(self, need: AttentionNeed, rows: int, tokens: int, context: int, shared: int = 0) -> None:
        self.need, self.rows, self.tokens, self.context = need, rows, tokens, context
        length = context + tokens
        width = -(-length // BLOCK)
        common = shared // BLOCK
        gen = np.random.default_rng(0)
        ids = gen.permutation(np.arange(1, 1 + rows * width)).astype(np.int32).reshape(rows, width)
        ids[:, :common] = ids[0, :common]
        page = need.num_kv_heads * BLOCK * need.head_dim
        size = torch.empty((), dtype=need.kv_dtype).element_size()
        layer_bytes = (1 + rows * width) * 2 * page * size
        self.layers = max(1, min(32, CYCLED_BYTES // layer_bytes))
        memory = reserve(self.layers * layer_bytes, "the benchmark's cache")
        memory.copy_(torch.randint(56, 62, memory.shape, dtype=torch.uint8))
        flat = memory.view(need.kv_dtype).view(
            self.layers, 1 + rows * width, 2, need.num_kv_heads, BLOCK, need.head_dim
        )
        self.bindings = [binding(x[:, 0], x[:, 1]) for x in flat]
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=need.num_kv_heads, head_dim=need.head_dim, dtype=dtype_name(need.kv_dtype)
        )
        self.batch = AttentionBatch.of(
            query_lens=[tokens] * rows, context_lens=[context] * rows, block_table=ids, block_size=BLOCK
        )
        self.builder = CpuBackend().builder(spec)
        self.plan = self.builder.plan(self.batch)
        ops = OpRegistry().bind(CPU, need.dtype)
        self.impls = [CpuBackend().impl(need, ops) for _ in self.bindings]
        self.query = torch.randn(rows * tokens, need.num_heads, need.head_dim, dtype=need.dtype)

    def native(self, layer: int) -> torch.Tensor:
        return self.impls[layer].run(self.query, self.query, self.query, self.bindings[layer], self.plan)

    def dense(self) -> Callable[[int], torch.Tensor]:
        """The same work in torch over dense keys and values: heads that share them as rows of one product."""
        need = self.need
        shape = (self.rows, need.num_kv_heads, self.context + self.tokens, need.head_dim)
        pairs = [
            (torch.randn(shape, dtype=need.dtype), torch.randn(shape, dtype=need.dtype)) for _ in range(self.layers)
        ]
        group = need.num_heads // need.num_kv_heads
        if self.tokens == 1:
            query = self.query.view(self.rows, need.num_kv_heads, group, need.head_dim)
            return lambda layer: F.scaled_dot_product_attention(query, *pairs[layer], scale=need.scale)
        query = self.query.view(self.rows, self.tokens, need.num_heads, need.head_dim).transpose(1, 2)
        seen = torch.arange(self.context + self.tokens) <= self.context + torch.arange(self.tokens)[:, None]
        mask = torch.zeros(seen.shape, dtype=need.dtype).masked_fill_(~seen, float("-inf"))

        def run(layer: int) -> torch.Tensor:
            key, value = (x.repeat_interleave(group, dim=1) for x in pairs[layer])
            if self.context == 0:
                return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=need.scale)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=need.scale)

        return run


def decode(heads: int, kv_heads: int, dim: int, rows: int, context: int) -> Case:
    made = Setting(heads_need(heads, kv_heads, dim), rows, 1, context)
    amount = rows * (context + 1) * kv_heads * dim * 4.0
    return Case(
        "decode", f"{heads}/{kv_heads}x{dim} rows {rows} ctx {context}", made.native, made.dense(), amount, made.layers
    )


def narrow(heads: int, kv_heads: int, dim: int, rows: int, context: int, kv_dtype: torch.dtype) -> Case:
    """Decode from a cache of fewer bits. The twin here is the same kernel on bfloat16."""
    made = Setting(heads_need(heads, kv_heads, dim, kv_dtype), rows, 1, context)
    wide = Setting(heads_need(heads, kv_heads, dim), rows, 1, context)
    amount = rows * (context + 1) * kv_heads * (dim + 4) * 2.0
    name = "int8" if kv_dtype is torch.int8 else "fp8"
    return Case(
        "narrow",
        f"{heads}/{kv_heads}x{dim} rows {rows} ctx {context} {name}",
        made.native,
        lambda layer: wide.native(layer % wide.layers),
        amount,
        made.layers,
    )


def prefill(heads: int, kv_heads: int, dim: int, tokens: int, context: int) -> Case:
    made = Setting(heads_need(heads, kv_heads, dim), 1, tokens, context)
    amount = 4.0 * heads * dim * (tokens * context + tokens * (tokens + 1) / 2)
    return Case(
        "prefill",
        f"{heads}/{kv_heads}x{dim} new {tokens} ctx {context}",
        made.native,
        made.dense(),
        amount,
        made.layers,
    )


def cascade(heads: int, kv_heads: int, dim: int, rows: int, shared: int, own: int) -> Case:
    """The twin here is the same kernel without sharing."""
    need = heads_need(heads, kv_heads, dim)
    made = Setting(need, rows, 1, shared + own, shared)
    apart = Setting(need, rows, 1, shared + own, shared)
    apart.plan.share_prefixes(False)
    apart.plan = apart.builder.plan(apart.batch)
    amount = (shared + rows * own) * kv_heads * dim * 4.0
    return Case(
        "cascade",
        f"{heads}/{kv_heads}x{dim} rows {rows} shared {shared} own {own}",
        made.native,
        apart.native,
        amount,
        made.layers,
    )


def cases(groups: Sequence[str] = GROUPS) -> "list[Callable[[], Case]]":
    """What to measure, made one at a time."""
    out: list[Callable[[], Case]] = []
    shapes = [(9, 3, 64), (32, 8, 64), (32, 8, 128)]
    if "decode" in groups:
        out += [
            lambda s=s, r=r, c=c: decode(*s, r, c)  # type: ignore[misc]
            for s in shapes
            for r, c in [(1, 128), (1, 512), (1, 2048), (1, 8192), (8, 512), (8, 2048), (32, 384), (32, 2048)]
        ]
    if "narrow" in groups:
        out += [
            lambda s=s, r=r, c=c, t=t: narrow(*s, r, c, t)  # type: ignore[misc]
            for s in shapes
            for r, c in [(1, 4096), (32, 384), (32, 2048)]
            for t in (torch.float8_e4m3fn, torch.int8)
        ]
    if "prefill" in groups:
        out += [
            lambda s=s, t=t, c=c: prefill(*s, t, c)  # type: ignore[misc]
            for s in shapes
            for t, c in [(128, 0), (512, 0), (2048, 0), (512, 2048), (64, 4096)]
        ]
    if "cascade" in groups:
        out += [
            lambda s=s, r=r, n=n: cascade(*s, r, n, 64)  # type: ignore[misc]
            for s in shapes[:2]
            for r, n in [(4, 1024), (8, 1024), (32, 1024), (32, 4096)]
        ]
    return out


def best_s(run: Callable[[int], object], layers: int, least_s: float) -> float:
    """Seconds of one run, several layers in turn."""
    began, count = time.perf_counter(), 0
    while count < layers or time.perf_counter() - began < least_s:
        run(count % layers)
        count += 1
    return (time.perf_counter() - began) / count


def show(case: Case, rounds: int) -> None:
    stream = reserve(CYCLED_BYTES, "the probe")
    stream.fill_(1)
    native = twin = probe = float("inf")
    for _ in range(rounds):
        native = min(native, best_s(case.run, case.layers, 0.03))
        if case.twin is not None:
            twin = min(twin, best_s(case.twin, case.layers, 0.03))
        began = time.perf_counter()
        if case.group == "prefill":
            operations = core.probe_bf16(200_000)
            probe = min(probe, (time.perf_counter() - began) / operations)
        else:
            core.probe_read(stream.data_ptr(), len(stream))
            probe = min(probe, (time.perf_counter() - began) / len(stream))
    unit = "GFLOP/s" if case.group == "prefill" else "GB/s"
    print(
        f"{case.group:8} {case.name:36} {native * 1e6:9.1f} us {case.amount / native / 1e9:8.1f} {unit:7}"
        f" {case.amount * probe / native:6.0%} of {1 / probe / 1e9:7.1f}   {twin / native:6.2f}x {'torch' if case.group in ('decode', 'prefill') else 'twin'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Native attention beside torch and the machine's limit.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all when none is named")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    for make in cases(options.groups or GROUPS):
        show(make(), options.rounds)


if __name__ == "__main__":
    main()
