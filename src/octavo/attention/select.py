"""Choosing an attention backend, and the block size that suits it.

Promises: the first backend in the platform's order without an objection; when there is none, the error shows every
candidate with its reasons (ATT-1).
Does not know: how a backend works; it loads one by name only to ask.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from octavo.attention.api import AttentionNeed, Backend
from octavo.base.errors import ConfigError
from octavo.config.facts import DeviceFacts
from octavo.plugins.registry import Registry

Backends = Registry[type[Backend]]

BUILT_IN: Final[Mapping[str, str]] = {  # most wanted first
    "cpu": "octavo.attention.cpu:CpuBackend",
    "torch_sdpa": "octavo.attention.sdpa:SdpaBackend",
}
PLUGIN_GROUP: Final = "octavo.attention_backends"


def backends(plugins: Sequence[str] | None = ()) -> Backends:
    """A registry of the built-in backends, and of installed ones named in `plugins` (None: all of them)."""
    registry: Backends = Registry("attention backend", BUILT_IN)
    if plugins is None or plugins:
        registry.discover(PLUGIN_GROUP, plugins)
    return registry


def choose(
    need: "AttentionNeed | Sequence[AttentionNeed]",
    forced: str | None,
    device: DeviceFacts,
    registry: Backends | None = None,
) -> Backend:
    """The backend for one need, or for all needs of a model's layers.

    `forced` names one and nothing else is tried. Raises `ConfigError` when none fits or the name is unknown.
    """
    registry = backends() if registry is None else registry
    needs = (need,) if isinstance(need, AttentionNeed) else tuple(need)
    refused: dict[str, tuple[str, ...]] = {}
    for name in registry.names() if forced is None else (forced,):
        try:
            backend = registry.load(name)()
        except ConfigError as error:
            if forced is not None:
                raise
            refused[name] = (str(error),)
            continue
        reasons = tuple(dict.fromkeys(why for n in needs for why in backend.objections(n, device)))
        if not reasons:
            return backend
        refused[name] = reasons
    listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refused.items())
    if forced is not None:
        raise ConfigError(f"attention backend {forced!r} cannot serve this model: {listed.partition(': ')[2]}")
    raise ConfigError(f"no attention backend can serve this model: {listed or 'none is registered'}")


def choose_block_size(chosen: Sequence[Backend], requested: int | None) -> int:
    """Tokens in one KV block: what the user asks for, or the least common multiple of what the backends prefer.

    Raises `ConfigError` when a backend does not accept it (ATT-3).
    """
    size = requested if requested is not None else math.lcm(*(b.capabilities.preferred_block_size for b in chosen))
    for backend in chosen:
        if size < 1 or not backend.capabilities.accepts_block(size):
            rule = backend.capabilities.block_rule()
            raise ConfigError(f"block size {size} does not suit attention backend {backend.name!r}: it must be {rule}")
    return size
