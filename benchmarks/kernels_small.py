"""What the small native operators cost: norms, gated activations, rotary, KV writes and row lookups, beside torch.

    python benchmarks/kernels_small.py [--rows 1,32,512] [--widths 576x1536,2048x8192] [--rounds N]

All are bound by memory that is warm (a neighbour has just written it), so the figure to look at is the time, the ratio
to the definition in plain torch, and GB/s of what is read and written. Both take turns and the best of the rounds is
shown, since a machine's neighbours are part of what is measured.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.ops import native_gather, native_norms, native_pointwise, native_rotary, reference

DIM = 64
BLOCK = 64
CALLS = 50
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """One operator on one shape; `amount` is what it must read and write, bytes."""

    name: str
    run: Callable[[], object]
    twin: Callable[[], object]
    amount: int


def cases(rows: int, hidden: int, wide: int) -> list[Case]:
    """A layer's small operators on this many tokens, in bf16 with a float32 residual."""
    heads, kv_heads = hidden // DIM, max(1, hidden // DIM // 3)
    x, weight, residual = torch.randn(rows, hidden).to(BF16), torch.rand(hidden).to(BF16), torch.randn(rows, hidden)
    gate_up = torch.randn(rows, 2 * wide).to(BF16)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * DIM).to(BF16)
    query, key, value = (
        part.view(rows, -1, DIM) for part in qkv.split([heads * DIM, kv_heads * DIM, kv_heads * DIM], dim=-1)
    )
    angles = torch.rand(rows, DIM)
    caches = torch.zeros(2, rows // BLOCK + 2, kv_heads, BLOCK, DIM, dtype=BF16)
    slots, table, ids = torch.arange(rows) + BLOCK, torch.randn(4096, hidden).to(BF16), torch.arange(rows) % 4096

    def pair(name: str, native: Callable[..., object], plain: Callable[..., object], args: tuple, amount: int) -> Case:
        return Case(name, lambda: native(*args), lambda: plain(*args), amount)

    kv_bytes = 2 * 2 * rows * kv_heads * DIM * 2
    return [
        pair("rms_norm", native_norms.rms_norm, reference.rms_norm, (x, weight, 1e-5), 4 * rows * hidden),
        pair(
            "add_rms_norm", native_norms.add_rms_norm, reference.add_rms_norm, (x, residual, weight, 1e-5),
            12 * rows * hidden,
        ),
        pair("silu_mul", native_pointwise.silu_mul, reference.silu_mul, (gate_up,), 6 * rows * wide),
        pair("gelu_mul", native_pointwise.gelu_mul, reference.gelu_mul, (gate_up,), 6 * rows * wide),
        pair(
            "rotary", native_rotary.rotary, reference.rotary, (query, key, angles),
            rows * ((heads + kv_heads) * DIM * 4 + DIM * 4),
        ),
        pair("write_kv", native_rotary.write_kv, reference.write_kv, (key, value, *caches, slots), kv_bytes),
        pair("gather_rows", native_gather.gather_rows, reference.gather_rows, (table, ids), 4 * rows * hidden),
    ]  # fmt: skip


def seconds(run: Callable[[], object]) -> float:
    """Of one call among several."""
    began = time.perf_counter()
    for _ in range(CALLS):
        run()
    return (time.perf_counter() - began) / CALLS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,512")
    parser.add_argument("--widths", default="576x1536,2048x8192")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    print(f"{'operator':14}{'rows':>6}{'hidden x wide':>16}{'us':>9}{'GB/s':>8}{'torch us':>10}{'ratio':>8}")
    with torch.inference_mode():
        for widths in args.widths.split(","):
            hidden, wide = map(int, widths.split("x"))
            for rows in map(int, args.rows.split(",")):
                for case in cases(rows, hidden, wide):
                    best = [float("inf"), float("inf")]
                    for _ in range(args.rounds):
                        for i, run in enumerate((case.run, case.twin)):
                            best[i] = min(best[i], seconds(run))
                    mine, theirs = best
                    print(
                        f"{case.name:14}{rows:6}{widths:>16}{mine * 1e6:9.2f}{case.amount / mine / 1e9:8.1f}"
                        f"{theirs * 1e6:10.1f}{theirs / mine:8.1f}"
                    )


if __name__ == "__main__":
    main()
