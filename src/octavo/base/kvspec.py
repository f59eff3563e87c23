"""What one layer stores per block, and how the cache memory is laid out.

Promises: specs are values that can be compared and sent; the layout is computed once and constant.
Does not know: who allocates, which blocks are free (see `kvcache`), or tensors (see `worker.memory`).
"""

from dataclasses import dataclass
from math import ceil

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip


SCALE_BYTES = 4  # float32
SCALED_DTYPES = frozenset({"int8", "float8_e4m3fn"})  # each token of a head has a scale beside its values


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a dtype named as torch names it, without the prefix."""
    return DTYPE_BYTES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """One layer's needs (REQ-10). Subclasses say which tokens must be kept.

    `tokens_per_state` is how many tokens one stored state covers: 1 for plain attention.
    """

    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: str
    tokens_per_state: float = 1.0
    page_padding_bytes: int = 0  # added so that all groups have pages of one size

    @property
    def states_per_block(self) -> int:
        """How many states one block holds."""
        return ceil(self.block_size / self.tokens_per_state)

    @property
    def content_bytes(self) -> int:
        """Bytes that one layer really stores in one block: K and V, then their scales if they have any."""
        one = self.head_dim * dtype_bytes(self.dtype) + (SCALE_BYTES if self.is_scaled else 0)
        return 2 * self.states_per_block * self.num_kv_heads * one

    @property
    def is_scaled(self) -> bool:
        """True when every token of a head has a scale, K and V apart."""
        return self.dtype in SCALED_DTYPES

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer, padding included."""
        return self.content_bytes + self.page_padding_bytes

    def max_blocks(self, num_tokens: int, max_batched_tokens: int) -> int:
        """Most blocks that one request of `num_tokens` holds at one moment."""
        return ceil(num_tokens / self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(KVSpec):
    """Every token of the request is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(KVSpec):
    """A query at position p sees keys p - window + 1 .. p; older blocks may go."""

    window: int  # tokens

    def max_blocks(self, num_tokens: int, max_batched_tokens: int) -> int:
        """The window, one step's tokens, and a block for each ragged edge."""
        held = min(num_tokens, self.window - 1 + max_batched_tokens)
        return min(ceil(num_tokens / self.block_size), ceil(held / self.block_size) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table (REQ-13). `layers` are layer ids, in model order."""

    index: int
    spec: KVSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
    """Where one layer's pages lie in the flat cache buffer, in bytes.

    Block b starts at `offset + b * block_stride` and holds `page_bytes`; K first, then V, each shaped
    [kv_heads, states, head_dim]; then their scales, if they have any, each float32 [kv_heads, states].
    """

    layer: int
    group: int
    offset: int
    block_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The floor plan of cache memory: computed once at start-up, then constant (REQ-14).

    `num_blocks` includes block 0, the null block, which is never given to a request.
    """

    groups: tuple[KVGroup, ...]
    places: tuple[LayerPlace, ...]  # by layer id
    num_blocks: int
    block_bytes: int  # all layers' pages that one block id stands for
    total_bytes: int
    padding_share: float = 0.0  # of total_bytes
