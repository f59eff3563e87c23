"""What requests may say of their KV is understood or refused by name (F56)."""

from typing import Any

import pytest

from octavo.base.errors import ClientError
from octavo.features.transfer.disagg import Hint
from octavo.features.transfer.wishes import check_params, tier_wishes

TIERS = ("host?size=1MiB", "file:///tmp/octavo-kv?size=2MiB")
HINT = Hint(address="tcp://127.0.0.1:7100", lease="a-0", num_tokens=5, lease_s=30.0).as_params()


@pytest.mark.parametrize(
    ("params", "server", "name", "words"),
    [
        ({"tiers": ["nope"]}, {"tiers": TIERS}, "tiers", "no tier 'nope' here; there are file, file:///tmp/octavo-kv, host"),
        ({"tiers": ["nope"]}, {"role": "both"}, "tiers", "no tiers; start it with --kv-tier"),
        ({"tier_policy": "chunk"}, {"role": "both"}, "tier_policy", "no tiers"),
        ({"tiers": "file"}, {"tiers": TIERS}, "tiers", "must be a list of tiers"),
        ({"tiers": [1]}, {"tiers": TIERS}, "tiers", "must be a list of tiers"),
        ({"tier_policy": "all"}, {"tiers": TIERS}, "tier_policy", "must be chunk or request"),
        ({"tier": ["file"]}, {"tiers": TIERS}, "tier", "no such parameter; there are do_remote_decode"),
        ({"remote_engine_id": "x"}, {"role": "both"}, "remote_engine_id", "no such parameter"),
        ({**HINT, "speed": 1}, {"role": "both"}, "speed", "no such parameter"),
        ({"lease": "a-0"}, {"role": "both"}, "lease", "goes with do_remote_prefill"),
        ({"do_remote_decode": 1}, {"role": "both"}, "do_remote_decode", "true or false"),
        ({"do_remote_prefill": "yes"}, {"role": "both"}, "do_remote_prefill", "true or false"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(params: Any, server: Any, name: str, words: str) -> None:
    """F56: with and without tiers."""
    with pytest.raises(ClientError, match=words) as caught:
        check_params(params, **{"role": None, **server})
    assert caught.value.param == f"kv_transfer_params.{name}" and caught.value.status == 400


def test_what_can_be_done_is_taken() -> None:
    check_params({"tiers": ["file", "host"], "tier_policy": "request"}, role=None, tiers=TIERS)
    check_params({"tiers": []}, role=None, tiers=TIERS)
    check_params(HINT, role="both")
    check_params({"do_remote_decode": False, "do_remote_prefill": False}, role=None, tiers=TIERS)
    check_params({"mine": 5}, role=None, has_connector=True)
    assert tier_wishes({"tiers": ["file"]}, {"file", "host"}) == (("file",), False)
    assert tier_wishes({"tier_policy": "request"}, {"host"}) == (None, True)
