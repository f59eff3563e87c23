"""Norms and gated activations as layers.

Promises: each holds the device's operator itself, so a call is one call.
Does not know: which implementation that is.
"""

import torch
from torch import nn

from octavo.base.errors import LoadError
from octavo.ops.registry import Ops, Pointwise


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Owns: `weight` [size].
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self._eps = eps
        self._norm, self._add_norm = ops.rms_norm, ops.add_rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x, [..., size]."""
        return self._norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of residual + x, residual + x); both inputs may be overwritten."""
        return self._add_norm(x, residual, self.weight, self._eps)


def gated_activation(name: str, ops: Ops) -> Pointwise:
    """The operator for an activation by its name in `config.json`: [T, 2N] -> [T, N]."""
    table = {
        "silu": ops.silu_mul,
        "swish": ops.silu_mul,
        "gelu": ops.gelu_mul,
        "gelu_pytorch_tanh": ops.gelu_tanh_mul,
        "gelu_new": ops.gelu_tanh_mul,
    }
    if name not in table:
        raise LoadError(f"the model's activation {name!r} is not supported; there are {', '.join(sorted(table))}")
    return table[name]
