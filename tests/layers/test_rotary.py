"""Frequencies of each rotary kind against Transformers', and the table that is made of them."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.base.errors import LoadError
from octavo.config.facts import RopeFacts
from octavo.layers.rotary import KINDS, RotaryTable, Turning, inverse_frequencies
from octavo.ops import reference

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS = [
    ("linear", {"factor": 3.0}),
    ("dynamic", {"factor": 2.0}),
    ("llama3", LLAMA3),
    ("llama3", {**LLAMA3, "factor": 32.0, "high_freq_factor": 2.0}),
    ("proportional", {"factor": 2.0}),
    ("yarn", YARN),
    ("yarn", {**YARN, "factor": None}),
    ("yarn", {**YARN, "attention_factor": 0.8}),
    ("yarn", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 20, "beta_slow": 2}),
    ("yarn", {**YARN, "truncate": False}),
]


@pytest.mark.parametrize(("kind", "keys"), SCALINGS)
@pytest.mark.parametrize("dim", [8, 40, 128])
def test_frequencies_equal_transformers(kind, keys, dim):
    config = LlamaConfig(
        head_dim=dim,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": kind, "rope_theta": 500000.0, **keys},
    )
    length = 30000
    want, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    rope = RopeFacts(theta=500000.0, kind=kind, scaling=keys)
    got, got_scale = inverse_frequencies(Turning(rope, dim, 16384, length))
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-12)
    assert got_scale == pytest.approx(scale)


def test_dynamic_is_plain_up_to_the_models_length():
    plain = inverse_frequencies(Turning(RopeFacts(), 16, 2048, 2048))[0]
    rope = RopeFacts(kind="dynamic", scaling={"factor": 4.0})
    assert torch.equal(inverse_frequencies(Turning(rope, 16, 2048, 100))[0], plain)
    assert not torch.equal(inverse_frequencies(Turning(rope, 16, 2048, 2049))[0], plain)


PLAIN = RopeFacts()


def finished(rope=PLAIN, dim=8, length=10, divisors=None):
    table = RotaryTable(rope, dim, 64, length, gather=reference.gather_rows)
    if divisors is not None:
        table.place("frequency_divisors", None, divisors)
    table.finish()
    return table


def test_the_table_holds_cos_then_sin_of_each_position():
    table = finished()
    rows = table(torch.tensor([9, 0, 3]))
    assert rows.shape == (3, 8)
    for row, position in zip(rows.tolist(), (9, 0, 3), strict=True):
        for i in range(4):
            angle = position * 10000.0 ** (-2 * i / 8)
            assert row[i] == pytest.approx(math.cos(angle), abs=1e-6)
            assert row[i + 4] == pytest.approx(math.sin(angle), abs=1e-6)


def test_the_table_is_float32_whatever_the_models_type():
    assert finished().table.dtype == torch.float32


def test_a_share_of_the_head_is_rotated():
    assert finished(RopeFacts(partial=0.25), dim=32).table.shape == (10, 8)


def test_it_is_built_on_meta_and_filled_later():
    with torch.device("meta"):
        table = RotaryTable(RopeFacts(), 8, 64, 10, gather=reference.gather_rows)
    assert table.table.is_meta
    table.to_empty(device="cpu").finish()
    assert torch.equal(table.table, finished().table)
    assert not table.state_dict(), "it is no weight"


def test_a_gguf_file_may_bring_divisors_of_the_frequencies():
    divisors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    table = finished(divisors=divisors)
    torch.testing.assert_close(table.table[:, 3], finished().table[:, 3].acos().div(8).cos())
    assert table.pieces() == {}
    with pytest.raises(ValueError, match=r"its shape is \[3\], the model's is \[4\]"):
        finished(divisors=divisors[:3])
    with pytest.raises(KeyError):
        table.place("inv_freq", None, divisors)


def test_unknown_kinds_and_missing_keys_are_named():
    with pytest.raises(LoadError, match="'spiral' is not supported; there are default, dynamic"):
        RotaryTable(RopeFacts(kind="spiral"), 8, 64, 10, gather=reference.gather_rows)
    for kind in set(KINDS) - {"default", "proportional"}:
        with pytest.raises(LoadError, match=f"kind '{kind}' lacks the key '"):
            inverse_frequencies(Turning(RopeFacts(kind=kind), 8, 64, 10))
