"""Chained hashes that name a block by everything that precedes it (REU-1..5).

Promises: equal hashes mean equal prefixes (tokens, adapter, media, salt), on every node and in every
language for the shareable hasher; a chain is extended, never rebuilt.
Does not know: which blocks exist, groups, or who asks.

The default hash of a block is, byte for byte (REU-3)::

    sha256( parent digest (32 bytes; 32 zero bytes before the first block)
            | token ids, each a little-endian uint32
            | for each extra key: its length as a little-endian uint32, then its bytes )

Every extra key opens with a tag that says what it is, so that an adapter named "x" and a salt "x"
never give one key.
"""

import hashlib
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import NewType, Protocol

import msgspec

from octavo.base.errors import ConfigError
from octavo.base.packages import install_command
from octavo.base.requests import EngineRequest

BlockHash = NewType("BlockHash", bytes)

_LENGTH = struct.Struct("<I")


class BlockHasher(Protocol):
    """How one block's hash is made. `shareable` is False where other processes must not trust it."""

    name: str
    shareable: bool

    def first_parent(self) -> BlockHash:
        """What stands as the parent of a request's first block."""

    def block(self, parent: BlockHash, tokens: Sequence[int], extra: tuple[bytes, ...]) -> BlockHash:
        """Hash of a full block after `parent`; token ids are 0 .. 2**32 - 1."""


def _message(parent: bytes, tokens: Sequence[int], extra: tuple[bytes, ...]) -> bytes:
    body = parent + struct.pack(f"<{len(tokens)}I", *tokens)
    for key in extra:
        body += _LENGTH.pack(len(key)) + key
    return body


class Sha256Hasher:
    """The default: cryptographic, and the same everywhere (REU-3).

    Owns: nothing that changes.
    """

    name = "sha256"
    shareable = True

    def __init__(self, seed: bytes | None = None) -> None:
        self._first = BlockHash(bytes(32) if seed is None else hashlib.sha256(seed).digest())

    def first_parent(self) -> BlockHash:
        """32 zero bytes, or the digest of the seed."""
        return self._first

    def block(self, parent: BlockHash, tokens: Sequence[int], extra: tuple[bytes, ...]) -> BlockHash:
        """See the module's formula."""
        return BlockHash(hashlib.sha256(_message(parent, tokens, extra)).digest())


class XxHasher:
    """A fast hash that is not cryptographic: it starts from a random value, and serves this process only.

    Owns: nothing that changes.
    """

    name = "xxhash"
    shareable = False

    def __init__(self, digest: Callable[[bytes], bytes], seed: bytes | None = None) -> None:
        self._digest = digest
        self._first = BlockHash(digest(secrets.token_bytes(32) if seed is None else seed))

    def first_parent(self) -> BlockHash:
        """Random for each process unless a seed was given: a known one would let collisions be prepared."""
        return self._first

    def block(self, parent: BlockHash, tokens: Sequence[int], extra: tuple[bytes, ...]) -> BlockHash:
        """128-bit XXH3 of the same message as the default hash."""
        return BlockHash(self._digest(_message(parent, tokens, extra)))


def make_hasher(name: str, seed: bytes | None = None) -> BlockHasher:
    """The hasher called `name`: "sha256" or "xxhash"; raises `ConfigError` for others or a missing package."""
    if name == "sha256":
        return Sha256Hasher(seed)
    if name == "xxhash":
        try:
            import xxhash  # noqa: PLC0415  optional third-party package, only for this hash
        except ImportError:
            raise ConfigError(
                f"prefix_hash 'xxhash' needs the package xxhash: use 'sha256', or {install_command('xxhash')}"
            ) from None
        digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest
        return XxHasher(digest, seed)
    raise ConfigError(f"prefix_hash {name!r} is unknown; use 'sha256' or 'xxhash'")


def group_key(h: BlockHash, group: int) -> bytes:
    """Dictionary key of a block in a KV group: the hash, then the group as 4 big-endian bytes (REU-1)."""
    return h + group.to_bytes(4, "big")


class MediaSpan(msgspec.Struct, frozen=True):
    """Prompt positions `start .. start + length - 1` that one media item stands for."""

    identifier: str
    start: int
    length: int


def extra_keys(
    req: EngineRequest,
    block_index: int,
    *,
    block_size: int = 0,
    media: Sequence[MediaSpan] = (),
    embeddings_digest: bytes | None = None,
) -> tuple[bytes, ...]:
    """What else than tokens block `block_index` depends on, in order (REU-2).

    - `adapter:<bytes in the name>:<name>:<digest>`, of the LoRA adapter;
    - `media:<offset from the block's start>:<identifier>`, for each item that overlaps the block;
    - `salt:<salt>`, in the first block only, since the chain carries it on;
    - `embeddings:<digest>`, of embeddings given in place of tokens.

    Text is UTF-8 and numbers are decimal. `block_size` is needed for media.
    """
    keys = []
    if req.adapter is not None:
        name = req.adapter.name.encode()
        keys.append(b"adapter:%d:%b:%b" % (len(name), name, req.adapter.digest.encode()))
    start = block_index * block_size
    for item in media:
        if item.start < start + block_size and item.start + item.length > start:
            keys.append(b"media:%d:%b" % (item.start - start, item.identifier.encode()))
    if block_index == 0 and req.cache_salt is not None:
        keys.append(b"salt:" + req.cache_salt.encode())
    if embeddings_digest is not None:
        keys.append(b"embeddings:" + embeddings_digest)
    return tuple(keys)


class HashChain:
    """Hashes of one request's full blocks, extended as tokens arrive (REU-4).

    Owns: `hashes`, one entry a full block of `block_size` tokens; readers must not change it.
    """

    __slots__ = ("_adapter_keys", "_block_size", "_hasher", "_media", "_req", "hashes")

    def __init__(
        self, hasher: BlockHasher, block_size: int, req: EngineRequest, media: Sequence[MediaSpan] = ()
    ) -> None:
        self._hasher = hasher
        self._block_size = block_size
        self._req = req
        self._media = tuple(media)
        # Without media every block after the first has the same keys.
        self._adapter_keys = extra_keys(req, 1)
        self.hashes: list[BlockHash] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the blocks that became full; `tokens` is the running list of all tokens, known ones only."""
        size, hashes = self._block_size, self.hashes
        index = len(hashes)
        if len(tokens) < (index + 1) * size:
            return
        parent = hashes[-1] if hashes else self._hasher.first_parent()
        for i in range(index, len(tokens) // size):
            parent = self._hasher.block(parent, tokens[i * size : (i + 1) * size], self._extra(i))
            hashes.append(parent)

    def _extra(self, index: int) -> tuple[bytes, ...]:
        if index and not self._media:
            return self._adapter_keys
        return extra_keys(self._req, index, block_size=self._block_size, media=self._media)
