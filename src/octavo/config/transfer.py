"""A worker's share of the options that move KV beyond the device.

Promises: values.
Does not know: what an address or a role means (see `features.transfer`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Where KV goes beyond the device; what the values mean is the feature's matter.

    `option` is the one that asked for it first, for messages.
    """

    option: str
    tiers: tuple[str, ...] = ()  # addresses
    listen: str | None = None  # host:port where other engines may read
    role: str | None = None  # side of a hand-over
    transport: str = "tcp"
    by_layer: bool = False  # the hand-over goes layer by layer
    connectors: tuple[str, ...] = ()  # module:Class of each
