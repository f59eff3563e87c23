"""What one vocabulary entry stands for, as bytes.

Promises: for byte-level and SentencePiece vocabularies, the exact bytes of one token on its own, which
decoding a single id cannot give (it strips the leading space and hides broken characters).
Does not know: ids, or text of more than one token.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "▁"  # SentencePiece's visible space


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 stands for itself, the rest follows U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    others = (b for b in range(256) if chr(b) not in table)
    return table | {chr(0x100 + i): b for i, b in enumerate(others)}


@dataclass(frozen=True, slots=True)
class PieceTable:
    """How pieces are written: `bytes_of` for byte-level, SentencePiece's rules, or neither."""

    bytes_of: dict[str, int] | None
    sentencepiece: bool

    @classmethod
    def for_decoder(cls, decoder: Any) -> "PieceTable":
        """Read the kind from a `tokenizers` decoder."""
        kinds = decoder_kinds(decoder)
        if "ByteLevel" in kinds:
            return cls(byte_alphabet(), False)
        return cls(None, bool(kinds & {"Metaspace", "ByteFallback"}))

    def raw(self, piece: str) -> bytes | None:
        """The piece's bytes, or None when this kind of vocabulary has no rule for one piece alone."""
        if self.bytes_of is not None:
            try:
                return bytes(map(self.bytes_of.__getitem__, piece))
            except KeyError:  # an entry that was never byte-level, such as an added token
                return piece.encode()
        if not self.sentencepiece:
            return None
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(SPACE_MARK, " ").encode()


def decoder_kinds(decoder: Any) -> set[str]:
    """Names of the decoder's steps; the library shows them only in its serialized form."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state]) if isinstance(state, dict) else []
    return {step.get("type", "") for step in steps}
