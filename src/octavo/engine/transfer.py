"""What moves KV beyond the device, as far as an engine's start goes.

Promises: nothing of it is loaded, made or measured where no option asks for it; memory that the host tier takes is not
given to the KV cache, too.
Does not know: what an option means (`octavo.features.transfer`, which is found by name: the engine works without it).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from octavo.base.kvspec import KVLayout
from octavo.config.facts import DeviceFacts
from octavo.config.schema import CacheConfig
from octavo.config.transfer import TransferConfig
from octavo.executor.api import Executor, ProfileReport
from octavo.kvcache.manager import KVCacheManager
from octavo.plugins.registry import load_feature
from octavo.scheduler.seams import ControlPart

PARTS: Final = "octavo.features.transfer.control.parts:make"
ROOM: Final = "octavo.features.transfer.control.parts:host_bytes"
NOTES: Final = "octavo.features.transfer.control.parts:describe"
SPEEDS: Final = "transfer.speeds"  # the call that its other half answers
HANDSHAKE: Final = "handshake"  # the call that every worker answers
Room = TypeVar("Room", DeviceFacts, ProfileReport)


def worker_share(cache: CacheConfig) -> TransferConfig | None:
    """A worker's share of the options."""
    if cache.transfer_option is None:
        return None
    return TransferConfig(
        option=cache.transfer_option,
        tiers=cache.tiers,
        listen=cache.kv_listen,
        role=cache.kv_role,
        transport=cache.kv_transport,
        by_layer=cache.kv_by_layer,
        connectors=cache.kv_connector or (),
    )


def beside(cache: CacheConfig, room: Room) -> Room:
    """The same, with the memory that tiers leave to the KV cache. Raises `ConfigError` when that is nothing."""
    if not cache.tiers:
        return room
    taken: Callable[[CacheConfig, int], int] = load_feature(ROOM, "--kv-tier")
    if isinstance(room, DeviceFacts):
        left = room.memory_available_bytes - taken(cache, room.memory_available_bytes)
        return replace(room, memory_available_bytes=left)
    return replace(room, available_bytes=room.available_bytes - taken(cache, room.available_bytes))


def parts(
    cache: CacheConfig,
    layout: KVLayout,
    hash_block: int,
    kv: KVCacheManager,
    clock: Callable[[], float],
    speeds: Mapping[str, float],
) -> tuple[ControlPart, ...]:
    """The scheduler's halves. Raises `ConfigError`."""
    option = cache.transfer_option
    if option is None:
        return ()
    made: tuple[ControlPart, ...] = load_feature(PARTS, option)(
        cache, layout, hash_block_size=hash_block, blocks_of=kv.blocks, clock=clock, speeds=speeds
    )
    return made


def speeds(cache: CacheConfig, executor: Executor, profile: ProfileReport) -> Mapping[str, float]:
    """What says from the start whether loading pays (TIR-33); nothing where nothing is loaded."""
    if not cache.tiers:
        return {}
    return {"prompt_tokens_per_s": profile.prompt_tokens_per_s, **executor.call(SPEEDS)}


def introduce(parts: Sequence[ControlPart], executor: Executor) -> None:
    """Tell each of the scheduler's halves what its other half offers for other engines to know (PDX-3)."""
    if parts:
        offered = executor.call(HANDSHAKE)
        for part in parts:
            part.handshake(offered.get(part.name, {}))


def notes(cache: CacheConfig, layout: KVLayout, speeds: Mapping[str, float]) -> tuple[str, ...]:
    """What was asked for, for people: a line for each."""
    option = cache.transfer_option
    if option is None:
        return ()
    lines: tuple[str, ...] = load_feature(NOTES, option)(cache, layout, speeds)
    return lines
