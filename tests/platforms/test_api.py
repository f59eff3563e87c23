"""Finding a platform by name, and what it hands through to torch (PLG-6)."""

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.config.facts import DeviceFacts
from octavo.platforms.api import Platform, RunSettings, find_platform, platforms, probe
from octavo.platforms.cpu import CpuPlatform
from octavo.platforms.cuda import CudaPlatform
from octavo.plugins.registry import Registry


def test_cpu_is_always_there() -> None:
    assert probe("cpu").kind == "cpu"
    assert find_platform("cpu").dispatch_key == "CPU"


def test_an_unknown_device_lists_close_names() -> None:
    with pytest.raises(ConfigError, match=r"cudda.*did you mean 'cuda'"):
        probe("cudda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_here_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"'cuda' was asked for.*use --device cpu"):
        probe("cuda")


def test_auto_takes_the_first_that_is_available() -> None:
    class Absent(CpuPlatform):
        def available(self) -> bool:
            return False

    registry: Registry[type[Platform]] = Registry("device")
    registry.register("absent", Absent)
    registry.register("cpu", CpuPlatform)
    assert type(find_platform("auto", registry)) is CpuPlatform


def test_cuda_is_preferred_to_cpu() -> None:
    assert platforms().names() == ("cuda", "cpu")


def test_unknown_attributes_fall_through_to_torch_but_not_dunder_names() -> None:
    cpu = CpuPlatform()
    assert cpu.is_available() is torch.cpu.is_available()
    assert CudaPlatform().device_count == torch.cuda.device_count
    with pytest.raises(AttributeError):
        cpu.__wrapped__  # noqa: B018
    with pytest.raises(AttributeError, match=r"neither the platform nor torch.cpu has 'no_such_thing'"):
        cpu.no_such_thing  # noqa: B018


def test_settings_pass_unchanged_on_cpu() -> None:
    settings = RunSettings(block_size=32, graph_mode="off")
    assert CpuPlatform().adjusted(settings) == settings


def test_cuda_facts_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor = "A GPU", 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70, 80))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    facts = CudaPlatform().facts()
    assert isinstance(facts, DeviceFacts)
    assert (facts.kind, facts.name, facts.memory_total_bytes, facts.memory_available_bytes) == ("cuda", "A GPU", 80, 70)
    assert facts.capability == ("cuda", "sm_90")
    assert facts.count == 2
