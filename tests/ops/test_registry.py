"""Which implementation serves, and what is refused (QNT-20, QNT-21)."""

import sys

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.config.facts import DeviceFacts
from octavo.ops import reference
from octavo.ops.registry import OP_NAMES, Implementation, OpRegistry


def device(kind="cpu", *capability):
    return DeviceFacts(
        kind=kind, name="x", memory_total_bytes=1, memory_available_bytes=1, num_cores=1, capability=capability
    )


def fast_norm(x, weight, eps):
    return x


def test_every_operator_has_a_reference_and_it_serves_any_device():
    ops, choices = OpRegistry().bind_explained(device("tpu"), torch.float64)
    assert [c.op for c in choices] == list(OP_NAMES)
    for name in OP_NAMES:
        assert getattr(ops, name) is getattr(reference, name), "the caller holds the function itself"


def test_the_last_registered_that_can_serve_is_chosen():
    registry = OpRegistry(())
    registry.register("rms_norm", Implementation(name="fast", function=fast_norm, devices=("cpu",)))
    assert registry.bind(device(), torch.float32).rms_norm is fast_norm
    assert registry.bind(device("cuda"), torch.float32).rms_norm is reference.rms_norm
    assert OpRegistry(()).bind(device(), torch.float32).rms_norm is reference.rms_norm, "registries share nothing"


def test_reasons_are_kept_for_those_passed_over():
    registry = OpRegistry(())
    registry.register(
        "rms_norm",
        Implementation(
            name="fast", function=fast_norm, devices=("cuda",), capability=("avx2", "amx"), dtypes=(torch.bfloat16,)
        ),
    )
    registry.register("rms_norm", Implementation(name="ghost", function="a_module_not_there:f"))
    _, choices = registry.bind_explained(device("cpu", "avx2"), torch.float32)
    (choice,) = [c for c in choices if c.op == "rms_norm"]
    assert choice.implementation == "reference"
    assert choice.passed_over["fast"] == ("runs on cuda, not on cpu", "needs amx", "has no float32")
    assert "could not be loaded" in choice.passed_over["ghost"][0]


def test_nothing_is_imported_until_it_is_chosen():
    registry = OpRegistry(())
    registry.register("rms_norm", Implementation(name="x", function="this_module:f", devices=("cuda",)))
    registry.bind(device(), torch.float32)
    assert "this_module" not in sys.modules


def test_one_can_be_forced_by_name():
    registry = OpRegistry(())
    registry.register("rms_norm", Implementation(name="fast", function=fast_norm, devices=("cuda",)))
    assert registry.bind(device("cuda"), torch.float32, forced={"rms_norm": "reference"}).rms_norm is reference.rms_norm
    with pytest.raises(ConfigError, match="no implementation of operator 'rms_norm' can serve: fast: runs on cuda"):
        registry.bind(device(), torch.float32, forced={"rms_norm": "fast"})
    with pytest.raises(ConfigError, match="no implementation of rms_norm named 'fats'; did you mean 'fast'"):
        registry.bind(device(), torch.float32, forced={"rms_norm": "fats"})
    with pytest.raises(ConfigError, match="no operator named 'rmsnorm'; did you mean"):
        registry.bind(device(), torch.float32, forced={"rmsnorm": "fast"})


def test_a_replacement_keeps_its_name_and_place():
    registry = OpRegistry(())
    registry.register("rms_norm", Implementation(name="fast", function=fast_norm))
    registry.register("rms_norm", Implementation(name="fast", function=reference.rms_norm))
    assert [i.name for i in registry.implementations("rms_norm")] == ["fast", "reference"]
    with pytest.raises(ConfigError, match="reference of operator 'rms_norm' cannot be replaced"):
        registry.register("rms_norm", Implementation(name="reference", function=fast_norm))


def test_other_parameters_are_refused_at_registration_and_when_loaded():
    """QNT-21."""

    def other_names(x, w, eps):
        return x

    def too_few(x, weight):
        return x

    registry = OpRegistry(())
    for function in (other_names, too_few):
        with pytest.raises(ConfigError, match=r"cannot serve operator 'rms_norm'.*must be \(x, weight, eps\)"):
            registry.register("rms_norm", Implementation(name="bad", function=function))
    registry.register("rms_norm", Implementation(name="bad", function="octavo.ops.reference:silu_mul"))
    with pytest.raises(ConfigError, match=r"its parameters are \(x\) and must be"):
        registry.bind(device(), torch.float32)
    with pytest.raises(ConfigError, match="no operator named 'rms'"):
        registry.register("rms", Implementation(name="x", function=fast_norm))


def test_built_in_versions_are_known_from_the_start():
    fast, faster = (Implementation(name=n, function=fast_norm) for n in ("fast", "faster"))
    registry = OpRegistry([("rms_norm", fast), ("rms_norm", faster)])
    assert [i.name for i in registry.implementations("rms_norm")] == ["faster", "fast", "reference"]


def test_the_native_versions_serve_floats_on_a_cpu_and_nothing_else():
    pytest.importorskip("octavo.ops.native")
    for dtype, kind, wanted in (
        (torch.float32, "cpu", "native"),
        (torch.bfloat16, "cpu", "native"),
        (torch.float16, "cpu", "reference"),
        (torch.float32, "cuda", "reference"),
    ):
        _, choices = OpRegistry().bind_explained(device(kind), dtype)
        assert {c.implementation for c in choices if c.op == "rms_norm"} == {wanted}
