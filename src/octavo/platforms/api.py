"""What a platform is, and which one this machine offers.

Promises: platforms are found by name and imported only when asked; `probe` starts nothing and changes nothing on the
device (PLG-6).
Does not know: models, attention backends, weight schemes or operators: their registries ask the facts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from octavo.base.errors import ConfigError
from octavo.config.facts import DeviceFacts
from octavo.plugins.registry import Registry

BUILT_IN: Final[Mapping[str, str]] = {  # most wanted first
    "cuda": "octavo.platforms.cuda:CudaPlatform",
    "cpu": "octavo.platforms.cpu:CpuPlatform",
}
PLUGIN_GROUP: Final = "octavo.platforms"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a platform may change before anything is built. None: not decided."""

    block_size: int | None = None  # tokens
    graph_mode: str | None = None
    worker: str | None = None  # "module:Class"


class Platform(Protocol):
    """One kind of device. Unknown attributes are those of `torch.<device_type>`."""

    @property
    def name(self) -> str: ...

    @property
    def device_type(self) -> str:
        """As torch writes it: "cpu", "cuda"."""

    @property
    def dispatch_key(self) -> str:
        """Torch's key for custom operators: "CPU", "CUDA"."""

    @property
    def visible_variable(self) -> str | None:
        """The environment variable that masks devices."""

    @property
    def communicator(self) -> str:
        """`torch.distributed`'s backend."""

    @property
    def worker(self) -> str:
        """The worker's class, as "module:Class"."""

    @property
    def compile_backend(self) -> str: ...

    def available(self) -> bool:
        """True when this machine has such a device and torch can use it."""

    def facts(self) -> DeviceFacts:
        """What the device is and has, now."""

    def adjusted(self, settings: RunSettings) -> RunSettings:
        """The settings as this device needs them; raises `ConfigError` for those it cannot run."""


def platforms(plugins: tuple[str, ...] | None = ()) -> Registry[type[Platform]]:
    """The built-in platforms, and those of installed packages named in `plugins` (None: all of them)."""
    registry: Registry[type[Platform]] = Registry("device", BUILT_IN)
    if plugins is None or plugins:
        registry.discover(PLUGIN_GROUP, plugins)
    return registry


def find_platform(device: str = "auto", registry: Registry[type[Platform]] | None = None) -> Platform:
    """The platform called `device`, or with "auto" the first one that this machine has.

    Raises `ConfigError` for an unknown name and for a device that is not here.
    """
    registry = platforms() if registry is None else registry
    if device != "auto":
        found = registry.load(device)()
        if not found.available():
            raise ConfigError(
                f"device {device!r} was asked for, but torch {torch.__version__} finds none on this machine; "
                f"use --device cpu, or install a torch and driver for it"
            )
        return found
    for name in registry.names():
        found = registry.load(name)()
        if found.available():
            return found
    raise ConfigError(f"this machine has none of the devices {', '.join(registry.names())}")


def probe(device: str = "auto", plugins: tuple[str, ...] | None = ()) -> DeviceFacts:
    """Facts of the device that `device` means; raises `ConfigError` as `find_platform` does."""
    return find_platform(device, platforms(plugins)).facts()


def torch_attribute(device_type: str, name: str) -> Any:
    """`torch.<device_type>.<name>`, for a platform's unknown attributes; Python's own names are never looked up."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    module = getattr(torch, device_type, None)
    if module is None or not hasattr(module, name):
        raise AttributeError(f"neither the platform nor torch.{device_type} has {name!r}")
    return getattr(module, name)
