"""The small native operators against their definitions, at every level this machine has (QNT-22, QNT-23, CMP-10)."""

import pytest
import torch

from octavo.ops import reference

native = pytest.importorskip("octavo.ops.native")
norms = pytest.importorskip("octavo.ops.native_norms")
pointwise = pytest.importorskip("octavo.ops.native_pointwise")
turning = pytest.importorskip("octavo.ops.native_rotary")
gather = pytest.importorskip("octavo.ops.native_gather")

TYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3}
WIDTHS = [1, 2, 15, 16, 17, 33, 64, 65, 127, 576, 1000]
ROWS = [1, 2, 3, 7, 64]


@pytest.fixture(params=native.levels(), autouse=True)
def level(request):
    native.use_level(request.param)
    yield request.param
    native.use_level(native.levels()[-1])


def near(got, want, tolerance):
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def wide_rms_norm(x, weight, eps):
    """Without the reference's rounding between norm and scale."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width, dtype):
    for rows in ROWS:
        x = torch.randn(rows, width + 3).to(dtype)[:, 2 : width + 2]  # odd alignment, rows of a wider tensor
        weight = torch.rand(width).to(dtype)
        near(norms.rms_norm(x, weight, 1e-5), wide_rms_norm(x, weight, 1e-5), TOLERANCE[dtype])
        near(norms.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [1, 20, 64])
def test_rms_norm_of_each_head_in_a_view_of_one_projection(dim, dtype):
    whole = torch.randn(5, 4 * dim + 1).to(dtype)
    heads = whole[:, : 3 * dim].view(5, 3, dim)
    weight = torch.rand(dim).to(dtype)
    before = whole.clone()
    got = norms.rms_norm(heads, weight, 1e-6)
    near(got, wide_rms_norm(heads, weight, 1e-6), TOLERANCE[dtype])
    assert got.is_contiguous() and torch.equal(whole, before)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("x_dtype", TYPES)
@pytest.mark.parametrize("residual_dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_keeps_the_sum_in_float32(width, residual_dtype, x_dtype, dtype):
    for rows in ROWS:
        x, residual = torch.randn(rows, width + 1).to(x_dtype)[:, 1:], torch.randn(rows, width).to(residual_dtype)
        weight = torch.rand(width).to(dtype)
        want = residual.float() + x.float()
        normed, total = norms.add_rms_norm(x, residual, weight, 1e-5)
        assert total.dtype == torch.float32 and normed.dtype == dtype
        assert torch.equal(total, want), "one float32 addition has one result"
        near(normed, wide_rms_norm(want, weight, 1e-5), TOLERANCE[dtype])
        if residual_dtype == torch.float32:
            assert total.data_ptr() == residual.data_ptr(), "the residual's own memory is used again"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul", "gelu_tanh_mul"])
def test_gated_activations(name, dtype):
    for width in (*WIDTHS, 513, 1536):
        for rows in ROWS:
            x = (torch.randn(rows, 2 * width + 1) * 3).to(dtype)[:, 1:]
            want = getattr(reference, name)(x.double())
            near(getattr(pointwise, name)(x), want, TOLERANCE[dtype])


def test_gates_are_right_far_from_zero():
    far = torch.tensor([-300.0, -88.0, -30.0, -6.0, -1e-30, 0.0, 1e-30, 6.0, 30.0, 88.0, 300.0])
    x = torch.cat([far, torch.ones_like(far)]).unsqueeze(0)
    for name in ("silu_mul", "gelu_mul", "gelu_tanh_mul"):
        near(getattr(pointwise, name)(x), getattr(reference, name)(x.double()), 2e-6)
    assert pointwise.silu_mul(torch.tensor([[float("nan"), 1.0]])).isnan().all()


@pytest.mark.parametrize("angle_dtype", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated"), [(9, 3, 64, 64), (3, 1, 10, 10), (2, 2, 24, 12)])
def test_rotary_turns_views_of_one_projection_in_place(heads, kv_heads, dim, rotated, dtype, angle_dtype):
    for rows in ROWS:
        whole = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
        query = whole[:, : heads * dim].view(rows, heads, dim)
        key = whole[:, heads * dim : (heads + kv_heads) * dim].view(rows, kv_heads, dim)
        angles = torch.rand(rows, rotated // 2) * 6
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(angle_dtype)
        want = reference.rotary(query.double(), key.double(), cos_sin.double())
        value = whole[:, (heads + kv_heads) * dim :].clone()
        got = turning.rotary(query, key, cos_sin)
        assert got[0].data_ptr() == whole.data_ptr()
        for one, expected in zip(got, want, strict=True):
            near(one, expected, TOLERANCE[dtype])
        assert torch.equal(whole[:, (heads + kv_heads) * dim :], value)


@pytest.mark.parametrize("cache_dtype", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("block_size", [1, 5, 64])
@pytest.mark.parametrize("dim", [1, 8, 20, 64])
def test_write_kv(dim, block_size, dtype, cache_dtype):
    buffer = torch.zeros(6, 2, 2, 3, block_size, dim, dtype=cache_dtype)
    keys, values = buffer[:, 1, 0], buffer[:, 1, 1]  # views of a cache shared with another layer
    slots = torch.randperm(5 * block_size)[:4] + block_size
    slots[1] = -1
    whole = torch.randn(4, 7 * dim).to(dtype)
    key, value = whole[:, : 3 * dim].view(4, 3, dim), whole[:, 4 * dim :].view(4, 3, dim)
    want_keys, want_values = keys.clone(), values.clone()
    reference.write_kv(key, value, want_keys, want_values, slots)
    turning.write_kv(key, value, keys, values, slots)
    assert torch.equal(keys[1:], want_keys[1:]) and torch.equal(values[1:], want_values[1:])
    assert not buffer[0].any(), "padding is written nowhere"
    assert not buffer[:, 0].any(), "another layer's pages were written"


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64, torch.int8])
@pytest.mark.parametrize("width", [1, 7, 576])
def test_gather_rows(width, dtype):
    table = (torch.randn(11, width) * 50).to(dtype)
    index = torch.tensor([3, 0, 10, 3, -1, 11])
    want = reference.gather_rows(table, index)
    assert not want[4:].any() and torch.equal(want[:4], table[index[:4]])
    assert torch.equal(gather.gather_rows(table, index), want)


def test_what_has_no_native_code_is_computed_all_the_same():
    half = torch.randn(3, 16).to(torch.float16)
    assert torch.equal(norms.rms_norm(half, half[0], 1e-5), reference.rms_norm(half, half[0], 1e-5))
    assert torch.equal(pointwise.silu_mul(half), reference.silu_mul(half))
    columns = torch.randn(16, 3).t()
    assert torch.equal(norms.rms_norm(columns, columns[0], 1e-5), reference.rms_norm(columns, columns[0], 1e-5))
    assert torch.equal(pointwise.silu_mul(columns), reference.silu_mul(columns))
    deep = torch.randn(2, 3, 4, 16)
    assert torch.equal(norms.rms_norm(deep, deep[0, 0, 0], 1e-5), reference.rms_norm(deep, deep[0, 0, 0], 1e-5))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_of_a_row_depend_on_nothing_but_the_row(dtype, threads):
    """ATT-13, OUT-30: one row or many, one thread or two, first or last."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, residual = torch.randn(67, 600).to(dtype), torch.randn(67, 600)
        weight, angles = torch.rand(600).to(dtype), torch.rand(67, 20)

        def computed(part):
            rows = x[part]
            turned = rows[:, :480].clone().view(-1, 12, 40)
            turning.rotary(turned[:, :8], turned[:, 8:], angles[part].contiguous())
            return (
                norms.rms_norm(rows, weight, 1e-5),
                *norms.add_rms_norm(rows, residual[part].clone(), weight, 1e-5),
                pointwise.silu_mul(rows),
                pointwise.gelu_mul(rows),
                pointwise.gelu_tanh_mul(rows),
                turned,
            )

        whole = computed(slice(0, 67))
        torch.set_num_threads(1)
        for part in (slice(0, 1), slice(5, 6), slice(60, 67), *(slice(0, n) for n in range(2, 65, 7))):
            for all_rows, some in zip(whole, computed(part), strict=True):
                assert torch.equal(all_rows[part], some)
    finally:
        torch.set_num_threads(before)
