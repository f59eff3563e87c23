"""Every operator's definition against a plain loop in float64 (QNT-22), odd sizes and strides included."""

import math

import pytest
import torch

from octavo.ops import reference

TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # relative to values of order one
SHAPES = [(1, 1), (1, 7), (3, 64), (5, 33), (2, 3, 20)]


def near(got, want, dtype):
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    want = torch.zeros(shape, dtype=torch.float64)
    for row, out in zip(x.double().view(-1, shape[-1]), want.view(-1, shape[-1]), strict=True):
        mean = sum(float(v) ** 2 for v in row) / len(row)
        for i, v in enumerate(row):
            out[i] = float(v) / math.sqrt(mean + 1e-5) * float(weight[i])
    near(reference.rms_norm(x, weight, 1e-5), want, dtype)


def test_rms_norm_of_zeros_and_of_large_values_is_finite():
    assert torch.equal(reference.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))
    big = torch.full((1, 8), 60000.0, dtype=torch.float16)  # its square has no float16
    assert torch.isfinite(reference.rms_norm(big, torch.ones(8, dtype=torch.float16), 1e-6)).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_add_rms_norm_is_the_sum_and_its_norm(dtype):
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((4, 24), (4, 24), (24,)))
    total = residual + x
    want = reference.rms_norm(total, weight, 1e-6)
    normed, kept = reference.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(kept, total) and torch.equal(normed, want)


ACTIVATIONS = {
    "silu_mul": lambda g: g / (1 + math.exp(-g)),
    "gelu_mul": lambda g: g * 0.5 * (1 + math.erf(g / math.sqrt(2))),
    "gelu_tanh_mul": lambda g: g * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("width", [1, 5, 64])
def test_gated_activations(name, width, dtype):
    x = (torch.randn(3, 2 * width + 4).to(dtype))[:, 2:-2]  # rows of a wider tensor: not contiguous
    want = torch.zeros(3, width, dtype=torch.float64)
    for t in range(3):
        for i in range(width):
            want[t, i] = ACTIVATIONS[name](float(x[t, i])) * float(x[t, width + i])
    near(getattr(reference, name)(x), want, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated"), [(4, 2, 16, 16), (3, 1, 10, 10), (2, 2, 24, 12)])
def test_rotary(heads, kv_heads, dim, rotated, dtype):
    torch.manual_seed(0)
    whole = torch.randn(5, (heads + 2 * kv_heads) * dim).to(dtype)
    query = whole[:, : heads * dim].view(5, heads, dim)  # views of one projection, as models pass them
    key = whole[:, heads * dim : (heads + kv_heads) * dim].view(5, kv_heads, dim)
    angles = torch.rand(5, rotated // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
    want = [x.double().clone() for x in (query, key)]
    for out, source in zip(want, (query, key), strict=True):
        for t in range(5):
            for h in range(out.shape[1]):
                for i in range(rotated // 2):
                    c, s = float(cos_sin[t, i]), float(cos_sin[t, rotated // 2 + i])
                    a, b = float(source[t, h, i]), float(source[t, h, i + rotated // 2])
                    out[t, h, i], out[t, h, i + rotated // 2] = a * c - b * s, b * c + a * s
    for got, expected in zip(reference.rotary(query, key, cos_sin), want, strict=True):
        near(got, expected, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 1, 1), (3, 17, 5), (2, 64, 33)])
def test_linear(tokens, inputs, outputs, bias, dtype):
    x = torch.randn(tokens, inputs).to(dtype)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    offset = torch.randn(outputs).to(dtype) if bias else None
    want = torch.zeros(tokens, outputs, dtype=torch.float64)
    for t in range(tokens):
        for o in range(outputs):
            want[t, o] = sum(float(a) * float(b) for a, b in zip(x[t], weight[o], strict=True))
            want[t, o] += float(offset[o]) if bias else 0.0
    multiply = reference.linear(weight, offset)
    assert not multiply.packed
    near(multiply(x), want, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_write_kv(block_size, dtype):
    buffer = torch.zeros(6, 2, 2, 3, block_size, 8, dtype=dtype)
    keys, values = buffer[:, 1, 0], buffer[:, 1, 1]  # views of a cache shared with another layer
    slots = torch.randperm(5 * block_size)[:4] + block_size
    key, value = torch.randn(4, 3, 8).to(dtype), torch.randn(4, 3, 8).to(dtype)
    want_k, want_v = keys.clone(), values.clone()
    for t, slot in enumerate(slots.tolist()):
        want_k[slot // block_size, :, slot % block_size] = key[t]
        want_v[slot // block_size, :, slot % block_size] = value[t]
    reference.write_kv(key, value, keys, values, slots)
    assert torch.equal(keys, want_k) and torch.equal(values, want_v)
    assert not buffer[:, 0].any(), "another layer's pages were written"


def test_padding_is_written_to_the_null_block_only():
    keys, values = torch.zeros(3, 1, 4, 2), torch.zeros(3, 1, 4, 2)
    new = torch.ones(3, 1, 2)
    reference.write_kv(new, new, keys, values, torch.tensor([6, -1, -1]))
    assert keys[1:].sum() == 2 and keys[1, 0, 2].tolist() == [1, 1]
    assert not keys[2].any()
