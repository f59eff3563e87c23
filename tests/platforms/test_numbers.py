"""Device numbers do not change their space silently (PLG-7)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.platforms.numbers import DeviceNumbers, Logical, Physical, Visible


@pytest.mark.parametrize("mask", [None, "", " "])
def test_an_empty_mask_means_not_set(mask: str | None) -> None:
    numbers = DeviceNumbers(mask, num_physical=4)
    assert numbers.num_visible == 4
    assert numbers.visible_to_physical(Visible(3)) == 3


def test_a_mask_reorders_and_hides() -> None:
    numbers = DeviceNumbers("2,0", num_physical=4)
    assert numbers.visible_to_physical(Visible(0)) == 2
    assert numbers.physical_to_visible(Physical(0)) == 1
    assert numbers.logical_to_visible(Logical(1)) == 1
    with pytest.raises(ConfigError, match="physical device 1 is not visible"):
        numbers.physical_to_visible(Physical(1))
    with pytest.raises(ConfigError, match="device 2 is not visible: this process sees 2"):
        numbers.visible_to_physical(Visible(2))
    with pytest.raises(ConfigError, match="device 2 is not visible"):
        numbers.logical_to_visible(Logical(1), first=Visible(1))


@given(st.permutations(range(6)), st.integers(1, 6))
def test_the_conversions_are_inverse(order: list[int], count: int) -> None:
    numbers = DeviceNumbers(",".join(map(str, order[:count])), num_physical=6)
    for visible in range(count):
        assert numbers.physical_to_visible(numbers.visible_to_physical(Visible(visible))) == visible


def test_masks_may_use_unique_names() -> None:
    numbers = DeviceNumbers("GPU-b", num_physical=2, names=("GPU-a1", "GPU-b2"))
    assert numbers.visible_to_physical(Visible(0)) == 1
    with pytest.raises(ConfigError, match="'GPU', which is more than one"):
        DeviceNumbers("GPU", num_physical=2, names=("GPU-a1", "GPU-b2"))
    with pytest.raises(ConfigError, match="'MIG-x', which is no device"):
        DeviceNumbers("MIG-x", num_physical=2, names=("GPU-a1", "GPU-b2"))


@pytest.mark.parametrize(("mask", "why"), [("4", "names device 4, but there are 4"), ("1,1", "twice")])
def test_masks_that_cannot_be_are_refused(mask: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        DeviceNumbers(mask, num_physical=4)


def test_a_process_is_assigned_once() -> None:
    numbers = DeviceNumbers(None, num_physical=2)
    assert numbers.assigned is None
    numbers.assign(Visible(1))
    numbers.assign(Visible(1))
    assert numbers.assigned == 1
    with pytest.raises(ConfigError, match="uses device 1 already"):
        numbers.assign(Visible(0))
    with pytest.raises(ConfigError, match="not visible"):
        numbers.assign(Visible(7))
