"""Options of what moves KV: refused by their flag where they cannot be (F57), and joined to the engine by name."""

import pytest

from octavo.base.errors import ConfigError
from octavo.config.schema import EngineConfig
from octavo.features.transfer.feature import FEATURE
from octavo.features.transfer.options import TransferOptions
from octavo.plugins import features


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_role": "producer", "kv_lease_s": 0.0}, "--kv-lease-s must be above 0"),
        ({"kv_role": "producer", "kv_lease_s": float("nan")}, "--kv-lease-s must be above 0"),
        ({"kv_role": "producer", "kv_lease_s": 1e6}, "--kv-lease-s must be above 0 and at most 86400"),
        ({"kv_role": "both"}, "--kv-role both: consumers must reach this engine; give --kv-listen"),
        ({"kv_allow": ("10.0.0.1",)}, "--kv-allow is for a hand-over of prompts; give --kv-role"),
        ({"kv_by_layer": True}, "--kv-by-layer is for a hand-over of prompts; give --kv-role"),
        ({"kv_transport": "nixl", "kv_tier": ("host",)}, "--kv-transport is for a hand-over"),
    ],
)
def test_impossible_settings_name_the_flag(given, words):
    with pytest.raises(ConfigError, match=words):
        features.check(EngineConfig(features={"transfer": TransferOptions(**given)}))


@pytest.mark.parametrize(
    ("role", "transport", "tiers"),
    [
        (None, "tcp", ("host",)),
        ("producer", "tcp", ()),
        ("both", "nixl", ()),
        ("consumer", "tcp", ("host",)),
        ("producer", "file:///shared", ("host",)),
    ],
)
def test_who_listens_has_something_to_give(role, transport, tiers):
    assert TransferOptions(kv_listen="127.0.0.1:7100", kv_role=role, kv_transport=transport).tiers == tiers


def test_only_what_is_asked_for_is_active_and_options_survive_a_message():
    assert features.active({}) == ()
    assert features.active({"transfer": TransferOptions(kv_load_failure="fail")}) == ()
    (found,) = features.active({"transfer": {"kv_tier": ["host"], "kv_lease_s": 4}})  # as another process gets them
    assert found.feature is FEATURE and found.options == TransferOptions(kv_tier=("host",), kv_lease_s=4.0)
