"""How a chunk is kept outside the engine, so that nobody ever takes another thing for it.

Promises: what `head` gave opens what it was given for and nothing else: another model, key, length or a single changed
bit is told apart.
Does not know: where it is kept.

Before the chunk stands a header (`HEADER`: magic, format version, length of the chunk, its CRC-32), the fingerprint of
everything that KV depends on besides tokens, and the key (TIR-30).
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

MAGIC: Final = b"OctavoKV"
VERSION: Final = 1
KEY_BYTES: Final = 36  # of a tier's key: a block's hash and its group
HEADER: Final = struct.Struct("<8sIQI")


class Seal:
    """Owns: nothing that changes."""

    def __init__(self, identity: Mapping[str, str], lengths: Sequence[int]) -> None:
        """`identity`: all that KV depends on besides tokens, by name. `lengths`: bytes of a chunk by group."""
        self._lengths = tuple(lengths)
        self.identity = {**identity, "chunk bytes": ", ".join(map(str, lengths))}
        self.fingerprint = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        self._print = self.fingerprint.encode()

    @property
    def space(self) -> str:
        """A name that chunks of one fingerprint share."""
        return self.fingerprint[:32]

    def length(self, key: bytes) -> int:
        """Bytes of the key's chunk: the key's last four bytes are its group (TIR-2)."""
        return self._lengths[int.from_bytes(key[-4:], "big")]

    @property
    def most_bytes(self) -> int:
        """Of any chunk."""
        return max(self._lengths)

    @property
    def most_sealed_bytes(self) -> int:
        """Of any chunk with what stands before it."""
        return HEADER.size + len(self._print) + KEY_BYTES + self.most_bytes

    def head_bytes(self, key: bytes) -> int:
        """Bytes before the chunk."""
        return HEADER.size + len(self._print) + len(key)

    def head(self, key: bytes, body: memoryview, crc32: Callable[[memoryview], int] = zlib.crc32) -> bytes:
        """What stands before this chunk."""
        return HEADER.pack(MAGIC, VERSION, len(body), crc32(body)) + self._print + key

    def opens(self, key: bytes, head: bytes, body: memoryview) -> bool:
        """True when `head` was made for this key and these bytes."""
        return head == self.head(key, body)


def short(value: str) -> str:
    """What tells values of an identity apart and shows nothing of them."""
    return hashlib.sha256(value.encode()).hexdigest()[:12]
