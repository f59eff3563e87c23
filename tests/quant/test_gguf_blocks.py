"""Every block type decodes to what the `gguf` package's own decoder gives (EXE-21, QNT-10)."""

import time

import gguf
import numpy as np
import pytest
import torch

from octavo.base.errors import LoadError
from octavo.base.gguf import GGML_TYPES, GGMLType, read_gguf
from octavo.quant.gguf_blocks import DECODERS, dequantize
from tests.support.checkpoints import smollm2_gguf

_BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}
_PLAIN = ("F32", "F16", "BF16")
_CODE_BOOKS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")
_HALVES = {  # where a block holds half-precision numbers, which must be finite
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
}  # fmt: skip


def random_blocks(kind: GGMLType, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Any bytes are a valid block, as long as its half-precision scales are finite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, kind.block_bytes), dtype=np.uint8)
    for at in _HALVES.get(kind.name, ()):
        scale = rng.uniform(-2, 2, (num_blocks, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    if kind.name == "IQ1_M":  # its half is spread over the high nibbles of the last four words
        blocks[:, [49, 51, 53, 55]] &= 0x0F
        blocks[:, 55] |= 0x30
    return blocks


@pytest.mark.parametrize("num_blocks", [1, 7, 4100])  # 4100 blocks of 256: more than one chunk, and a rest
@pytest.mark.parametrize("name", DECODERS)
def test_decoded_blocks_equal_the_reference(name: str, num_blocks: int) -> None:
    kind = _BY_NAME[name]
    blocks = random_blocks(kind, num_blocks)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    found = dequantize(blocks.reshape(-1), kind, (num_blocks, kind.block_size))
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("name", _CODE_BOOKS)
def test_types_with_code_books_decode_through_the_reference(name: str) -> None:
    kind = _BY_NAME[name]
    blocks = random_blocks(kind, 3)
    found = dequantize(blocks.reshape(-1), kind, (3, kind.block_size))
    np.testing.assert_array_equal(found.numpy(), gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", _PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_types_convert(name: str, dtype: torch.dtype) -> None:
    kind = _BY_NAME[name]
    stored = torch.linspace(-3, 3, 35).to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name])
    data = stored.view(torch.uint8).numpy()
    found = dequantize(data, kind, (5, 7), dtype=dtype)
    assert torch.equal(found, stored.to(dtype).view(5, 7))


def test_a_plain_tensor_of_the_same_type_is_not_copied() -> None:
    data = torch.ones(6).view(torch.uint8).numpy()
    found = dequantize(data, _BY_NAME["F32"], (2, 3))
    assert found.data_ptr() == data.ctypes.data


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_bfloat16_is_the_float_rounded_once(name: str) -> None:
    kind = _BY_NAME[name]
    data = random_blocks(kind, 9).reshape(-1)
    whole = dequantize(data, kind, (9, kind.block_size))
    assert torch.equal(dequantize(data, kind, (9, kind.block_size), dtype=torch.bfloat16), whole.bfloat16())


def test_a_type_that_cannot_be_decoded_is_named() -> None:
    kind = GGMLType("Q9_X", 32, 18)
    with pytest.raises(LoadError, match=r"Q9_X is not supported; use one of .*Q4_K"):
        dequantize(np.zeros(18, np.uint8), kind, (32,))


@pytest.mark.slow
def test_the_real_file_decodes_in_well_under_two_seconds() -> None:
    file = read_gguf(smollm2_gguf())
    started = time.perf_counter()
    for tensor in file.tensors.values():
        dequantize(tensor.data, tensor.type, tensor.shape, dtype=torch.bfloat16)
    assert time.perf_counter() - started < 2.0
