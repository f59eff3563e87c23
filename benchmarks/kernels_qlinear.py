"""What products with quantized weights cost, beside torch's bf16 product and the machine's limit.

    python benchmarks/kernels_qlinear.py [--kinds int8,int4_half] [--rows 1,4,16,64,256] [--shapes 2048x8192] [--seconds 1]

Few rows are bound by memory: GB/s of packed weights, as a share of a streaming read. Many rows are bound by arithmetic:
operations a second, as a share of a probe of the widest integer instruction. All take turns, and the best of the rounds
is shown, since a machine's neighbours are part of what is measured.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from product_timing import CYCLED_BYTES, in_turns, stream

from octavo.ops.native import core
from octavo.ops.native_qlinear import NativeQuantizedLinear
from octavo.ops.quantized import KINDS, PackedMultiply, QuantizedPart, QuantizedRows


def random_rows(kind: str, outputs: int, inputs: int) -> QuantizedRows:
    """Any numbers of a kind: time does not depend on them."""
    what, groups = KINDS[kind], -(-inputs // 32)
    q = torch.randint(0, 1 << what.bits, (outputs, inputs), dtype=torch.uint8)
    if what.span is None:
        return QuantizedRows(kind=kind, q=q, scale=torch.rand(outputs))
    fine = torch.rand(outputs, inputs // what.span).mul(60)
    small = fine.to(torch.uint8 if what.minimum else torch.int8) if what.outer else fine.half()
    least = torch.ones(outputs, groups, dtype=torch.uint8 if what.outer else torch.float16)
    outer = torch.ones(outputs, -(-inputs // 256), dtype=torch.float16) if what.outer else None
    return QuantizedRows(
        kind=kind, q=q, scale=small, minimum=least if what.minimum else None, outer=outer,
        outer_minimum=outer if what.minimum else None,
    )  # fmt: skip


def products(kind: str, outputs: int, inputs: int) -> tuple[list[PackedMultiply], int]:
    """As many weights as fill the cycle, and the bytes of one."""
    make, rows = NativeQuantizedLinear(), random_rows(kind, outputs, inputs)

    def one() -> PackedMultiply:
        part = QuantizedPart(kind=kind, num_rows=outputs, chunks=[rows])
        return make([part], inputs, None, torch.bfloat16)

    first = one()
    return [first, *(one() for _ in range(CYCLED_BYTES // first.num_bytes))], first.num_bytes


def measure(kind: str, outputs: int, inputs: int, rows: Sequence[int], seconds: float) -> None:
    """One line for each number of rows; torch's side is its bf16 product."""
    packed, num_bytes = products(kind, outputs, inputs)
    dense = [torch.randn(outputs, inputs).bfloat16() for _ in range(2)]
    memory = stream()
    for n in rows:
        x = torch.randn(n, inputs).bfloat16()
        timing = in_turns(
            lambda i: packed[i % len(packed)](x),  # noqa: B023
            lambda i: F.linear(x, dense[i % 2]),  # noqa: B023
            core.probe_int8,
            memory,
            seconds,
        )
        line = timing.line(n, num_bytes, 2 * n * outputs * inputs, "OP/s")
        print(f"{kind:14} {inputs}x{outputs} {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="int8,int4_half,int4_half_min,int8_half,int4_k_min,int8_k")
    parser.add_argument("--rows", default="1,4,16,64,256,1024")
    parser.add_argument("--shapes", default="2048x8192,576x1536", help="inputs x outputs")
    parser.add_argument("--seconds", type=float, default=1.0)
    call = parser.parse_args()
    for kind in call.kinds.split(","):
        for shape in call.shapes.split(","):
            inputs, outputs = (int(n) for n in shape.split("x"))
            if KINDS[kind].outer and inputs % 256:
                continue
            measure(kind, outputs, inputs, [int(n) for n in call.rows.split(",")], call.seconds)


if __name__ == "__main__":
    main()
