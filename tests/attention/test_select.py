"""Which backend serves, and what is said when none does."""

import pytest
import torch

from octavo.attention.api import AttentionKind, Capabilities
from octavo.attention.sdpa import SdpaBackend
from octavo.attention.select import backends, choose, choose_block_size
from octavo.base.errors import ConfigError
from octavo.config.facts import DeviceFacts
from octavo.plugins.registry import Registry
from tests.attention.plain import CPU_FACTS, need_of


class Picky(SdpaBackend):
    name = "picky"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16}),
        head_dims=frozenset({64, 128}),
        block_sizes=frozenset({16, 32}),
        preferred_block_size=48,
    )


class Eager(SdpaBackend):
    name = "eager"
    capabilities = Capabilities(block_multiple=16, preferred_block_size=64)


def registry(*classes):
    made = Registry("attention backend")
    for cls in classes:
        made.register(cls.name, cls)
    return made


def change(need, **changes):
    from dataclasses import replace

    return replace(need, **changes)


def test_the_first_without_objection_is_chosen():
    assert choose(need_of(4, 2, 16), None, CPU_FACTS, registry(Picky, Eager, SdpaBackend)).name == "eager"
    assert (
        choose(need_of(4, 2, 16, window=8), None, CPU_FACTS, registry(Picky, Eager, SdpaBackend)).name == "torch_sdpa"
    )


def test_a_model_gets_one_backend_that_suits_all_its_layers():
    needs = [need_of(4, 2, 16), need_of(4, 2, 16, window=8)]
    assert choose(needs, None, CPU_FACTS, registry(Eager, SdpaBackend)).name == "torch_sdpa"


def test_none_fits_shows_every_candidate_with_every_reason():
    """ATT-1."""
    need = change(need_of(4, 2, 20), softcap=30.0, sinks=True, block_size=24)
    with pytest.raises(ConfigError) as raised:
        choose(need, None, CPU_FACTS, registry(Picky, SdpaBackend))
    message = str(raised.value)
    for part in (
        "picky: runs on cuda, not on cpu",
        "does not compute in torch.float32",
        "head size 20 is not one of 64, 128",
        "block size 24 is not one of 16, 32",
        "has no softcap",
        "torch_sdpa: has no sinks, has no softcap",
    ):
        assert part in message


def test_a_forced_backend_is_used_or_refused_but_never_replaced():
    assert choose(need_of(4, 2, 16), "torch_sdpa", CPU_FACTS).name == "torch_sdpa"
    with pytest.raises(ConfigError, match="'picky' cannot serve this model: runs on cuda"):
        choose(need_of(4, 2, 16), "picky", CPU_FACTS, registry(Picky, SdpaBackend))
    with pytest.raises(ConfigError, match="did you mean 'torch_sdpa'"):
        choose(need_of(4, 2, 16), "torch-sdpa", CPU_FACTS)


def test_a_backend_that_cannot_be_imported_is_one_more_reason():
    made = Registry("attention backend", {"ghost": "a_module_not_there:X"})
    made.register("torch_sdpa", SdpaBackend)
    assert choose(need_of(4, 2, 16), None, CPU_FACTS, made).name == "torch_sdpa"
    with pytest.raises(ConfigError, match=r"ghost: .*could not be loaded"):
        choose(need_of(4, 2, 16), None, CPU_FACTS, Registry("attention backend", {"ghost": "a_module_not_there:X"}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": AttentionKind.ENCODER}, "has no encoder attention"),
        ({"causal": False}, "has no non-causal attention"),
        ({"alibi": True}, "has no ALiBi"),
        ({"latent": True}, "has no latent attention"),
        ({"media_prefix": True}, "has no media prefix"),
        ({"capture": True}, "has no graph capture"),
        ({"kv_dtype": torch.float8_e4m3fn}, "does not keep torch.float8_e4m3fn KV for torch.float32"),
        ({"num_heads": 5}, "5 query heads do not divide over 2 key/value heads"),
    ],
)
def test_every_feature_is_checked(changes, reason):
    """ATT-1."""
    assert SdpaBackend().objections(change(need_of(4, 2, 16), **changes), CPU_FACTS) == (reason,)


def test_the_reference_runs_on_any_device_and_head_size():
    gpu = DeviceFacts(kind="cuda", name="x", memory_total_bytes=1, memory_available_bytes=1, num_cores=1)
    assert SdpaBackend().objections(need_of(7, 7, 13, torch.bfloat16, 5), gpu) == ()


def test_block_size_is_the_users_or_suits_all_backends():
    """ATT-3."""
    assert choose_block_size([SdpaBackend()], None) == 64
    assert choose_block_size([Eager(), SdpaBackend()], None) == 64
    assert choose_block_size([SdpaBackend()], 16) == 16
    with pytest.raises(
        ConfigError, match="block size 24 does not suit attention backend 'eager': it must be a multiple of 16"
    ):
        choose_block_size([Eager()], 24)
    with pytest.raises(ConfigError, match="must be one of 16, 32"):
        choose_block_size([Picky(), Eager()], None)  # 192
    with pytest.raises(ConfigError, match="block size 0"):
        choose_block_size([SdpaBackend()], 0)


def test_selection_can_add_installed_backends_by_name():
    assert "torch_sdpa" in backends(plugins=None)
    float16 = need_of(4, 2, 16, torch.float16)
    assert isinstance(choose(float16, None, CPU_FACTS, backends(plugins=None)), SdpaBackend)


def test_the_native_backend_comes_first_on_a_cpu():
    pytest.importorskip("octavo.ops.native", exc_type=ImportError)
    assert choose(need_of(4, 2, 16), None, CPU_FACTS).name == "cpu"
    assert choose(need_of(4, 2, 20), None, CPU_FACTS).name == "torch_sdpa"
