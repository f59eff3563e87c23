"""Norms and activations call the device's operators."""

import pytest
import torch

from octavo.base.errors import LoadError
from octavo.layers.pointwise import RMSNorm, gated_activation
from octavo.ops import reference
from octavo.ops.registry import OpRegistry
from tests.attention.plain import CPU_FACTS

OPS = OpRegistry(()).bind(CPU_FACTS, torch.float32)


def test_norm_alone_and_with_a_residual():
    norm = RMSNorm(6, 1e-5, dtype=torch.float32, ops=OPS)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(3, 6), torch.randn(3, 6)
    assert torch.equal(norm(x), reference.rms_norm(x, norm.weight, 1e-5))
    for got, want in zip(norm.add(x, residual), (norm(residual + x), residual + x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "op"), [("silu", "silu_mul"), ("swish", "silu_mul"), ("gelu", "gelu_mul"), ("gelu_new", "gelu_tanh_mul")]
)
def test_activations_by_their_names(name, op):
    assert gated_activation(name, OPS) is getattr(OPS, op)


def test_an_unknown_activation_is_named():
    with pytest.raises(LoadError, match="'relu6' is not supported; there are gelu"):
        gated_activation("relu6", OPS)
