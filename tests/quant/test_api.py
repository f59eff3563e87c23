"""Weights stored as they are, and schemes that are refused."""

import dataclasses

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.config.facts import ModelFacts
from octavo.ops import reference
from octavo.quant.api import Share, Unquantized, detect

FACTS = ModelFacts(
    source="", format="hf", architecture="A", model_type="a", vocab_size=1, hidden_size=1, intermediate_size=1,
    num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, max_position=1, dtype="float32",
)  # fmt: skip


class Packed:
    """A multiplication that keeps a copy of its own."""

    packed = True

    def __init__(self, weight, bias):
        self.weight, self.bias = weight.clone(), bias

    def __call__(self, x):
        return x @ self.weight.T


def stored(bias=True, linear=reference.linear):
    return Unquantized(torch.float32, linear).create(3, 4, bias=bias)


def test_a_share_of_a_tensor_goes_to_its_rows():
    layer = stored()
    layer.weight.data.zero_()
    layer.bias.data.zero_()
    whole = torch.arange(48.0).view(8, 6)
    layer.place("weight", whole, Share(row=1, rows=2, source_row=4, source_column=3, columns=3, tensor_rows=8, tensor_columns=6))  # fmt: skip
    layer.place("bias", torch.arange(8.0), Share(1, 2, 4, 3, 3, 8, 6))
    assert layer.weight.tolist() == [[0, 0, 0], whole[4, 3:].tolist(), whole[5, 3:].tolist(), [0, 0, 0]]
    assert layer.bias.tolist() == [0, 4, 5, 0]


def test_wrong_shapes_and_names_are_refused():
    layer, share = stored(bias=False), Share(0, 4, 0, 0, 3, 4, 3)
    for shape in ((3, 4), (4,), (5, 3)):
        with pytest.raises(ValueError, match=r"the model's is \[4, 3\]"):
            layer.place("weight", torch.zeros(shape), share)
    with pytest.raises(KeyError):
        layer.place("bias", torch.zeros(4), share)
    with pytest.raises(KeyError):
        layer.place("scales", torch.zeros(4), share)
    assert layer.parameter_names() == ("weight",) and stored().parameter_names() == ("weight", "bias")


def test_it_multiplies_after_finish_and_not_before():
    layer = stored()
    torch.nn.init.normal_(layer.weight), torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="before finish"):
        layer(x)
    layer.finish()
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert dict(layer.named_parameters()).keys() == {"weight", "bias"}, "nothing was packed, so nothing was copied"


def test_a_packed_weight_is_not_kept_twice():
    layer = stored(linear=Packed)
    torch.nn.init.normal_(layer.weight)
    weight, x = layer.weight.data.clone(), torch.randn(2, 3)
    layer.finish()
    assert not dict(layer.named_parameters())
    assert torch.equal(layer(x), x @ weight.T)
    with pytest.raises(RuntimeError, match="twice"):
        layer.finish()


def test_a_weight_is_converted_to_the_models_type():
    layer = Unquantized(torch.bfloat16, reference.linear).create(2, 1, bias=False)
    layer.place("weight", torch.tensor([[1.0, 1 / 3]]), Share(0, 1, 0, 0, 2, 1, 2))
    assert layer.weight.dtype == torch.bfloat16 and layer.weight[0, 1] == torch.tensor(1 / 3).bfloat16()


def test_detection():
    assert detect(FACTS, dtype=torch.float32, linear=reference.linear).name == "unquantized"
    gptq = dataclasses.replace(FACTS, quantization={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="quantized with gptq, which is not supported"):
        detect(gptq, dtype=torch.float32, linear=reference.linear)
