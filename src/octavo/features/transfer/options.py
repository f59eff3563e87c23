"""Options that move KV beyond the device: tiers, and the hand-over of prompts between engines.

Promises: values, and what follows from them alone.
Does not know: what an address or a role means (see `address`, `disagg`).
"""

from dataclasses import dataclass
from typing import Final

from octavo.config.schema import option

FIELD: Final = "kv_transfer_params"  # of requests and answers


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """KV beyond the device."""

    kv_tier: tuple[str, ...] | None = option(
        None,
        "Where KV goes that is evicted from the cache, in order of lookup: host?size=8GiB, file:///folder?size=100GiB, "
        "redis://host:port/0, s3://bucket/prefix?endpoint=URL, mooncake://host:port, peer://host:port. "
        "Memory of the host comes first, 1GiB of it when not given.",
        kind="list",
        several=True,
        value="ADDRESS",
    )
    kv_listen: str | None = option(
        None,
        "Address, host:port, where other engines may read KV: from this one's host tier (their --kv-tier "
        "peer://host:port), and of prompts that it computed for them (--kv-role).",
        value="ADDRESS",
    )
    kv_role: str | None = option(
        None,
        "Side of a hand-over of prompts between engines: a producer computes a prompt and keeps its KV for a consumer, "
        "which fetches it and goes on.",
        choices=("producer", "consumer", "both"),
    )
    kv_transport: str = option(
        "tcp",
        "What carries a prompt's KV from producer to consumer, the same at both: tcp, nixl (a package of its own), "
        "file:///folder that both can write to, or module:function of your own.",
        value="TRANSPORT",
    )
    kv_by_layer: bool = option(
        False,
        "Hand prompts over layer by layer: the producer writes a layer while it computes later ones, the consumer "
        "computes a layer while it reads later ones. With --kv-transport file:///folder, and at both engines.",
    )
    kv_connector: tuple[str, ...] | None = option(
        None,
        "Connectors of your own, module:Class, beside tiers and role; see octavo.features.transfer.connector.",
        kind="list",
        several=True,
        value="MODULE:CLASS",
    )
    kv_advertise: str | None = option(
        None,
        "Host, or host:port, at which consumers find this engine, where it differs from --kv-listen.",
        value="ADDRESS",
    )
    kv_allow: tuple[str, ...] | None = option(
        None,
        "Hosts that a consumer may fetch prompts from; any that a request names when not given.",
        kind="list",
        several=True,
        value="HOST",
    )
    kv_lease_s: float = option(
        30.0, "How long a producer keeps a prompt's KV when nothing is heard of its consumer.", unit="seconds"
    )
    kv_load_failure: str = option(
        "recompute",
        "What becomes of a request whose prompt could not be fetched from its producer: it is computed here, or fails.",
        choices=("recompute", "fail"),
    )

    @property
    def asked_by(self) -> str | None:
        """The first option here that moves KV beyond the device, for messages; None: it stays there."""
        names = ("kv_tier", "kv_role", "kv_connector", "kv_listen")
        given = next((name for name in names if getattr(self, name)), None)
        return None if given is None else f"--{given.replace('_', '-')}"

    @property
    def tiers(self) -> tuple[str, ...]:
        """Addresses of tiers; an engine that others read from has a host tier at least, unless they come for prompts."""
        for_prompts = self.kv_role in ("producer", "both") and "://" not in self.kv_transport
        return self.kv_tier or (("host",) if self.kv_listen and not for_prompts else ())
