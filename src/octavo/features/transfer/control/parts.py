"""The scheduler's halves of what moves KV beyond the device, from the options that ask for it.

Promises: what cannot be is said in one sentence that names the option.
Does not know: the worker's halves (see `features.transfer.data.agent`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError
from octavo.base.kvspec import KVLayout
from octavo.config.schema import CacheConfig
from octavo.features.transfer import address
from octavo.features.transfer.connector import load
from octavo.features.transfer.control import disagg, offload
from octavo.features.transfer.disagg import TransferRole
from octavo.features.transfer.options import TransferOptions
from octavo.features.transfer.plan import Speeds
from octavo.kvcache.hashing import make_hasher
from octavo.plugins.features import ControlContext

if TYPE_CHECKING:
    from octavo.scheduler.seams import ControlPart


def make(options: TransferOptions, context: ControlContext) -> "tuple[ControlPart, ...]":
    """The parts, each with a name of its own. Raises `ConfigError`."""
    parts: list[ControlPart] = []
    if options.tiers:
        _check_tiers(options, context.cache)
        parts.append(
            offload.make(
                options.tiers,
                context.layout,
                hash_block_size=context.hash_block_size,
                blocks_of=context.blocks_of,
                clock=context.clock,
                speeds=context.measured,
                record_events=context.cache.kv_events,
            )
        )
    if options.kv_role is not None:
        parts.append(disagg.make(options, context))
    parts += [connector.control_part(context) for connector in load(options.kv_connector or ())]
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"--kv-connector: two connectors have one name, of {', '.join(sorted(names))}")
    return tuple(parts)


def _check_tiers(options: TransferOptions, cache: CacheConfig) -> None:
    if not cache.enable_prefix_caching:
        raise ConfigError("--kv-tier keeps prefixes, and --no-enable-prefix-caching looks none up: drop one of the two")
    if not make_hasher(cache.prefix_hash).shareable and any(not tier.startswith("host") for tier in options.tiers):
        raise ConfigError(f"--prefix-hash {cache.prefix_hash} names blocks for one process only; tiers need sha256")
    blocks = address.parse_tiers(options.tiers)[0].blocks
    if blocks > 1 and options.kv_role is not None and options.kv_listen is not None:
        raise ConfigError(
            f"--kv-tier with blocks={blocks} and --kv-role cannot both be reached at --kv-listen {options.kv_listen}, where "
            "a chunk is one block: drop one of the two"
        )


def host_bytes(options: TransferOptions, available: int) -> int:
    """Of so many bytes, those that tiers take beside the KV cache. Raises `ConfigError` when they leave nothing."""
    return address.host_bytes(options.tiers, available) if options.tiers else 0


def describe(options: TransferOptions, layout: KVLayout, speeds: Mapping[str, float]) -> tuple[str, ...]:
    """What was asked for, for people: a line for each."""
    lines = address.describe(options.tiers, layout, Speeds.of(speeds)) if options.tiers else ()
    if options.kv_role is not None:
        is_reached = TransferRole(options.kv_role).produces and "://" not in options.kv_transport
        reached = f", reached at {options.kv_listen}" if is_reached else ""
        way = ", layer by layer" if options.kv_by_layer else ""
        lines = (*lines, f"KV hand-over: {options.kv_role} over {options.kv_transport}{reached}{way}")
    return lines
