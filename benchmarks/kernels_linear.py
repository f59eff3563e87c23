"""What products with bf16 and float32 weights cost, beside torch's own product and the machine's limit.

    python benchmarks/kernels_linear.py [--dtypes bfloat16,float32] [--rows 1,32,512] [--shapes 2048x8192] [--seconds 1]

Few rows are bound by memory: GB/s of packed weights, as a share of a streaming read. Many rows are bound by arithmetic:
operations a second, as a share of a probe of the instruction that multiplies bf16; float32, whose own limit is lower
and not probed, is given the same. Weights are cycled, so that no cache holds what is read next, and rows lie in large
pages, as the engine's do. All take turns, and the best of the rounds is shown, since a machine's neighbours are part of
what is measured.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from product_timing import CYCLED_BYTES, in_turns, stream

from octavo.ops.native import core
from octavo.ops.native_linear import NativeLinear
from octavo.ops.pages import reserve


def measure(dtype: torch.dtype, inputs: int, outputs: int, rows: Sequence[int], seconds: float) -> None:
    """One line for each number of rows."""
    make, memory = NativeLinear(), stream()
    weight = torch.randn(outputs, inputs).to(dtype)
    count = CYCLED_BYTES // weight.nbytes + 1
    packed = [make(weight, None) for _ in range(count)]
    plain = [weight.clone() for _ in range(count)]
    for n in rows:
        x = reserve(n * inputs * dtype.itemsize, "rows").view(dtype)[: n * inputs].view(n, inputs)
        x.normal_()
        timing = in_turns(
            lambda i: packed[i % count](x),  # noqa: B023
            lambda i: F.linear(x, plain[i % count]),  # noqa: B023
            core.probe_bf16,
            memory,
            seconds,
        )
        line = timing.line(n, weight.nbytes, 2 * n * inputs * outputs, "FLOP/s")
        print(f"{str(dtype).removeprefix('torch.'):9} {inputs}x{outputs} {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rows", default="1,4,16,32,128,512,2048")
    parser.add_argument("--shapes", default="576x576,576x3072,1536x576,2048x8192,8192x2048", help="inputs x outputs")
    parser.add_argument("--seconds", type=float, default=1.0)
    call = parser.parse_args()
    for dtype in call.dtypes.split(","):
        for shape in call.shapes.split(","):
            inputs, outputs = (int(n) for n in shape.split("x"))
            measure(getattr(torch, dtype), inputs, outputs, [int(n) for n in call.rows.split(",")], call.seconds)


if __name__ == "__main__":
    main()
