"""One vocabulary entry as bytes."""

import pytest
from tokenizers import decoders, pre_tokenizers

from octavo.inputs.pieces import PieceTable, byte_alphabet, decoder_kinds


def test_the_byte_alphabet_is_the_librarys() -> None:
    table = byte_alphabet()
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet()) and sorted(table.values()) == list(range(256))
    decoder = decoders.ByteLevel()
    for character, byte in table.items():
        if byte < 128:
            assert decoder.decode([character]) == chr(byte)


@pytest.mark.parametrize(
    ("decoder", "piece", "raw"),
    [
        (decoders.ByteLevel(), "Ġhi", b" hi"),
        (decoders.ByteLevel(), "Ã", b"\xc3"),
        (decoders.ByteLevel(), "你", "你".encode()),
        (decoders.Metaspace(), "▁hi▁", b" hi "),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), "<0xE2>", b"\xe2"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), "<0xZZ>", b"<0xZZ>"),
        (decoders.WordPiece(), "##hi", None),
        (None, "hi", None),
    ],
)
def test_pieces_of_each_kind(decoder: object, piece: str, raw: bytes | None) -> None:
    assert PieceTable.for_decoder(decoder).raw(piece) == raw


def test_kinds_of_a_chain_are_all_named() -> None:
    assert decoder_kinds(decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])) == {"Replace", "Fuse"}
