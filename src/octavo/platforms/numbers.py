"""Device numbers in their three spaces, with explicit conversions (PLG-7).

*Logical* is a rank on this node, *visible* an index after the environment's mask, *physical* what topology tools say.

Promises: no number changes its space without a call that says so; a device that is not visible is an error.
Does not know: devices; the mask comes in as text.
"""

from typing import NewType

from octavo.base.errors import ConfigError

Logical = NewType("Logical", int)
Visible = NewType("Visible", int)
Physical = NewType("Physical", int)


class DeviceNumbers:
    """The conversions under one mask, such as the value of CUDA_VISIBLE_DEVICES.

    `mask` None or empty means not set: every one of `num_physical` devices is visible under its own number.
    `names` are the physical devices' unique names, for masks that use these; a prefix suffices if only one has it.

    Owns: which visible device this process was assigned.
    """

    def __init__(self, mask: str | None, *, num_physical: int, names: tuple[str, ...] = ()) -> None:
        self._num_physical = num_physical
        self._names = names
        items = [item.strip() for item in (mask or "").split(",") if item.strip()]
        self._physical = [self._parse(item) for item in items] if items else [Physical(i) for i in range(num_physical)]
        if len(set(self._physical)) != len(self._physical):
            raise ConfigError(f"the device mask {mask!r} names a device twice")
        self._assigned: Visible | None = None

    @property
    def num_visible(self) -> int:
        """How many devices this process sees."""
        return len(self._physical)

    def visible_to_physical(self, device: Visible) -> Physical:
        """Raises `ConfigError` for an index that is not visible."""
        if not 0 <= device < len(self._physical):
            raise ConfigError(f"device {device} is not visible: this process sees {len(self._physical)} devices")
        return self._physical[device]

    def physical_to_visible(self, device: Physical) -> Visible:
        """Raises `ConfigError` when the mask hides the device."""
        if device not in self._physical:
            shown = ", ".join(map(str, self._physical)) or "none"
            raise ConfigError(f"physical device {device} is not visible to this process; visible are {shown}")
        return Visible(self._physical.index(device))

    def logical_to_visible(self, rank: Logical, *, first: Visible = Visible(0)) -> Visible:
        """The device of a rank on this node, when ranks take devices in order from `first`."""
        device = Visible(first + rank)
        self.visible_to_physical(device)
        return device

    def assign(self, device: Visible) -> None:
        """Say which device this process uses: once. The same again is fine; another raises `ConfigError`."""
        self.visible_to_physical(device)
        if self._assigned is not None and self._assigned != device:
            raise ConfigError(f"this process uses device {self._assigned} already and cannot change to {device}")
        self._assigned = device

    @property
    def assigned(self) -> Visible | None:
        """The device of this process, once it is set."""
        return self._assigned

    def _parse(self, item: str) -> Physical:
        if item.isdigit():
            if int(item) >= self._num_physical:
                raise ConfigError(f"the device mask names device {item}, but there are {self._num_physical}")
            return Physical(int(item))
        found = [i for i, name in enumerate(self._names) if name.startswith(item)]
        if len(found) != 1:
            raise ConfigError(
                f"the device mask names {item!r}, which is {'no' if not found else 'more than one'} device"
            )
        return Physical(found[0])
