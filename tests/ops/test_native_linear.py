"""Packed products against the reference, and their bits: a row's result depends on that row alone (QNT-22, QNT-23)."""

import pytest
import torch

from octavo.ops import reference

native = pytest.importorskip("octavo.ops.native", reason="the package was built without the native core")
from octavo.ops.native_linear import NativeLinear, NativeMultiply  # noqa: E402
from octavo.ops.native_pointwise import gelu_mul, silu_mul  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(1, 1), (2, 33), (7, 5), (31, 16), (32, 32), (33, 31), (64, 48), (257, 65), (576, 100), (1100, 40)]


@pytest.fixture(params=native.levels())
def level(request):
    best = native.levels()[-1]
    native.use_level(request.param)
    yield request.param
    native.use_level(best)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def data(inputs, outputs, rows, dtype, gap=0):
    generator = torch.Generator().manual_seed(inputs * 1000 + outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    x = torch.randn(rows, inputs + gap, generator=generator).to(dtype)[:, gap:]
    return weight, bias, x


@pytest.mark.parametrize("out_dtype", [None, F32])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_it_agrees_with_the_product_in_float64(level, inputs, outputs, dtype, out_dtype):
    weight, bias, x = data(inputs, outputs, 45, dtype, gap=3)
    for b in (bias, None):
        want = x.double() @ weight.double().T + (0 if b is None else b.double())
        got = NativeLinear()(weight, b, out_dtype)(x)
        assert got.dtype == (out_dtype or dtype) and got.shape == want.shape
        rounding = 2**-8 if got.dtype == BF16 else 0.0  # once, at the end
        slack = 1e-6 * (x.double().abs() @ weight.double().abs().T + 1)
        assert ((got.double() - want).abs() <= rounding * want.abs() + slack).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("inputs", "outputs"), [(33, 31), (576, 160), (1100, 40), (2100, 72)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(level, inputs, outputs, dtype):
    weight, bias, x = data(inputs, outputs, 300, dtype)
    for out_dtype in (None, F32):
        multiply = NativeLinear()(weight, bias, out_dtype)
        whole = multiply(x)
        for rows in [*range(1, 66, 1 if out_dtype else 4), 96, 127, 200]:
            for start in {0, 1, 300 - rows}:
                assert torch.equal(multiply(x[start : start + rows]), whole[start : start + rows]), (rows, start)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 5, 33, 100])
def test_bits_do_not_depend_on_threads(level, dtype, rows):
    weight, bias, x = data(576, 416, rows, dtype)
    multiply = NativeLinear()(weight, bias)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(multiply(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_more_k_and_rows_than_a_cache_holds_continue_the_same_sums(level, dtype):
    rows, inputs = (70, 4100) if level == "scalar" else (400, 8300)
    weight, _, x = data(inputs, 40, rows, dtype)
    multiply = NativeLinear()(weight, None, F32)
    whole = multiply(x)
    want = x.double() @ weight.double().T
    assert ((whole - want).abs().max() / want.abs().max()).item() < 1e-5
    for start in (0, 17, rows - 1):
        assert torch.equal(multiply(x[start : start + 1]), whole[start : start + 1])


def test_rows_may_lie_anywhere_but_nothing_else_is_read(level):
    """What lies beside the rows (not a number here) must not reach the result."""
    for inputs in (31, 64, 100):
        weight, _, x = data(inputs, 70, 37, BF16)
        room = torch.full((37, inputs + 61), float("nan"), dtype=BF16)
        for offset in (0, 1, 13):
            room.fill_(float("nan"))
            room[:, offset : offset + inputs] = x
            multiply = NativeLinear()(weight, None)
            for rows in (1, 16, 37):
                assert torch.equal(multiply(room[:rows, offset : offset + inputs]), multiply(x[:rows]))


def test_columns_that_lie_apart_are_copied(level):
    weight, _, x = data(64, 20, 5, F32)
    multiply = NativeLinear()(weight, None)
    assert torch.equal(multiply(x.T.contiguous().T), multiply(x))


def test_a_weight_is_read_where_it_lies(level):
    weight, _, x = data(64, 20, 5, BF16)
    want = NativeLinear()(weight, None)(x)
    wide = torch.zeros(20, 80, dtype=BF16)
    wide[:, 5:69] = weight
    assert torch.equal(NativeLinear()(wide[:, 5:69], None)(x), want)
    assert torch.equal(NativeLinear()(weight.T.contiguous().T, None)(x), want)


def test_no_rows_give_no_rows(level):
    weight, bias, x = data(64, 20, 5, BF16)
    assert NativeLinear()(weight, bias)(x[:0]).shape == (0, 20)


def test_what_is_stored_is_restored_without_the_weight(level):
    for dtype in (F32, BF16):
        weight, bias, x = data(100, 70, 9, dtype)
        for b in (bias, None):
            first = NativeLinear()(weight, b, F32)
            assert isinstance(first, NativeMultiply) and first.packed
            room = torch.empty(first.state()["packed"].numel() + 64, dtype=torch.uint8)
            start = -room.data_ptr() % 64
            packed = room[start : start + first.state()["packed"].numel()]
            packed.copy_(first.state()["packed"])
            again = NativeLinear.restore({**first.state(), "packed": packed}, 100, 70, dtype, F32)
            assert torch.equal(again(x), first(x))
        with pytest.raises(ValueError, match="cannot have"):
            NativeLinear.restore(first.state(), 100, 700, dtype)
    assert NativeLinear.layout(F32) != NativeLinear.layout(BF16)


def test_other_types_are_the_references(level):
    weight, bias, x = data(64, 20, 5, torch.float16)
    multiply = NativeLinear()(weight, bias)
    assert not multiply.packed
    assert torch.equal(multiply(x), reference.linear(weight, bias)(x))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_packed_weight_gives_its_rows_back(level, threads, inputs, outputs, dtype):
    """As `reference.gather_rows` does from the weight itself, denormals, infinities and all."""
    weight, _, _ = data(inputs, outputs, 1, dtype)
    weight[0, :4] = torch.tensor([float("inf"), -0.0, 1e-40, float("nan")])[: min(4, inputs)]
    multiply = NativeLinear()(weight, None, F32)
    for count in (0, 1, 7, 300):
        index = torch.arange(count) * 13 % (outputs + 2) - 1  # one before the first and one behind the last, too
        got = multiply.rows(index)
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), reference.gather_rows(weight, index).contiguous().view(torch.uint8))
    apart = torch.arange(outputs).repeat_interleave(2)[::2]
    assert torch.equal(multiply.rows(apart).view(torch.uint8), weight.view(torch.uint8))
    assert NativeLinear.gives_rows(dtype) and not NativeLinear.gives_rows(torch.float16)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("inputs", "half", "biased"),
    [(64, 32, False), (40, 64, False), (576, 96, False), (1100, 64, False), (2100, 160, False), (64, 33, False), (64, 64, True)],
)  # fmt: skip
def test_a_gate_that_follows_on_a_tape_gives_the_bits_of_two_operators(level, threads, inputs, half, biased, dtype):
    weight, bias, x = data(inputs, 2 * half, 700, dtype)
    multiply = NativeLinear()(weight * 0.05, bias if biased else None)
    tape = native.core.Tape()
    tape.start()
    product = multiply(x)  # kept: the tape knows addresses only
    gated = silu_mul(product)
    tape.stop()
    assert tape.names() == ["linear_gated"]
    for rows in (1, 31, 160, 161, 177, 200, 512, 700):
        gated.fill_(7)
        tape.replay(rows)
        assert torch.equal(gated[:rows], silu_mul(multiply(x[:rows]))), rows
        assert (gated[rows:] == 7).all(), rows


def test_only_the_gate_of_the_product_before_it_joins_it():
    weight, _, x = data(64, 64, 8, BF16)
    multiply = NativeLinear()(weight, None)
    for calls, names in [
        (lambda: gelu_mul(multiply(x)), ["linear", "gated"]),
        (lambda: silu_mul(multiply(x)[:, :32]), ["linear", "gated"]),
        (lambda: (multiply(x), silu_mul(x)), ["linear", "gated"]),
        (lambda: silu_mul(silu_mul(multiply(x))), ["linear_gated", "gated"]),
        (lambda: silu_mul(x), ["gated"]),
    ]:
        tape = native.core.Tape()
        tape.start()
        kept = calls()
        tape.stop()
        assert tape.names() == names
        del kept


def test_many_rows_of_even_lines_lie_apart():
    for width, dtype, stride in [(256, BF16, 288), (128, F32, 144), (250, BF16, 250), (288, BF16, 288)]:
        assert native.rows_apart(200, width, dtype).stride() == (stride, 1)
    assert native.rows_apart(8, 256, BF16).is_contiguous()
