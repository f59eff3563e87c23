"""Find a block by the hash of what it holds.

Promises: a key finds a block as long as one block carries it; duplicates are kept, not merged (SCH-25).
Does not know: who holds a block, which block is evicted next, or what a window is.
"""

from typing import Literal

import msgspec


class CacheEvent(msgspec.Struct, frozen=True):
    """What routers and tiers want to know: a hash became findable, stopped being so, or all did (SCH-27).

    `group` and `block_hash` are empty for "cleared", which comes before the others of its batch.
    """

    kind: Literal["stored", "removed", "cleared"]
    group: int = 0
    block_hash: bytes = b""
