"""From the layers' specs and a memory size to groups, pages and a number of blocks (REQ-13, REQ-14, REQ-17).

Promises: the layout wastes as little as the choices here allow, and says how much; too little memory is
an error that names what is missing and what would fit.
Does not know: tensors, devices, or which blocks are in use.

How a layout is made:

1. Layers with equal specs are of one *kind*. All kinds get pages of one size: a smaller page takes more
   tokens, as often as it fits whole, and is padded for what is left.
2. Each kind is cut into groups of equally many layers, so that one block id stands for one page in each
   of `group_size` layers of any group; a short last group leaves some of its pages unused.
3. The i-th layer of every group shares region i of the memory: a block belongs to one group at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, gcd

from octavo.base.errors import ConfigError
from octavo.base.kvspec import FullAttentionSpec, KVGroup, KVLayout, KVSpec, LayerPlace, SlidingWindowSpec

GROUP_COST = 0.01  # a further group costs a block table and a prefix look-up: worth this share of the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """What a layout gives (REQ-17)."""

    longest_context: int  # tokens one request alone can have, at most the limit asked about
    max_model_len: int  # tokens
    blocks_per_request: int  # at max_model_len
    concurrency: float  # requests of max_model_len at once
    padding_share: float  # of the memory, for a request of the length that the layout was planned for
    lines: tuple[str, ...]  # the plan in words


def plan_layout(
    specs: Sequence[KVSpec],
    *,
    budget_bytes: int | None,
    num_blocks: int | None,
    max_model_len: int,
    max_batched_tokens: int,
    window_as_full: bool = False,
    order: str = "layer",
) -> KVLayout:
    """The floor plan for layers 0 .. len(specs) - 1.

    `num_blocks` includes the null block and wins over `budget_bytes`. `max_model_len` is the request
    length by which waste is judged. `window_as_full` allocates window layers like full attention, for
    parts that cannot do with several groups; their computing keeps its window (REQ-12). `order`:
    "block" lays all of a block's pages side by side, so that a block which was never taken has touched no
    memory in any layer; "layer" each region's blocks (REQ-14).
    Raises `ConfigError` when not even one block fits, or neither size is given.
    """
    if window_as_full:
        specs = [_as_full(s) for s in specs]
    kinds = _kinds(specs)
    unified = _unify_pages(tuple(kinds))
    page = max((s.page_bytes for s in unified.values()), default=0)
    held = {spec: unified[spec].max_blocks(max_model_len, max_batched_tokens) for spec in kinds}
    size = _group_size([(len(layers), held[spec]) for spec, layers in kinds.items()])
    groups: list[KVGroup] = []
    for spec, layers in kinds.items():
        for start in range(0, len(layers), size):
            groups.append(KVGroup(index=len(groups), spec=unified[spec], layers=tuple(layers[start : start + size])))
    count = _count_blocks(size * page, budget_bytes, num_blocks)
    return KVLayout(
        groups=tuple(groups),
        places=_places(groups, size, page, count, order),
        num_blocks=count,
        block_bytes=size * page,
        total_bytes=count * size * page,
        padding_share=_padding_share(groups, size, page, max_model_len, max_batched_tokens),
    )


def hash_block_size(layout: KVLayout) -> int:
    """Tokens to hash together so that every group's blocks can reuse the chain (REU-4): the common divisor."""
    return gcd(*(g.spec.block_size for g in layout.groups)) or 1


def blocks_needed(layout: KVLayout, num_tokens: int, max_batched_tokens: int) -> int:
    """Most blocks that one request of `num_tokens` holds at one moment, over all groups."""
    return sum(g.spec.max_blocks(num_tokens, max_batched_tokens) for g in layout.groups)


def longest_context(layout: KVLayout, *, limit: int, max_batched_tokens: int) -> int:
    """The most tokens, up to `limit`, that one request alone can have; 0 when none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_needed(layout, middle, max_batched_tokens) < layout.num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def fit_report(layout: KVLayout, *, max_model_len: int, max_batched_tokens: int, limit: int | None = None) -> FitReport:
    """What fits: `longest_context` is sought up to `limit`, `max_model_len` when not given.

    Raises `ConfigError` when one request of `max_model_len` does not fit, with the missing bytes and
    the largest length that would.
    """
    available = layout.num_blocks - 1
    need = blocks_needed(layout, max_model_len, max_batched_tokens)
    longest = longest_context(layout, limit=max(limit or 0, max_model_len), max_batched_tokens=max_batched_tokens)
    if need > available:
        missing = (need - available) * layout.block_bytes
        advice = f"or set max_model_len to at most {longest}" if longest else "since not one token fits"
        raise ConfigError(
            f"one request of max_model_len {max_model_len} needs {_size(need * layout.block_bytes)} of KV memory but "
            f"{_size(available * layout.block_bytes)} are there, {_size(missing)} too little; "
            f"give more with kv_cache_memory or num_kv_blocks, {advice}"
        )
    concurrency = available / need if need else float(available)
    return FitReport(
        longest_context=longest,
        max_model_len=max_model_len,
        blocks_per_request=need,
        concurrency=concurrency,
        padding_share=layout.padding_share,
        lines=_describe(layout, longest, concurrency, max_model_len),
    )


# ---- steps of `plan_layout` ------------------------------------------------------------------


def _as_full(spec: KVSpec) -> KVSpec:
    """A window layer's spec as one that keeps everything; others unchanged."""
    if not isinstance(spec, SlidingWindowSpec):
        return spec
    return FullAttentionSpec(**{f.name: getattr(spec, f.name) for f in fields(KVSpec)})


def _kinds(specs: Sequence[KVSpec]) -> dict[KVSpec, list[int]]:
    """Layer ids by spec, in the order of first appearance."""
    kinds: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(replace(spec, page_padding_bytes=0), []).append(layer)
    return kinds


def _unify_pages(kinds: Sequence[KVSpec]) -> dict[KVSpec, KVSpec]:
    """Each kind with the largest page of all: more tokens where they fit whole, padding for the rest."""
    page = max((s.content_bytes for s in kinds), default=0)
    unified = {}
    for spec in kinds:
        larger = replace(spec, block_size=spec.block_size * (page // spec.content_bytes))
        unified[spec] = replace(larger, page_padding_bytes=page - larger.content_bytes)
    return unified


def _group_size(kinds: Sequence[tuple[int, int]]) -> int:
    """Layers in a group, given each kind's number of layers and the blocks that a request holds in a group of it.

    Every size is tried; the cheapest for one request wins, each group beyond the first weighing
    `GROUP_COST`. Of equal costs the larger size wins.
    """
    best, best_cost = 1, float("inf")
    for size in range(1, max((n for n, _ in kinds), default=1) + 1):
        num_groups = sum(ceil(n / size) for n, _ in kinds)
        pages = sum(ceil(n / size) * size * held for n, held in kinds)
        cost = pages * (1.0 + GROUP_COST * (num_groups - 1))
        if cost <= best_cost:
            best, best_cost = size, cost
    return best


def _count_blocks(block_bytes: int, budget_bytes: int | None, num_blocks: int | None) -> int:
    if num_blocks is None:
        if budget_bytes is None:
            raise ConfigError("the KV memory has no size; set kv_cache_memory or num_kv_blocks")
        num_blocks = budget_bytes // block_bytes if block_bytes else 1
        if num_blocks < 2 and block_bytes:
            raise ConfigError(
                f"{_size(max(budget_bytes, 0))} of KV memory hold no block: at least {_size(2 * block_bytes)} are "
                "needed for one block and the null block; give more with kv_cache_memory, or use a smaller block_size"
            )
    elif num_blocks < 2:
        raise ConfigError(f"num_kv_blocks is {num_blocks} but must be at least 2: one block, and the null block")
    return num_blocks


def _places(groups: Sequence[KVGroup], size: int, page: int, num_blocks: int, order: str) -> tuple[LayerPlace, ...]:
    region, stride = (num_blocks * page, page) if order == "layer" else (page, size * page)
    places = [
        LayerPlace(layer=layer, group=group.index, offset=i * region, block_stride=stride)
        for group in groups
        for i, layer in enumerate(group.layers)
    ]
    return tuple(sorted(places, key=lambda p: p.layer))


def _padding_share(
    groups: Sequence[KVGroup], size: int, page: int, max_model_len: int, max_batched_tokens: int
) -> float:
    """Share of what one request of `max_model_len` holds that stores nothing."""
    total = content = 0
    for group in groups:
        held = group.spec.max_blocks(max_model_len, max_batched_tokens)
        total += held * size * page
        content += held * len(group.layers) * group.spec.content_bytes
    return 1.0 - content / total if total else 0.0


# ---- words -----------------------------------------------------------------------------------


def _describe(layout: KVLayout, longest: int, concurrency: float, max_model_len: int) -> tuple[str, ...]:
    lines = [
        f"KV memory {_size(layout.total_bytes)}: {layout.num_blocks - 1} blocks of {_size(layout.block_bytes)}, "
        f"{layout.padding_share:.1%} padding"
    ]
    for group in layout.groups:
        spec = group.spec
        window = f", window {spec.window}" if isinstance(spec, SlidingWindowSpec) else ""
        lines.append(
            f"group {group.index}: {len(group.layers)} layers of {type(spec).__name__}{window}, "
            f"{spec.block_size} tokens and {_size(spec.page_bytes)} a page, {spec.page_padding_bytes} bytes padding"
        )
    lines.append(
        f"one request can have {longest} tokens; {concurrency:.1f} requests of {max_model_len} tokens fit at once"
    )
    return tuple(lines)


def _size(num_bytes: int) -> str:
    """Bytes for people."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{value:.2f} {unit}"
