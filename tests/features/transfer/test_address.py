"""Tiers by address, and what is said of a wrong one."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from octavo import LLM
from octavo.base.errors import ConfigError
from octavo.base.kvspec import FullAttentionSpec, KVGroup, KVLayout, LayerPlace
from octavo.config.facts import DeviceFacts
from octavo.engine.startup import _device_beside, _profile_beside
from octavo.executor.api import ProfileReport
from octavo.features.transfer.address import DEFAULT_HOST_BYTES, host_bytes, parse_tiers
from octavo.features.transfer.data.agent import TransferAgent
from octavo.features.transfer.data.peer_server import PeerListener
from octavo.features.transfer.options import TransferOptions
from octavo.plugins import features
from tests.support import checkpoints


def test_the_host_comes_first_and_others_keep_their_order():
    tiers = parse_tiers(("file:///a?size=2GiB", "host?size=8GiB&policy=arc", "file:///b%20c"))
    assert [(t.kind, t.place, t.size, t.policy) for t in tiers] == [
        ("host", "", 8 << 30, "arc"),
        ("file", "/a", 2 << 30, "chunk"),
        ("file", "/b c", None, "chunk"),
    ]


def test_a_bucket_has_a_place_an_endpoint_and_a_region():
    one = parse_tiers(("s3://bucket/a/b?endpoint=http://127.0.0.1:9000&region=eu-west-1&policy=request",))[1]
    assert (one.kind, one.place, one.name) == ("s3", "bucket/a/b", "s3://bucket/a/b")
    assert (one.endpoint, one.region, one.policy) == ("http://127.0.0.1:9000", "eu-west-1", "request")
    assert [t.policy for t in parse_tiers(("host", "file:///a", "s3://bucket"))] == ["lru", "chunk", "chunk"]


def test_limits_of_a_tier_are_options_of_its_address():
    """F34, TIR-17."""
    one = parse_tiers(("file:///a?timeout=2.5&thin_below=5MiB&full_above=7MiB",))[1]
    assert (one.timeout_s, one.thin_below, one.full_above) == (2.5, 5 << 20, 7 << 20)
    one = parse_tiers(("redis://a/0?thin_below=100MiB",))[1]
    assert (one.timeout_s, one.full_above) == (10.0, 200 << 20)
    assert parse_tiers(("peer://a:1?timeout=1",))[1].timeout_s == 1.0


def test_a_tier_is_local_or_remote():
    """TIR-10."""
    host, file, redis, peer = parse_tiers(("file:///a", "redis://b/0", "peer://c:1"))
    assert host.names == {"host"} and file.names == {"file:///a", "file", "local"}
    assert redis.names == {"redis://b/0", "redis", "remote"} and "remote" in peer.names


def test_there_is_a_host_tier_also_when_none_is_given():
    assert [(t.kind, t.size) for t in parse_tiers(("file:///a",))] == [("host", DEFAULT_HOST_BYTES), ("file", None)]
    assert parse_tiers(("host",))[0].size == DEFAULT_HOST_BYTES


def test_what_each_tier_holds_is_said_at_the_start():
    with LLM(
        str(checkpoints.tiny_llama()),
        num_kv_blocks=8,
        num_threads=1,
        kv_tier=("host?size=1MiB", "redis://127.0.0.1:1/0"),
    ) as llm:
        notes = [note for note in llm._frontend.report.notes if note.startswith("KV tier")]
    assert (
        notes[0].startswith("KV tier host: 1.0 MiB, about ")
        and notes[1] == "KV tier redis://127.0.0.1:1/0: no limit of ours"
    )


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (
            ("tape:///x",),
            "--kv-tier tape:///x: there is no tier 'tape'; there are file, host, mooncake, peer, redis, s3",
        ),
        (("host?sise=1GiB",), "host has no option 'sise'; it has blocks, policy, size"),
        (("host?size=big",), "host[?]size=big: size must be a size such as 2GiB"),
        (("host?size=0",), "the size must be above 0"),
        (("host?size=1GiB&size=2GiB",), "an option is given twice"),
        (("file://relative/path",), "give the folder as file:///absolute/path"),
        (("host", "host?size=2GiB"), "there is one host tier"),
        (("file:///a", "file:///a"), "a tier is given twice"),
        (
            ("file:///a?policy=all",),
            "the policy is chunk, for what was newly computed, or request, for all of a request; got 'all'",
        ),
        (("peer://a:1?policy=request",), "peer has no option 'policy'; it has timeout"),
        (("host?blocks=0",), "blocks of a chunk are 1 to 64, got '0'"),
        (("host?blocks=2.5",), "blocks of a chunk are 1 to 64, got '2.5'"),
        (("file:///a?blocks=2",), "file has no option 'blocks'"),
        (("file:///a?timeout=soon",), "the timeout is seconds, above 0 and at most 3600, got 'soon'"),
        (("file:///a?timeout=0",), "the timeout is seconds, above 0 and at most 3600, got '0'"),
        (("file:///a?timeout=nan",), "the timeout is seconds, above 0 and at most 3600, got 'nan'"),
        (("file:///a?thin_below=0",), "thin_below is bytes a second, above 0 and not above full_above; got 0 and 0"),
        (("file:///a?thin_below=2KiB&full_above=1KiB",), "not above full_above; got 2048 and 1024"),
        (("file:///a?full_above=much",), "full_above must be a size such as"),
        (("s3:///prefix",), "give the bucket as s3://bucket/prefix"),
        (("s3://bucket?endpoint=here:9000",), "the endpoint is a URL such as http://10.0.0.2:9000, got 'here:9000'"),
        (("http://[",), "'http://.' is no URL"),  # F58, and the next two
        (("redis://host:99999/0",), "'redis://host:99999/0' is no URL .Port out of range"),
        (("s3://bucket?endpoint=http://[",), "'http://.' is no URL"),
    ],
)
def test_what_is_wrong_is_said_with_the_address(texts, error):
    with pytest.raises(ConfigError, match=error):
        parse_tiers(texts)


LAYOUT = KVLayout(
    groups=(KVGroup(index=0, spec=FullAttentionSpec(block_size=64, num_kv_heads=3, head_dim=64, dtype="bfloat16"), layers=(0,)),),
    places=(LayerPlace(layer=0, group=0, offset=0, block_stride=49152),),
    num_blocks=8,
    block_bytes=49152,
    total_bytes=8 * 49152,
)  # fmt: skip


def test_a_host_tier_is_refused_that_this_machine_cannot_hold():
    """F57: 500 GiB on 23 GiB started."""
    with pytest.raises(ConfigError) as caught:
        LLM(str(checkpoints.tiny_llama()), num_threads=1, kv_tier=("host?size=500GiB",))
    assert re.search(
        r"--kv-tier host\?size=500GiB: 500\.00 GiB is more than the [\d.]+ [GM]iB that are avail", str(caught.value)
    )
    with pytest.raises(ConfigError, match=r"needs room beside it; give the host tier less, such as host\?size=11GiB"):
        host_bytes(("host?size=23GiB",), 23 << 30)
    with pytest.raises(
        ConfigError, match=r"the host tier of --kv-tier file:///a: 1\.00 GiB is more than the 600\.0 MiB"
    ):
        host_bytes(("file:///a",), 600 << 20)
    assert host_bytes(("host?size=22GiB", "file:///a?size=9TiB"), 23 << 30) == 22 << 30


def test_the_cache_s_memory_is_what_the_host_tier_leaves():
    """F57: a fifth of the memory, and of what is left after loading, is counted beside the tier."""
    asked = features.active({"transfer": TransferOptions(kv_tier=("host?size=6GiB",))})
    device = DeviceFacts(
        kind="cpu", name="x", memory_total_bytes=16 << 30, memory_available_bytes=11 << 30, num_cores=2
    )
    profile = ProfileReport(peak_activation_bytes=0, available_bytes=10 << 30, seconds=1.0)
    assert _device_beside(asked, device).memory_available_bytes == 5 << 30
    assert _profile_beside(asked, profile).available_bytes == 4 << 30
    assert _profile_beside((), profile) == profile
    with pytest.raises(ConfigError, match=r"6\.00 GiB is more than the 5\.00 GiB that are available"):
        _profile_beside(asked, replace(profile, available_bytes=5 << 30))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host?size=1KiB", "one block of KV takes 48.0 KiB there, more than the tier's 1.0 KiB; give it more"),
        ("file:///f?size=1KiB", "one block of KV takes 48.1 KiB there, more than the tier's 1.0 KiB; give it more"),
    ],
)
def test_a_tier_that_cannot_hold_one_block_is_refused(text, said, tmp_path):
    """F57: "0 tokens"."""
    text = text.replace("/f?", f"{tmp_path}/f?")
    agent = TransferAgent((text,), {"a": "b"}, PeerListener(None))
    with pytest.raises(ConfigError) as caught:
        agent.bind(SimpleNamespace(layout=LAYOUT, buffer=torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8)))
    assert str(caught.value) == f"--kv-tier {text}: {said}"
    agent.close()
