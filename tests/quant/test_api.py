"""Weights stored as they are, and schemes that are refused."""

from typing import ClassVar

import pytest
import torch

from octavo.config.facts import ModelFacts
from octavo.ops import reference
from octavo.quant.api import Share, TensorPiece, Unquantized, WrongKindError, read_rows

FACTS = ModelFacts(
    source="", format="hf", architecture="A", model_type="a", vocab_size=1, hidden_size=1, intermediate_size=1,
    num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, max_position=1, dtype="float32",
)  # fmt: skip


class Packed:
    """A multiplication that keeps a copy of its own, transposed."""

    packed = True

    def __init__(self, packed, bias):
        self.packed_weight, self.bias = packed, bias

    def state(self):
        return {"packed": self.packed_weight, "bias": self.bias}

    def __call__(self, x):
        return x @ self.packed_weight + self.bias


class Packing:
    """Makes them, and takes their states."""

    def __call__(self, weight, bias, out_dtype=None):
        return Packed(weight.T.contiguous(), bias)

    def packed_bytes(self, in_features, out_features, dtype):
        return in_features * out_features * dtype.itemsize

    def restore(self, state, in_features, out_features, dtype, out_dtype=None):
        return Packed(state["packed"], state["bias"])


class Silent:
    """Packed, but without a form to be saved in."""

    packed = True


def stored(bias=True, linear=reference.linear):
    return Unquantized(torch.float32, linear).create(3, 4, bias=bias)


WHOLE = Share(row=0, rows=4, source_row=0, source_column=0, columns=3, tensor_rows=4, tensor_columns=3)


def filled(linear=reference.linear):
    """A layer with random weights, and those."""
    layer, weight, bias = stored(linear=linear), torch.randn(4, 3), torch.randn(4)
    layer.place("weight", weight, WHOLE)
    layer.place("bias", bias, WHOLE)
    return layer, weight, bias


def test_a_share_of_a_tensor_goes_to_its_rows():
    layer, whole = stored(), torch.arange(48.0).view(8, 6)
    share = Share(row=1, rows=2, source_row=4, source_column=3, columns=3, tensor_rows=8, tensor_columns=6)
    layer.place("weight", whole, share)
    layer.place("bias", torch.arange(8.0), share)
    layer.finish()
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


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.bool])
def test_numbers_that_need_a_scale_are_refused(kind):
    with pytest.raises(WrongKindError, match="floats are needed"):
        stored().place("weight", torch.zeros(4, 3).to(kind), WHOLE)


def test_it_multiplies_after_finish_and_not_before():
    layer, weight, bias = filled()
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="before finish"):
        layer(x)
    assert not dict(layer.named_parameters()), "placing takes no memory"
    layer.finish()
    assert torch.equal(layer(x), torch.nn.functional.linear(x, weight, bias))
    assert dict(layer.named_parameters()).keys() == {"weight", "bias"}, "nothing was packed, so nothing was copied"
    assert layer.num_bytes == stored().num_bytes == 4 * (12 + 4)


def test_a_packed_weight_is_not_kept_twice():
    layer, weight, bias = filled(Packing())
    x = torch.randn(2, 3)
    layer.finish()
    assert not dict(layer.named_parameters())
    torch.testing.assert_close(layer(x), x @ weight.T + bias)
    assert layer.num_bytes == stored(linear=Packing()).num_bytes
    with pytest.raises(RuntimeError, match="twice"):
        layer.finish()


@pytest.mark.parametrize("linear", [reference.linear, Packing()], ids=["dense", "packed"])
def test_a_saved_state_is_taken_over_without_a_copy(linear):
    layer, _, _ = filled(linear)
    layer.finish()
    state = dict(layer.state())
    again = stored(linear=linear)
    again.restore(state)
    x = torch.randn(5, 3)
    assert torch.equal(again(x), layer(x))
    assert {t.data_ptr() for t in again.state().values()} == {t.data_ptr() for t in state.values()}
    assert again.num_bytes == layer.num_bytes


def test_another_layers_state_is_refused():
    layer, _, _ = filled()
    layer.finish()
    with pytest.raises(ValueError, match="not a weight of"):
        Unquantized(torch.float32, reference.linear).create(4, 4, bias=True).restore(layer.state())
    with pytest.raises(ValueError, match="not a weight of"):
        stored(bias=False).restore(layer.state())


def test_a_packed_weight_that_shows_no_state_cannot_be_saved():
    layer, _, _ = filled(lambda weight, bias, out_dtype: Silent())
    layer.finish()
    with pytest.raises(NotImplementedError, match="Silent"):
        layer.state()


def test_a_weight_is_converted_to_the_models_type():
    layer = Unquantized(torch.bfloat16, reference.linear).create(2, 1, bias=False)
    layer.place("weight", torch.tensor([[1.0, 1 / 3]]), Share(0, 1, 0, 0, 2, 1, 2))
    layer.finish()
    assert layer.weight.dtype == torch.bfloat16 and layer.weight[0, 1] == torch.tensor(1 / 3).bfloat16()


def test_rows_are_read_in_slices_and_pages_go_back_between_them():
    class Watched(TensorPiece):
        asked: ClassVar[list[tuple[int, int]]] = []
        forgotten: ClassVar[list[int]] = []

        def rows(self, first, count, dtype=None):
            self.asked.append((first, count))
            return TensorPiece.rows(self, first, count, dtype)

        def forget(self):
            self.forgotten.append(len(self.asked))

    whole = torch.randn(5000, 1024)
    into = torch.empty(4096, 1000)
    read_rows(into, Watched(whole), 7, 4096, 3)
    assert torch.equal(into, whole[7:4103, 3:1003])
    assert Watched.asked[0] == (7, 2097) and sum(count for _, count in Watched.asked) == 4096
    assert Watched.forgotten == [1, 2]
