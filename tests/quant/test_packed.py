"""Layers whose weights are kept as small integers: rounded while they are read, or as the checkpoint has them (QNT-5)."""

import json

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.config.quantization import SHORT_NAMES, QuantPlan
from octavo.ops import quantized, reference
from octavo.ops.quantized import QuantizedPart, quantize_rows
from octavo.ops.registry import OpRegistry
from octavo.quant.api import Share, TensorPiece, WrongKindError
from octavo.quant.packed import PackedLinear
from octavo.quant.schemes import make_scheme
from tests.ops.test_registry import device

INT8, INT4 = SHORT_NAMES["int8_per_channel"], SHORT_NAMES["int4_group"]
NATIVE = "native" in {i.name for i in OpRegistry().implementations("quantized_linear")}


def online(default=INT8, **changes):
    return QuantPlan(method="online", default=default, head=changes.pop("head", INT8), **changes)


def scheme(plan, dtype=torch.float32, forced=None):
    memory = pytest.importorskip("octavo.ops.pages").ModelMemory()
    return make_scheme(plan, dtype=dtype, ops=OpRegistry().bind(device(), dtype, forced=forced), memory=memory)


def whole(rows, columns, row=0):
    return Share(row, rows, 0, 0, columns, rows, columns)


def product(weight, kind, x, bias=None):
    """What the definition of a kind gives."""
    part = QuantizedPart(kind=kind, num_rows=len(weight), chunks=[quantize_rows(weight, kind)])
    return quantized.quantized_linear([part], weight.shape[1], bias, torch.float32)(x)


def near(a, b):
    return (a.float() - b.float()).abs().max() <= 2e-5 * b.float().abs().max()


@pytest.mark.parametrize("forced", [None, {"quantized_linear": "reference", "quantize_rows": "reference"}])
@pytest.mark.parametrize(("key", "kind"), [(INT8, "int8"), (INT4, "int4_half")])
def test_a_float_weight_is_rounded_and_multiplied(key, kind, forced):
    layer = scheme(online(key), forced=forced).create(96, 40, bias=True)
    weight, bias, x = torch.randn(40, 96), torch.randn(40), torch.randn(7, 96)
    layer.place("weight", weight, whole(40, 96))
    layer.place("bias", bias, whole(40, 96))
    with pytest.raises(RuntimeError, match="before finish"):
        layer(x)
    layer.finish()
    assert near(layer(x), product(weight, kind, x, bias))
    assert not dict(layer.named_parameters())
    with pytest.raises(RuntimeError, match="twice"):
        layer.finish()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_a_checkpoint_may_have_any_float_type(dtype):
    layer = scheme(online(), dtype=torch.bfloat16).create(64, 8, bias=False)
    weight, x = torch.randn(8, 64).to(dtype), torch.randn(3, 64).bfloat16()
    layer.place("weight", weight, whole(8, 64))
    layer.finish()
    got = layer(x)
    assert got.dtype == torch.bfloat16
    assert (got.float() - product(weight.float(), "int8", x)).abs().max() < 0.01 * got.float().abs().max() + 0.01


def test_shards_and_shares_go_to_their_rows():
    """Two ranks' worth of a fused weight: rows of each shard, and columns of a divided input."""
    layer = scheme(online()).create(32, 5, bias=False)
    first, second, x = torch.randn(6, 64), torch.randn(4, 64), torch.randn(3, 32)
    layer.place("weight", second, Share(3, 2, 2, 32, 32, 4, 64))  # they may come in any order
    layer.place("weight", first, Share(0, 3, 3, 32, 32, 6, 64))
    layer.finish()
    assert near(layer(x), product(torch.cat([first[3:, 32:], second[2:, 32:]]), "int8", x))


def test_outputs_without_a_weight_are_zero():
    """The last rank of a divided vocabulary may have fewer words than rows."""
    for key in (INT8, INT4):
        layer = scheme(online(key)).create(64, 40, bias=False)
        layer.place("weight", torch.randn(33, 64), whole(33, 64))
        layer.finish()
        out = layer(torch.randn(2, 64))
        assert out[:, :33].abs().min() > 0 and not out[:, 33:].any()


def test_an_asymmetric_key_keeps_a_minimum():
    key = SHORT_NAMES["int4_group"].__class__(
        weight="int4", activation="int8", scale="float16", group=32, symmetric=False
    )
    layer = scheme(online(key)).create(64, 8, bias=False)
    weight, x = torch.rand(8, 64) + 3, torch.randn(2, 64)
    layer.place("weight", weight, whole(8, 64))
    layer.finish()
    assert near(layer(x), product(weight, "int4_half_min", x))
    missed = (quantize_rows(weight, "int4_half_min").values() - weight).abs().max()
    assert missed < 1 / 30 + 0.003, "nothing is spent on numbers between 0 and 3"


def test_layers_left_out_are_floats_and_names_choose():
    plan = online(INT4, ignore=("a.o_proj",), targets=(("*.down_proj", INT8),))
    made = {}
    for name in ("a.o_proj", "a.down_proj", "a.up_proj", "lm_head"):
        layer = made[name] = scheme(plan).create(64, 32, bias=False)
        layer.named((name,))
        layer.place("weight", torch.randn(32, 64), whole(32, 64))
        layer.finish()
    assert any(name.startswith("floats.") for name in made["a.o_proj"].state()) or not NATIVE
    x = torch.randn(2, 64)
    sizes = {name: layer.num_bytes for name, layer in made.items()}
    assert sizes["a.o_proj"] >= 32 * 64 * 4 > sizes["a.down_proj"] == sizes["lm_head"] > sizes["a.up_proj"]
    assert made["a.o_proj"](x).shape == (2, 32)


def test_weights_that_are_one_matrix_must_be_treated_alike():
    layer = scheme(online(targets=(("*.q_proj", INT4),))).create(64, 32, bias=False)
    layer.named(("a.q_proj", "a.k_proj"))
    with pytest.raises(ConfigError, match=r"a\.q_proj, a\.k_proj are one matrix"):
        layer.num_bytes  # noqa: B018


@pytest.mark.parametrize(
    "plan", [online(INT8), online(INT4), online(INT8, ignore=("x",))], ids=["int8", "int4", "ignored"]
)
def test_size_is_known_before_and_state_is_taken_back(plan):
    def made():
        layer = scheme(plan).create(96, 70, bias=True)
        layer.named(("x",))
        return layer

    layer = made()
    early = layer.num_bytes
    for parameter, tensor in (("weight", torch.randn(70, 96)), ("bias", torch.randn(70))):
        layer.place(parameter, tensor, whole(70, 96))
    expected = layer.num_bytes
    layer.finish()
    assert early == expected == layer.num_bytes
    again, x = made(), torch.randn(3, 96)
    again.restore({name: _aligned(tensor) for name, tensor in layer.state().items()})
    assert torch.equal(again(x), layer(x))
    with pytest.raises((KeyError, ValueError)):
        made().restore({"0.int8.3.packed": torch.zeros(64, dtype=torch.uint8)})


def _aligned(tensor):
    memory = pytest.importorskip("octavo.ops.pages").ModelMemory()
    return memory.keep(tensor)


def test_whole_numbers_and_wrong_shapes_are_refused_before_anything_is_read():
    layer = scheme(online()).create(64, 32, bias=False)
    with pytest.raises(WrongKindError, match="I32"):
        layer.place("weight", torch.zeros(32, 64, dtype=torch.int32), whole(32, 64))
    with pytest.raises(ValueError, match=r"the model's is \[32, 64\]"):
        layer.place("weight", torch.zeros(32, 63), whole(32, 64))
    with pytest.raises(KeyError):
        layer.place("bias", torch.zeros(32), whole(32, 64))
    with pytest.raises(KeyError):
        layer.place("weight_scale", torch.zeros(32), whole(32, 64))


class CountingPiece(TensorPiece):
    """Remembers how much was asked for at once."""

    asked: list = []  # noqa: RUF012

    def rows(self, first, count, dtype=None):
        self.asked.append(count)
        return super().rows(first, count, dtype)


def test_a_large_weight_is_read_in_slices():
    CountingPiece.asked.clear()
    layer = scheme(online()).create(4096, 5000, bias=False)
    layer.place("weight", CountingPiece(torch.randn(5000, 4096)), whole(5000, 4096))
    layer.finish()
    assert CountingPiece.asked == [2048, 2048, 904]


# ---- compressed-tensors -------------------------------------------------------------------------


def compressed(ignore=("lm_head",)):
    return scheme(QuantPlan(method="compressed-tensors", default=INT8, head=INT8, ignore=ignore))


@pytest.mark.parametrize("scale_shape", [(24,), (24, 1)])
def test_the_integers_and_scales_of_compressed_tensors_are_used_as_they_are(scale_shape):
    layer = compressed().create(64, 24, bias=False)
    layer.named(("a.o_proj",))
    assert layer.parameter_names() == ("weight", "weight_scale")
    q, scale, x = torch.randint(-128, 128, (24, 64), dtype=torch.int8), torch.rand(24) + 0.1, torch.randn(5, 64)
    layer.place("weight", q, whole(24, 64))
    layer.place("weight_scale", scale.view(scale_shape), whole(24, 64))
    layer.finish()
    rounded = quantized.round_activations(x, by_row=True)
    assert near(layer(x), rounded @ (q.float() * scale[:, None]).T)
    with pytest.raises(WrongKindError, match="says int8"):
        layer.check("weight", TensorPiece(torch.zeros(24, 64)), whole(24, 64))
    with pytest.raises(ValueError, match="shape"):
        layer.check("weight_scale", TensorPiece(torch.zeros(24, 2)), whole(24, 64))


def test_what_a_checkpoint_leaves_out_is_floats():
    layer = compressed().create(64, 24, bias=True, out_dtype=torch.float32)
    layer.named(("lm_head",))
    assert layer.parameter_names() == ("weight", "bias")
    weight, bias, x = torch.randn(24, 64), torch.randn(24), torch.randn(2, 64)
    layer.place("weight", weight, whole(24, 64))
    layer.place("bias", bias, whole(24, 64))
    layer.finish()
    assert torch.allclose(layer(x), reference.linear(weight, bias)(x), atol=1e-4)


def test_a_plan_and_a_type_is_a_scheme():
    assert scheme(QuantPlan()).name == "unquantized"
    names = {scheme(plan).name for plan in (online(INT8), online(INT4), online(INT8, ignore=("a",)))}
    assert len(names) == 3, "the name tells packed weights apart"
    assert scheme(QuantPlan(method="gguf")).name == "gguf"
    assert isinstance(scheme(online()).create(32, 32, bias=False), PackedLinear)
    assert json.dumps(scheme(online()).notes()) == "[]"
