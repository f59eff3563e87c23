"""Which class builds which architecture.

Promises: looking up an architecture imports only its own file and touches no device (PLG-9); an unknown one is an
error that lists those there are.
Does not know: weights, or any model.
"""

from collections.abc import Sequence
from typing import Any

from octavo.base.errors import LoadError
from octavo.config.architectures import ARCHITECTURES, PLUGIN_GROUP, not_supported
from octavo.plugins.registry import Registry

__all__ = ["ARCHITECTURES", "PLUGIN_GROUP", "Architectures", "architectures", "resolve"]

Architectures = Registry[Any]  # classes that satisfy models.build.Model


def architectures(plugins: Sequence[str] | None = ()) -> Architectures:
    """The built-in architectures, and those of installed packages named in `plugins` (None: all of them)."""
    registry: Architectures = Registry("architecture", ARCHITECTURES, error=LoadError)
    if plugins is None or plugins:
        registry.discover(PLUGIN_GROUP, plugins)
    return registry


def resolve(architecture: str, registry: Architectures | None = None) -> Any:
    """The class of an architecture by the name in `config.json`. Raises `LoadError` for an unknown one."""
    registry = architectures() if registry is None else registry
    if architecture not in registry:
        raise LoadError(f"the architecture {not_supported(architecture, registry.names())}")
    return registry.load(architecture)
