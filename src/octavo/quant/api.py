"""How a weight is stored and multiplied by: the protocol, and the scheme that stores it as it is.

Promises: layers know shapes and shards, schemes know bytes; repacking happens once, in `finish`.
Does not know: file formats, or which layer a weight belongs to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from octavo.base.errors import ConfigError
from octavo.config.facts import ModelFacts
from octavo.ops.registry import Linear, Multiply


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a checkpoint tensor this rank keeps, and where: all in units of weight rows and columns.

    Rows `source_row .. source_row + rows` and columns `source_column .. source_column + columns` of the
    checkpoint's tensor, which is [tensor_rows, tensor_columns] as a whole, go to our rows from `row` on.
    """

    row: int
    rows: int
    source_row: int
    source_column: int
    columns: int
    tensor_rows: int
    tensor_columns: int


class StoredLinear(Protocol):
    """One linear layer's weight on this rank. An `nn.Module` that owns its parameters."""

    def parameter_names(self) -> tuple[str, ...]:
        """What the checkpoint stores of it, such as ("weight", "bias")."""

    def place(self, parameter: str, tensor: torch.Tensor, share: Share) -> None:
        """Copy a share of one checkpoint tensor in. Raises `ValueError` on a wrong shape, `KeyError` on a name."""

    def finish(self) -> None:
        """All weights are in: repack for the kernel."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]; only after `finish`."""


class LinearScheme(Protocol):
    """A way to store linear weights."""

    @property
    def name(self) -> str: ...

    def create(self, in_features: int, out_features: int, *, bias: bool) -> StoredLinear:
        """Room for one weight [out, in] of this rank, on torch's current default device."""


class DenseLinear(nn.Module):
    """A weight in the model's own type.

    Owns: `weight` [out, in] and `bias` [out]; after `finish` only if the operator works on them in place.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, linear: Linear) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = _empty(out_features, in_features, dtype=dtype)
        self.bias: nn.Parameter | None = _empty(out_features, dtype=dtype) if bias else None
        self._linear = linear
        self._multiply: Multiply | None = None

    def parameter_names(self) -> tuple[str, ...]:
        return ("weight",) if self.bias is None else ("weight", "bias")

    def place(self, parameter: str, tensor: torch.Tensor, share: Share) -> None:
        mine = self.get_parameter(parameter) if parameter in self.parameter_names() else None
        if mine is None:
            raise KeyError(parameter)
        want = [share.tensor_rows, share.tensor_columns][: mine.dim()]
        if list(tensor.shape) != want:
            raise ValueError(f"its shape is {list(tensor.shape)}, the model's is {want}")
        part = tensor[share.source_row : share.source_row + share.rows]
        if mine.dim() == 2:
            part = part[:, share.source_column : share.source_column + share.columns]
        with torch.no_grad():
            mine[share.row : share.row + share.rows].copy_(part)

    def finish(self) -> None:
        if self.weight is None:
            raise RuntimeError("finish() was called twice on a packed weight")
        bias = None if self.bias is None else self.bias.data
        self._multiply = self._linear(self.weight.data, bias)
        if self._multiply.packed:
            self.weight = self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._multiply is None:
            raise RuntimeError("a linear layer was used before finish(); call models.build.finish(model) after loading")
        return self._multiply(x)


@dataclass(frozen=True, slots=True)
class Unquantized:
    """Weights as the checkpoint has them, converted to the model's type."""

    dtype: torch.dtype
    linear: Linear
    name: str = "unquantized"

    def create(self, in_features: int, out_features: int, *, bias: bool) -> DenseLinear:
        return DenseLinear(in_features, out_features, bias, self.dtype, self.linear)


def detect(facts: ModelFacts, *, dtype: torch.dtype, linear: Linear) -> LinearScheme:
    """The scheme that the checkpoint asks for. Raises `ConfigError` for one that is not supported."""
    return Unquantized(dtype, linear) if not facts.quantization else _refuse(facts.quantization)


def _refuse(quantization: Mapping[str, object]) -> LinearScheme:
    method = quantization.get("quant_method") or quantization.get("quant_algo") or "an unnamed method"
    raise ConfigError(
        f"the checkpoint is quantized with {method}, which is not supported yet; use an unquantized one or a GGUF file"
    )


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
