"""The scheduler's halves of what moves KV beyond the device, from the options that ask for it.

Promises: what cannot be is said in one sentence that names the option.
Does not know: the worker's halves (see `features.transfer.data.agent`).
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError
from octavo.base.kvspec import KVLayout
from octavo.config.schema import CacheConfig
from octavo.features.transfer import address
from octavo.features.transfer.connector import ControlContext, load
from octavo.features.transfer.control import disagg, offload
from octavo.features.transfer.control.producer import BlocksOf
from octavo.features.transfer.disagg import TransferRole
from octavo.features.transfer.plan import Speeds
from octavo.kvcache.hashing import make_hasher

if TYPE_CHECKING:
    from octavo.scheduler.seams import ControlPart


def make(
    cache: CacheConfig,
    layout: KVLayout,
    *,
    hash_block_size: int,
    blocks_of: BlocksOf,
    clock: Callable[[], float],
    speeds: Mapping[str, float],
) -> "tuple[ControlPart, ...]":
    """The parts, each with a name of its own. `speeds`: what was measured at the start. Raises `ConfigError`."""
    parts: list[ControlPart] = []
    if cache.tiers:
        _check_tiers(cache)
        parts.append(
            offload.make(
                cache.tiers,
                layout,
                hash_block_size=hash_block_size,
                clock=clock,
                speeds=speeds,
                record_events=cache.kv_events,
            )
        )
    if cache.kv_role is not None:
        parts.append(disagg.make(cache.kv_role, cache, layout, blocks_of=blocks_of, clock=clock))
    context = ControlContext(layout=layout, hash_block_size=hash_block_size, blocks_of=blocks_of, clock=clock)
    parts += [connector.control_part(context) for connector in load(cache.kv_connector or ())]
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"--kv-connector: two connectors have one name, of {', '.join(sorted(names))}")
    return tuple(parts)


def _check_tiers(cache: CacheConfig) -> None:
    if not cache.enable_prefix_caching:
        raise ConfigError("--kv-tier keeps prefixes, and --no-enable-prefix-caching looks none up: drop one of the two")
    if not make_hasher(cache.prefix_hash).shareable and any(not tier.startswith("host") for tier in cache.tiers):
        raise ConfigError(f"--prefix-hash {cache.prefix_hash} names blocks for one process only; tiers need sha256")
    blocks = address.parse_tiers(cache.tiers)[0].blocks
    if blocks > 1 and cache.kv_role is not None and cache.kv_listen is not None:
        raise ConfigError(
            f"--kv-tier with blocks={blocks} and --kv-role cannot both be reached at --kv-listen {cache.kv_listen}, where "
            "a chunk is one block: drop one of the two"
        )


def host_bytes(cache: CacheConfig, available: int) -> int:
    """Of so many bytes, those that tiers take beside the KV cache. Raises `ConfigError` when they leave nothing."""
    return address.host_bytes(cache.tiers, available) if cache.tiers else 0


def describe(cache: CacheConfig, layout: KVLayout, speeds: Mapping[str, float]) -> tuple[str, ...]:
    """What was asked for, for people: a line for each."""
    lines = address.describe(cache.tiers, layout, Speeds.of(speeds)) if cache.tiers else ()
    if cache.kv_role is not None:
        is_reached = TransferRole(cache.kv_role).produces and "://" not in cache.kv_transport
        reached = f", reached at {cache.kv_listen}" if is_reached else ""
        way = ", layer by layer" if cache.kv_by_layer else ""
        lines = (*lines, f"KV hand-over: {cache.kv_role} over {cache.kv_transport}{reached}{way}")
    return lines
