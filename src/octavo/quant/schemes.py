"""The scheme of a plan.

Promises: one place where a plan's method becomes an object; what cannot run was refused before (`config.quantization`).
Does not know: names of schemes, or files.
"""

import torch

from octavo.config.quantization import COMPRESSED, GGUF, ONLINE, QuantPlan
from octavo.ops.pages import ModelMemory
from octavo.ops.registry import Ops
from octavo.quant.api import LinearScheme, Unquantized
from octavo.quant.compressed import CompressedScheme
from octavo.quant.gguf import GGUFScheme
from octavo.quant.online import OnlineScheme


def make_scheme(plan: QuantPlan, *, dtype: torch.dtype, ops: Ops, memory: ModelMemory) -> LinearScheme:
    """How the linear weights of a model of this type are kept."""
    floats = Unquantized(dtype, ops.linear, memory)
    if plan.method == GGUF:
        return GGUFScheme(dtype=dtype, multiply=ops.quantized_linear, floats=floats)
    if plan.method == ONLINE:
        return OnlineScheme(
            plan=plan, dtype=dtype, multiply=ops.quantized_linear, quantize=ops.quantize_rows, floats=floats
        )
    if plan.method == COMPRESSED:
        return CompressedScheme(plan=plan, dtype=dtype, multiply=ops.quantized_linear, floats=floats)
    return floats
