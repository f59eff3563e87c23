"""What moves blocks in a hand-over, by shape, and where such things are found.

Promises: the ends of a transport are called by the engine's thread and never hold it up; whatever happens, a pull is
told of once, and a lease that was closed is reported closed once.
Does not know: any transport but by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from octavo.base.errors import ConfigError
from octavo.features.transfer.data.peer_server import PeerListener
from octavo.features.transfer.data.regions import KVRegion, LayerRegion
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.disagg import LeaseDrop, LeaseEvent, LeaseWatch, PullJob, Save, TransferRole
from octavo.features.transfer.plan import JobReport
from octavo.plugins.registry import load_target, unknown_name

TRANSPORTS: Final = {
    "tcp": "octavo.features.transfer.data.over_tcp:make",
    "file": "octavo.features.transfer.data.over_file:make",
    "nixl": "octavo.features.transfer.data.over_nixl:make",
}


BY_LAYER: Final = {"file": "octavo.features.transfer.data.over_file_layers:make"}


class ProducerTransport(Protocol):
    """A producer's end."""

    def open(self, lease: str, blocks: tuple[tuple[int, ...], ...]) -> None:
        """These blocks, by group, may be read under the lease until it is closed; 0 is no block."""

    def close(self, lease: str) -> None:
        """Nobody may begin to read. `LeaseNews.CLOSED` follows, once, when nobody reads any more."""

    def news(self) -> tuple[LeaseEvent, ...]:
        """Notices since the last call, in order."""

    def stop(self) -> None:
        """No call comes after this."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A fetch: where its blocks go, and who is told of its end. Both are called from other threads."""

    job: PullJob
    write: Callable[[PullJob, int, int, memoryview], None]  # the job, group, which of its blocks, content
    done: Callable[[JobReport], None]


class ConsumerTransport(Protocol):
    """A consumer's end."""

    def watch(self, watch: LeaseWatch) -> None:
        """Keep a lease alive from now on."""

    def pull(self, pull: Pull) -> None:
        """Fetch blocks of a watched lease; it is told once, whatever happens."""

    def drop(self, drop: LeaseDrop) -> None:
        """A watched lease is over."""

    def news(self) -> tuple[LeaseEvent, ...]:
        """Leases that are gone."""

    def stop(self) -> None:
        """No call comes after this."""


class LayerProducerTransport(ProducerTransport, Protocol):
    """A producer's end that takes layers while later ones are computed; called by the engine's thread."""

    def begin_saves(self, saves: Sequence[Save]) -> None:
        """A step that completes these blocks begins."""

    def save_layer(self, layer: int) -> None:
        """The layer's share of them was computed."""

    def wait_for_save(self) -> None:
        """When this returns, the blocks may be given to others."""

    def forget(self, lease: str) -> None:
        """What was saved for it is not wanted: it will not be opened."""


class LayerConsumerTransport(ConsumerTransport, Protocol):
    """A consumer's end that brings blocks layer by layer, for the step that computes with them."""

    def begin_loads(self, pulls: Sequence[Pull]) -> None:
        """A step that computes with these begins."""

    def wait_for_layer(self, layer: int) -> None:
        """When this returns, the layer's share is there, or has failed; it does not take for ever."""

    def end_loads(self) -> None:
        """When this returns, nothing writes to these blocks any more, and each pull was told of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a transport is made with: this engine's side, its KV memory by group, and where others come.

    `address` is what followed `://`, empty for a transport without one of its own. With `layers` a prompt is handed over
    layer by layer, by ends that can.
    """

    role: TransferRole
    address: str
    regions: tuple[KVRegion, ...]
    seal: Seal
    listener: PeerListener
    layers: tuple[LayerRegion, ...] = ()


Make = Callable[[Place], tuple[ProducerTransport | None, ConsumerTransport | None]]


def find_transport(text: str, *, by_layer: bool = False) -> Make:
    """The maker of a transport: by its kind, by an address of that kind, or by import path. Raises `ConfigError`."""
    kind = text.partition("://")[0]
    target = BY_LAYER.get(kind) if by_layer else TRANSPORTS.get(kind)
    if target is None and by_layer:
        raise ConfigError(
            f"--kv-by-layer: --kv-transport {text} hands over whole prompts only; give file:///folder that both engines "
            "can write to, or leave --kv-by-layer out"
        )
    if target is None:
        if ":" not in kind:
            raise ConfigError(f"--kv-transport {text}: {unknown_name('transport', kind, tuple(TRANSPORTS))}")
        target = kind
    try:
        make: Make = load_target(target)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--kv-transport {text} cannot be imported: {error}") from None
    return make
