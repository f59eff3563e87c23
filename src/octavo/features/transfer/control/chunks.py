"""Which chunks a prefix is made of, and which blocks a chunk (TIR-2).

Promises: keys are the same in every process for the same tokens.
Does not know: what is where.

A chunk is one block of one group, or several that follow each other; it is named by the hash of its last one. KV is
loaded by *units*: the fewest tokens that are whole chunks in every group.
"""

from collections.abc import Sequence
from math import lcm

from octavo.features.transfer.control.evict import Key
from octavo.features.transfer.plan import NO_BLOCK
from octavo.kvcache.hashing import BlockHash, group_key
from octavo.kvcache.policies import NULL_BLOCK


class ChunkKeys:
    """Owns: nothing that changes."""

    def __init__(self, block_sizes: Sequence[int], hash_block_size: int, blocks: int = 1) -> None:
        """`block_sizes` and `hash_block_size` in tokens; `blocks` of a chunk."""
        self.num_groups = len(block_sizes)
        self._block_sizes = tuple(block_sizes)
        self._blocks = blocks
        self._hash_block_size = hash_block_size
        self._sizes = tuple(size * blocks for size in block_sizes)
        self._strides = tuple(size // hash_block_size for size in self._sizes)
        self.unit = lcm(*self._sizes)
        self.per_unit = sum(self.unit // size for size in self._sizes)

    def num_units(self, hashes: Sequence[BlockHash], num_tokens: int) -> int:
        """Whole units in the first `num_tokens` tokens, as far as they have hashes."""
        return min(num_tokens, len(hashes) * self._hash_block_size) // self.unit

    def keys(self, hashes: Sequence[BlockHash], first: int, end: int) -> list[Key]:
        """The keys of units `first` .. `end` - 1: unit by unit, in each group by group, chunk by chunk."""
        if self.per_unit == 1:
            return self.group_keys(hashes, 0, range(first, end))
        return [
            self.key(hashes, group, index)
            for unit in range(first, end)
            for group in range(self.num_groups)
            for index in self._of_unit(group, unit, unit + 1)
        ]

    def num_hashes(self, num_tokens: int) -> int:
        """Whole hash blocks in so many tokens."""
        return num_tokens // self._hash_block_size

    def group_keys(self, hashes: Sequence[BlockHash], group: int, indices: Sequence[int]) -> list[Key]:
        """The keys of these chunks of a group."""
        stride, name = self._strides[group], group_key(BlockHash(b""), group)
        return [hashes[(index + 1) * stride - 1] + name for index in indices]

    def key(self, hashes: Sequence[BlockHash], group: int, index: int) -> Key:
        """The key of a group's chunk."""
        return group_key(hashes[(index + 1) * self._strides[group] - 1], group)

    def _of_unit(self, group: int, first: int, end: int) -> range:
        chunks = self.unit // self._sizes[group]
        return range(first * chunks, end * chunks)

    def to_load(
        self, group: int, table: Sequence[int], local_tokens: int, first: int, end: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Of units `first` .. `end` - 1, what is to be loaded to a block table: indices of chunks, the unit of each, and
        blocks, as many for each chunk as it has. Blocks found here, and those that a window has passed, are `NO_BLOCK`; a chunk
        of such blocks only is left out."""
        size, blocks, block_size = self._sizes[group], self._blocks, self._block_sizes[group]
        whole = self._of_unit(group, first, end)
        indices = range(max(whole.start, local_tokens // size), whole.stop)
        if blocks == 1:  # thousands of them, in one step
            chunks = [index for index in indices if table[index] != NULL_BLOCK]
            places = [table[index] for index in chunks]
        else:
            chunks, places = [], []
            for index in indices:
                rows = range(index * blocks, (index + 1) * blocks)
                mine = [table[row] if (row + 1) * block_size > local_tokens else NULL_BLOCK for row in rows]
                if any(block != NULL_BLOCK for block in mine):
                    chunks.append(index)
                    places += [NO_BLOCK if block == NULL_BLOCK else block for block in mine]
        units = chunks if size == self.unit else [index * size // self.unit for index in chunks]
        return chunks, units, places

    def to_store(
        self, hashes: Sequence[BlockHash], group: int, table: Sequence[int], first: int, end: int
    ) -> dict[Key, tuple[int, ...]]:
        """The blocks of chunks whose last hash is among `first` .. `end` - 1, by key, where all of them are there."""
        stride, blocks = self._strides[group], self._blocks
        found = {}
        for index in range(first // stride, end // stride):
            mine = tuple(table[index * blocks : (index + 1) * blocks])
            if len(mine) == blocks and NULL_BLOCK not in mine:
                found[self.key(hashes, group, index)] = mine
        return found
