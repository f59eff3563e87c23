"""The definition of every operator, in plain torch.

Promises: any device, any float type, any strides; the same formulas and roundings as Hugging Face's modules,
so that logits agree. Every faster version is tested against these.
Does not know: which implementation is chosen (see `ops.registry`).
"""

import torch
import torch.nn.functional as F

from octavo.ops.quantized import quantize_rows as quantize_rows
from octavo.ops.quantized import quantized_linear as quantized_linear


class DenseMultiply:
    """`x @ weight.T + bias` over the weight as it is stored.

    Owns: nothing; it holds the caller's tensors.
    """

    packed = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None) -> None:
        self._weight = weight
        self._bias = bias
        self._out_dtype = out_dtype or weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias).to(self._out_dtype)


def linear(weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> DenseMultiply:
    """The function that multiplies [T, in] by `weight` [out, in] and adds `bias` [out]: [T, out].

    The result is of `out_dtype`, the weight's type when None; a head asks for float32, which a faster version may give
    without rounding in between.
    """
    return DenseMultiply(weight, bias, out_dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (Zhang and Sennrich, 2019).

    x [..., N], weight [N]; the normed value is rounded to x's type before it is scaled, as Llama's is.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual + x` and its norm: returns (normed, sum), the norm in the weight's type. May overwrite `x` and `residual`.

    The sum keeps the residual's type here, as Hugging Face's does; a faster version may keep it in float32, which
    rounds less. Both are taken as `residual`.
    """
    total = residual + x
    return rms_norm(total, weight, eps).to(weight.dtype), total


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate: [..., 2N] -> silu(first half) * second half, [..., N] (Shazeer, 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """[..., 2N] -> gelu(first half) * second half, [..., N]; the exact gelu."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """[..., 2N] -> gelu(first half) * second half, [..., N]; gelu's tanh form."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def rotary(query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query [T, H, D] and key [T, G, D] (Su et al., RoFormer, 2021; half-split pairs).

    `cos_sin` [T, R] holds each token's cos in its first R/2 columns and sin in the rest; the first R features of
    each head are rotated, feature i with feature i + R/2. May overwrite `query` and `key`. cos and sin may be wider
    than they are: the result is rounded to their type.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin).to(query.dtype), _rotate(key, cos, sin).to(key.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*parts, rest] if rest.shape[-1] else parts, dim=-1)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store key and value [T, G, D] at their token slots [T] of the caches [blocks, G, block size, D].

    A padding slot (-1) is written to the null block 0, whose content nobody reads.
    """
    size = key_cache.shape[2]
    slot_mapping = slot_mapping.clamp(min=0)
    blocks, offsets = slot_mapping // size, slot_mapping % size
    key_cache[blocks, :, offsets] = key.to(key_cache.dtype)
    value_cache[blocks, :, offsets] = value.to(value_cache.dtype)


def gather_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of `table` [R, N] at `index` [T] int64: [T, N]; an index outside 0 .. R - 1 gives a row of zeros."""
    inside = (index >= 0) & (index < len(table))
    return table[index.where(inside, 0)].masked_fill(~inside.unsqueeze(1), 0)
