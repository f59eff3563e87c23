"""Repacking GGUF's blocks changes no value."""

import pytest
import torch

from octavo.ops.quantized import KINDS
from octavo.quant.gguf_blocks import DECODERS, dequantize
from octavo.quant.gguf_rows import BLOCKS, KIND_OF, quantized_rows

ROWS, INPUTS = 5, 512
_HALVES = {  # where a block's half-precision numbers are
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "Q3_K": (108,), "IQ4_XS": (0,), "TQ2_0": (64,),
}  # fmt: skip


def random_blocks(kind, seed=0):
    """Any bytes, but scales that are numbers."""
    block = BLOCKS[kind]
    rng = torch.Generator().manual_seed(seed)
    count = ROWS * INPUTS // block.block_size
    blocks = torch.randint(0, 256, (count, block.block_bytes), generator=rng).to(torch.uint8)
    for at in _HALVES[kind]:
        blocks[:, at : at + 2] = torch.randn(count, 1, generator=rng).half().view(torch.uint8)
    return blocks.view(ROWS, -1)


@pytest.mark.parametrize("kind", KIND_OF)
def test_every_value_is_what_the_decoder_gives_to_the_bit(kind):
    raw = random_blocks(kind)
    rows = quantized_rows(raw, kind)
    decoded = dequantize(raw.flatten().numpy(), BLOCKS[kind], (ROWS, INPUTS))
    assert torch.equal(rows.values(), decoded)
    assert int(rows.q.max()) < 1 << KINDS[rows.kind].bits


def test_the_types_that_are_asked_for_most_keep_their_size():
    assert {KIND_OF[k] for k in ("Q4_0", "Q4_1", "Q4_K")} == {"int4_half", "int4_half_min", "int4_k_min"}
    assert KINDS[KIND_OF["Q8_0"]].span == 32 and KINDS[KIND_OF["Q6_K"]].span == 16
    assert set(KIND_OF) <= set(DECODERS)
