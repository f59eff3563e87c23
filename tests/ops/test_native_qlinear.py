"""Products with quantized weights: the native core against plain torch, at every level of instructions (QNT-22, QNT-23)."""

import pytest
import torch

from octavo.ops import native_qlinear, quantized
from octavo.ops.quantized import BLOCK, GROUP, KINDS, QuantizedPart, QuantizedRows

native = pytest.importorskip("octavo.ops.native")
LEVELS = native.levels()


@pytest.fixture(params=LEVELS)
def level(request):
    native.use_level(request.param)
    yield request.param
    native.use_level(LEVELS[-1])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_rows(kind, rows, inputs, seed=0):
    """Numbers that use the whole range of a kind."""
    rng = torch.Generator().manual_seed(seed)
    what, groups = KINDS[kind], -(-inputs // GROUP)

    def halves(*shape):
        return (torch.rand(*shape, generator=rng) + 0.5).half()

    def small(low, high, columns):
        dtype = torch.int8 if low < 0 else torch.uint8
        return torch.randint(low, high, (rows, columns), generator=rng).to(dtype)

    q = torch.randint(0, 1 << what.bits, (rows, inputs), generator=rng).to(torch.uint8)
    if what.span is None:
        return QuantizedRows(kind=kind, q=q.clamp(1), scale=torch.rand(rows, generator=rng) + 0.5)
    if not what.outer:
        minimum = torch.randn(rows, groups, generator=rng).half() if what.minimum else None
        return QuantizedRows(kind=kind, q=q, scale=halves(rows, groups), minimum=minimum)
    outer = halves(rows, inputs // BLOCK)
    if not what.minimum:
        return QuantizedRows(kind=kind, q=q, scale=small(-128, 128, inputs // what.span), outer=outer)
    return QuantizedRows(
        kind=kind, q=q, scale=small(0, 64, groups), minimum=small(0, 64, groups), outer=outer,
        outer_minimum=halves(rows, inputs // BLOCK),
    )  # fmt: skip


def activations(rows, inputs, dtype=torch.float32, seed=1):
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
    x[:, ::7] *= 10
    return x.to(dtype)


def both(parts, inputs, bias=None, out_dtype=torch.float32):
    """(native, reference) products with the same rows."""

    def given():
        return [QuantizedPart(kind=p.kind, num_rows=len(p.q), chunks=[p]) for p in parts]

    native_one = native_qlinear.NativeQuantizedLinear()(given(), inputs, bias, out_dtype)
    return native_one, quantized.quantized_linear(given(), inputs, bias, out_dtype)


def close(got, want):
    return (got - want).abs().max() <= 2e-5 * want.abs().max()


SHAPES = [(5, 256), (48, 768), (100, 512), (33, 1024)]
ODD = [(40, 100), (7, 33), (1, 1), (64, 576), (96, 2112)]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_reference_at_every_level_and_odd_size(level, kind):
    for outputs, inputs in SHAPES + ([] if KINDS[kind].outer else ODD):
        rows = random_rows(kind, outputs, inputs)
        bias = torch.randn(outputs)
        for given in (None, bias):
            ours, reference = both([rows], inputs, given)
            for count in (1, 3, 16, 37):
                x = activations(count, inputs)
                assert close(ours(x), reference(x)), (outputs, inputs, count)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_the_other_rows_or_on_threads(level, kind):
    outputs, inputs = (40, 512) if level == "scalar" else (100, 768)
    ours, _ = both([random_rows(kind, outputs, inputs)], inputs, torch.randn(outputs), torch.bfloat16)
    x = activations(70, inputs, torch.bfloat16)
    whole = ours(x)
    for count in range(1, 65):
        assert torch.equal(ours(x[:count]), whole[:count]), count
    for start in (1, 5, 13, 33):
        assert torch.equal(ours(x[start : start + 19]), whole[start : start + 19])
    torch.set_num_threads(2)
    for count in (1, 7, 33, 70):
        assert torch.equal(ours(x[:count]), whole[:count]), count


@pytest.mark.parametrize("inputs", [4096, 2304])
def test_many_rows_and_inputs_are_summed_in_pieces_without_a_difference(inputs):
    """More inputs than stay in the second cache and more rows than are taken at once."""
    rows = random_rows("int8", 70, inputs)
    ours, reference = both([rows], inputs)
    x = activations(530, inputs)
    got = ours(x)
    assert close(got, reference(x))
    assert torch.equal(got[:5], ours(x[:5])) and torch.equal(got[525:], ours(x[525:]))


def test_parts_of_several_kinds_lie_side_by_side(level):
    """GGUF files mix types in what is one fused weight here."""
    kinds = ("int4_half_min", "int8_k", "int8_half", "int4_k_min")
    parts = [random_rows(kind, size, 512, seed=size) for kind, size in zip(kinds, (48, 33, 1, 64), strict=True)]
    bias = torch.randn(48 + 33 + 1 + 64)
    ours, reference = both(parts, 512, bias)
    for count in (1, 6, 20):
        x = activations(count, 512)
        assert close(ours(x), reference(x))


@pytest.mark.parametrize("kind", ["int8", "int4_half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_strides_and_misalignment(level, kind, dtype):
    rows = random_rows(kind, 35, 96)
    for out_dtype in (torch.float32, torch.bfloat16):
        ours, reference = both([rows], 96, None, out_dtype)
        for view in (activations(9, 97, dtype)[:, 1:], activations(18, 96, dtype)[::2], activations(96, 9, dtype).T):
            want = reference(view).float()
            assert ours(view).dtype == out_dtype
            assert (ours(view).float() - want).abs().max() <= (
                2e-5 if out_dtype == torch.float32 else 0.01
            ) * want.abs().max()


@pytest.mark.parametrize("kind", ["int8", "int8_half", "int4_half", "int4_half_min"])
def test_zero_tiny_infinite_and_nan_rows(level, kind):
    """0 gives the bias exactly, numbers too small to scale count as 0, and what is no number is seen in the result."""
    bias = torch.randn(40)
    ours, _ = both([random_rows(kind, 40, 64)], 64, bias)
    x = activations(20, 64)
    clean = ours(x)
    x[0], x[1] = 0, 1e-37
    x[2, 3], x[3, 3] = torch.nan, torch.inf
    out = ours(x)
    assert torch.equal(out[0], bias) and torch.equal(out[1], bias)
    assert out[2].isnan().all() and not out[3].isfinite().any()
    assert torch.equal(out[4:], clean[4:]), "other rows do not feel it"
    assert torch.equal(ours(x[2:3]).isnan(), out[2:3].isnan())


def test_no_rows_give_no_rows():
    ours, _ = both([random_rows("int8", 40, 64)], 64)
    assert ours(torch.empty(0, 64)).shape == (0, 40)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_come_in_chunks_of_any_size(level, kind):
    whole = random_rows(kind, 75, 256)
    tensors = {n: getattr(whole, n) for n in ("q", "scale", "minimum", "outer", "outer_minimum")}

    def chunks():
        for start, end in ((0, 1), (1, 31), (31, 33), (33, 64), (64, 75)):
            yield QuantizedRows(kind=kind, **{n: None if t is None else t[start:end] for n, t in tensors.items()})

    op = native_qlinear.NativeQuantizedLinear()
    x = activations(3, 256)
    pieces = op([QuantizedPart(kind=kind, num_rows=75, chunks=chunks())], 256, None, torch.float32)
    at_once = op([QuantizedPart(kind=kind, num_rows=75, chunks=[whole])], 256, None, torch.float32)
    assert torch.equal(pieces(x), at_once(x))
    with pytest.raises(ValueError, match="75 rows was given 1"):
        op([QuantizedPart(kind=kind, num_rows=75, chunks=[next(chunks())])], 256, None, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_packed_at_one_level_serves_at_another(kind):
    """The packed form is one, and a saved state is taken back without packing."""
    rows, bias, x = random_rows(kind, 75, 256), torch.randn(75), activations(5, 256)
    first, _ = both([rows], 256, bias)
    state = first.state()
    assert first.num_bytes == sum(t.numel() * t.element_size() for t in state.values())
    for name in LEVELS:
        native.use_level(name)
        again = native_qlinear.NativeQuantizedLinear.restore(state, 256, 75, torch.float32)
        assert close(again(x), first(x))
        assert all(again.state()[key] is tensor for key, tensor in state.items())
    with pytest.raises(ValueError, match="outputs"):
        native_qlinear.NativeQuantizedLinear.restore(state, 256, 76, torch.float32)
    with pytest.raises(ValueError, match="cannot have"):
        native_qlinear.NativeQuantizedLinear.restore(state, 512, 75, torch.float32)


def test_int8_rounding_is_the_references_to_the_bit(level):
    for rows, inputs in ((5, 64), (33, 100), (3, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            weight = activations(rows, inputs, dtype)
            weight[0] = 0
            ours = native_qlinear.quantize_rows(weight, "int8")
            reference = quantized.quantize_rows(weight, "int8")
            assert torch.equal(ours.q, reference.q) and torch.equal(ours.scale, reference.scale)


def test_int4_rounding_misses_no_more_than_the_reference(level):
    for rows, inputs in ((8, 256), (5, 100), (3, 1)):
        weight = torch.randn(rows, inputs)
        weight[0, :32] = 0
        ours = native_qlinear.quantize_rows(weight, "int4_half")
        reference = quantized.quantize_rows(weight, "int4_half")
        missed = (ours.values() - weight).square().sum()
        assert missed <= (reference.values() - weight).square().sum() * 1.001
        assert ours.q.max() <= 15 and ours.scale.shape == reference.scale.shape
        same = (ours.q == reference.q).float().mean()
        assert same > 0.98, "the same scales are found, but for ties"
        assert not ours.values()[0, : min(32, inputs)].any()


def test_int4_rounding_is_nearer_than_the_plain_one():
    """Against a scale that takes the largest number to -8 and nothing else (GGUF's Q4_0)."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    ours = native_qlinear.quantize_rows(weight, "int4_half")
    groups = weight.view(-1, GROUP)
    scale = (groups.gather(1, groups.abs().argmax(1, keepdim=True)) / -8).half().float()
    plain = ((groups / scale).round().clamp(-8, 7) * scale).view(64, 512)
    assert (ours.values() - weight).square().mean() < 0.92 * (plain - weight).square().mean()
