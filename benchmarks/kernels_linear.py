"""What products with bf16 and float32 weights cost, beside torch's own product and the machine's limit.

    python benchmarks/kernels_linear.py [--dtypes bfloat16,float32] [--rows 1,32,512] [--shapes 2048x8192] [--seconds 1]

Few rows are bound by memory: GB/s of packed weights, as a share of a streaming read. Many rows are bound by arithmetic:
operations a second, as a share of a probe of the instruction that multiplies bf16 (no such share for float32, whose
limit is not probed). Weights are cycled, so that no cache holds what is read next, and rows lie in large pages, as the
engine's do. All take turns, and the best of the rounds is shown, since a machine's neighbours are part of what is
measured.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from octavo.ops.native import core
from octavo.ops.native_linear import NativeLinear
from octavo.ops.pages import reserve

CYCLED_BYTES = 256 << 20
SLICE_BYTES = 16 << 20  # that the probe reads at once
MEMORY_ROWS = 16  # up to here the share of the memory's limit is shown
PROBE_ROUNDS = 20_000


def best_s(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(dtype: torch.dtype, inputs: int, outputs: int, rows: Sequence[int], seconds: float) -> None:
    """One line for each number of rows."""
    make = NativeLinear()
    weight = torch.randn(outputs, inputs).to(dtype)
    num_bytes = weight.nbytes
    packed = [make(weight, None) for _ in range(CYCLED_BYTES // num_bytes + 1)]
    plain = [weight.clone() for _ in range(CYCLED_BYTES // num_bytes + 1)]
    stream = reserve(CYCLED_BYTES, "the probe").fill_(1)
    for count in rows:
        x = reserve(count * inputs * dtype.itemsize, "rows").view(dtype)[: count * inputs].view(count, inputs)
        x.normal_()
        native = twin = read = multiply = float("inf")
        end, i = time.perf_counter() + seconds, 0
        while time.perf_counter() < end or i < 4:
            native = min(native, best_s(lambda: packed[i % len(packed)](x)))  # noqa: B023
            twin = min(twin, best_s(lambda: F.linear(x, plain[i % len(plain)])))  # noqa: B023
            at = stream.data_ptr() + i % (CYCLED_BYTES // SLICE_BYTES) * SLICE_BYTES
            read = min(read, best_s(lambda: core.probe_read(at, SLICE_BYTES)) / SLICE_BYTES)  # noqa: B023
            began = time.perf_counter()
            operations = core.probe_bf16(PROBE_ROUNDS)
            multiply = min(multiply, (time.perf_counter() - began) / operations)
            i += 1
        work = 2 * count * inputs * outputs
        if count <= MEMORY_ROWS:
            limit = f"{num_bytes * read / native:4.0%} of {1 / read / 1e9:.0f} GB/s"
        elif dtype == torch.bfloat16:
            limit = f"{work * multiply / native:4.0%} of {1 / multiply / 1e12:.1f} TFLOP/s"
        else:
            limit = ""
        print(
            f"{str(dtype).removeprefix('torch.'):9} {inputs}x{outputs} {count:5} rows {native * 1e6:9.0f} us "
            f"{num_bytes / native / 1e9:6.1f} GB/s {work / native / 1e9:7.0f} GFLOP/s   {limit:20} "
            f"{twin / native:6.2f}x torch",
            flush=True,
        )


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
