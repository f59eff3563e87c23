"""A connector of somebody's own: both halves of a feature that moves KV, by import path (PDX-1, PDX-11).

Promises: what `--kv-connector module:Class` names joins the scheduler and the worker as the built-in ones do; several
connectors, tiers and a role may be given at once: a prompt is loaded from the one that has most of it, and every one of
them hears of every block that becomes full. A worker's half may work layer by layer (`watches_layers`, `wants_layers`),
and offer what other sides must know of it (`handshake`), which its scheduler's half is told before the first request.
Does not know: any connector.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from octavo.base.errors import ConfigError
from octavo.plugins.features import ControlContext, DataContext
from octavo.plugins.registry import load_target

__all__ = ["Connector", "ControlContext", "DataContext", "load"]


class Connector(Protocol):
    """Makes two halves whose `name` is the same, and no other part's."""

    def control_part(self, context: ControlContext) -> Any:
        """For the scheduler: a `octavo.scheduler.seams.ControlPart`."""

    def data_part(self, context: DataContext) -> Any:
        """For the worker: a `octavo.worker.seams.DataPart`."""


def load(paths: Sequence[str]) -> tuple[Connector, ...]:
    """Connectors by import path. Raises `ConfigError` for one that cannot be made."""
    return tuple(_load(path) for path in paths)


def _load(path: str) -> Connector:
    if not all(path.partition(":")):
        raise ConfigError(f"--kv-connector {path}: give it as module:Class")
    try:
        connector: Connector = load_target(path)()
    except Exception as error:
        raise ConfigError(f"--kv-connector {path} cannot be made: {type(error).__name__}: {error}") from None
    for half in ("control_part", "data_part"):
        if not callable(getattr(connector, half, None)):
            raise ConfigError(f"--kv-connector {path} has no {half}; see octavo.features.transfer.connector")
    return connector
