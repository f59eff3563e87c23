"""What the prefix cache holds, as others read it: a description, what is there now, then every change (SCH-27).

Promises: whoever reads all notes of one stream has exactly the hashes that can be found; every note carries the epoch
(one start of an engine) and a number without gaps, so that a reader who missed one knows it and starts over.
Does not know: how notes travel, or who reads them.

One stream, by `kind`: `description` first, then `stored` in portions for what is there already, then `current`, then
`cleared`, `removed` and `stored` as they happen. Hashes are hexadecimal. The hash of block i covers the first
`(i + 1) * hash_block_size` tokens (see `kvcache.hashing`); a block of KV has `block_size` tokens, and only its last
hash is told. Of a model whose layers are in several groups, the first group is told.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

import msgspec

from octavo.base.outputs import CacheChanges

PORTION = 256  # hashes in one note


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """How the hashes are made: a reader who makes the same ones can tell what is held."""

    hash: str
    hash_block_size: int  # tokens
    block_size: int  # tokens; a multiple of the other


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. `scheme` comes with the description, `hashes` with what was stored or removed."""

    seq: int
    epoch: str
    kind: Literal["description", "stored", "current", "cleared", "removed"]
    scheme: Scheme | None = None
    hashes: tuple[str, ...] = ()


class Narrator:
    """Tells one stream.

    Owns: the number of the next note.
    """

    def __init__(self, epoch: str, scheme: Scheme) -> None:
        self._epoch = epoch
        self._scheme = scheme
        self._seq = 0

    def opening(self, hashes: Iterable[bytes]) -> Iterator[Note]:
        """The description and what is there now."""
        yield self._note("description", scheme=self._scheme)
        yield from self._portions("stored", hashes)
        yield self._note("current")

    def changes(self, changes: CacheChanges) -> Iterator[Note]:
        """One change, in the order in which it is to be followed."""
        if changes.cleared:
            yield self._note("cleared")
        yield from self._portions("removed", changes.removed)
        yield from self._portions("stored", changes.stored)

    def _portions(self, kind: Literal["stored", "removed"], hashes: Iterable[bytes]) -> Iterator[Note]:
        rest = iter(hashes)
        while portion := tuple(h.hex() for h in islice(rest, PORTION)):
            yield self._note(kind, hashes=portion)

    def _note(
        self,
        kind: Literal["description", "stored", "current", "cleared", "removed"],
        *,
        scheme: Scheme | None = None,
        hashes: tuple[str, ...] = (),
    ) -> Note:
        note = Note(seq=self._seq, epoch=self._epoch, kind=kind, scheme=scheme, hashes=hashes)
        self._seq += 1
        return note


class StartOver(Exception):
    """A note is missing, or belongs to another start of the engine: what is known is worth nothing."""


class Mirror:
    """The reader's copy.

    Owns: the hashes, and where in the stream it is.
    """

    def __init__(self) -> None:
        self.scheme: Scheme | None = None
        self._epoch = ""
        self._next = 0
        self._hashes: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def hashes(self) -> frozenset[bytes]:
        """A copy of what is held, as far as is known."""
        return frozenset(self._hashes)

    def forget(self) -> None:
        """The stream has ended: nothing is known until another begins."""
        self.scheme = None
        self._epoch = ""
        self._next = 0
        self._hashes.clear()

    def follow(self, note: Note) -> None:
        """Take the next note. Raises `StartOver`, having forgotten everything, when it is not the next one."""
        if note.seq != self._next or (self._next and note.epoch != self._epoch) or self._misplaced(note):
            self.forget()
            raise StartOver(f"note {note.seq} of {note.epoch} ({note.kind}) does not follow")
        self._next += 1
        if note.kind == "description":
            self._epoch, self.scheme = note.epoch, note.scheme
        elif note.kind == "cleared":
            self._hashes.clear()
        elif note.kind == "stored":
            self._hashes.update(map(bytes.fromhex, note.hashes))
        elif note.kind == "removed":
            self._hashes.difference_update(map(bytes.fromhex, note.hashes))

    @staticmethod
    def _misplaced(note: Note) -> bool:
        """A stream begins with a description that says how to hash, and has one only."""
        return (note.kind == "description") != (note.seq == 0) or (note.seq == 0 and note.scheme is None)

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many tokens at the start of a prompt are held; `hashes` are those of its full hash blocks."""
        if self.scheme is None:
            return 0
        stride = self.scheme.block_size // self.scheme.hash_block_size
        blocks = 0
        for h in hashes[stride - 1 :: stride]:
            if h not in self._hashes:
                break
            blocks += 1
        return blocks * self.scheme.block_size
