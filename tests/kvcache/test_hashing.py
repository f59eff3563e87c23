"""Block hashes: fixed for everybody, chained, and never shared across salts or adapters."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.base.params import SamplingParams
from octavo.base.requests import AdapterRef, EngineRequest
from octavo.kvcache.hashing import BlockHash, HashChain, MediaSpan, extra_keys, group_key, make_hasher

HASHER = make_hasher("sha256")


def request(salt: str | None = None, adapter: AdapterRef | None = None) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_token_ids=(), sampling=SamplingParams(), cache_salt=salt, adapter=adapter
    )


def chain(
    tokens: list[int], req: EngineRequest | None = None, *, size: int = 4, media: tuple[MediaSpan, ...] = ()
) -> list[str]:
    hashes = HashChain(HASHER, size, req or request(), media)
    hashes.extend(tokens)
    return [h.hex() for h in hashes.hashes]


# Other languages must agree with these: they follow from the formula in the module's docstring.
VECTORS = {
    "plain": (
        lambda: chain([1, 2, 3, 4, 5, 6, 7, 8]),
        [
            "d8faa8ec8c0500567ca87b56e4bb666d69cb512e638103891defea24e88cbc92",
            "d1637bc3762f67abb1ac6b35e87c7ddaee8d04b0c3879d2d3afb2f6dc3f6a56a",
        ],
    ),
    "large ids": (
        lambda: chain([0, 151_643, 2**32 - 1, 65_536]),
        ["a2276762b084ffafaac546813532894cf0196b6a6d18681924419cd7b1f60dd6"],
    ),
    "salt": (
        lambda: chain([1, 2, 3, 4, 5, 6, 7, 8], request(salt="tenant-ä")),
        [
            "35d0f65f4525115a58b9a706ea2d37b0d56ba9fabf826705203b35dadf7dea22",
            "0f99d71f171c18725ee4cb5d9ff27d5ca247da9ab05adde7f97024dd04832beb",
        ],
    ),
    "adapter": (
        lambda: chain([1, 2, 3, 4], request(adapter=AdapterRef(name="sql", path="/x", digest="ab12"))),
        ["d8cb2bb124d1e7ebba2ec31b8de58fc11880c7e60280ef9df8b959cb5a881364"],
    ),
    "media": (
        lambda: chain([1, 2, 3, 4, 5, 6, 7, 8], media=(MediaSpan("img", 2, 4),)),
        [
            "a07a6dcffddfb0e0483f8399b4db3555ac1827599aa3add9306abba318cbfc8a",
            "af9c61a7122bbfcde279f3f6b852ad0b34077eb966d80e18426941e02e88cbfc",
        ],
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_REU_3_fixed_vectors(name: str) -> None:
    made, expected = VECTORS[name]
    assert made() == expected


def test_REU_3_the_formula_written_out_by_hand() -> None:
    parent = bytes(32)
    first = hashlib.sha256(parent + struct.pack("<4I", 9, 8, 7, 6) + struct.pack("<I", 6) + b"salt:z").digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 4, 3, 2)).digest()
    assert chain([9, 8, 7, 6, 5, 4, 3, 2, 1], request(salt="z")) == [first.hex(), second.hex()]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 7), st.data())
def test_REU_4_extending_gives_what_hashing_at_once_gives(tokens: list[int], size: int, data: st.DataObject) -> None:
    grown = HashChain(HASHER, size, request(salt="s"))
    at = 0
    while at < len(tokens):
        at += data.draw(st.integers(1, 9))
        grown.extend(tokens[:at])
    assert len(grown.hashes) == len(tokens) // size
    assert [h.hex() for h in grown.hashes] == chain(tokens, request(salt="s"), size=size)


def test_REU_1_the_group_is_four_big_endian_bytes_after_the_hash() -> None:
    assert group_key(BlockHash(b"\xaa\xbb"), 258) == b"\xaa\xbb\x00\x00\x01\x02"


def test_REU_2_keys_come_in_order_and_the_salt_only_first() -> None:
    req = request(salt="s", adapter=AdapterRef(name="a", path="p", digest="d"))
    media = (MediaSpan("one", 3, 3), MediaSpan("two", 7, 9))
    first = extra_keys(req, 0, block_size=4, media=media, embeddings_digest=b"e")
    assert first == (b"adapter:1:a:d", b"media:3:one", b"salt:s", b"embeddings:e")
    second = extra_keys(req, 1, block_size=4, media=media)
    assert second == (b"adapter:1:a:d", b"media:-1:one", b"media:3:two")
    assert extra_keys(req, 9, block_size=4, media=media) == (b"adapter:1:a:d",)


def test_REU_5_no_two_kinds_of_request_share_a_hash() -> None:
    tokens = list(range(8))
    chains = [
        chain(tokens),
        chain(tokens, request(salt="x")),
        chain(tokens, request(salt="")),
        chain(tokens, request(adapter=AdapterRef(name="x", path="p"))),
        chain(tokens, request(adapter=AdapterRef(name="x", path="p", digest="1"))),
        chain(tokens, request(adapter=AdapterRef(name="x:1", path="p"))),
        chain(tokens, request(salt="x", adapter=AdapterRef(name="x", path="p"))),
        chain(tokens, media=(MediaSpan("x", 0, 2),)),
        chain(tokens, media=(MediaSpan("x", 1, 2),)),
    ]
    everything = [h for hashes in chains for h in hashes]
    assert len(set(everything)) == len(everything)


def test_an_adapters_path_does_not_matter_its_content_does() -> None:
    one = chain([1, 2, 3, 4], request(adapter=AdapterRef(name="x", path="/a", digest="1")))
    assert one == chain([1, 2, 3, 4], request(adapter=AdapterRef(name="x", path="/b", digest="1")))


def test_sha256_is_shared_and_a_seed_sets_it_apart() -> None:
    assert HASHER.shareable
    assert HASHER.first_parent() == bytes(32)
    seeded = make_hasher("sha256", b"seed")
    assert seeded.first_parent() == make_hasher("sha256", b"seed").first_parent() != HASHER.first_parent()


def test_REU_3_xxhash_starts_at_random_and_is_not_shared() -> None:
    pytest.importorskip("xxhash")
    one, other = make_hasher("xxhash"), make_hasher("xxhash")
    assert not one.shareable
    assert one.first_parent() != other.first_parent()
    seeded = [make_hasher("xxhash", b"seed") for _ in range(2)]
    made = {h.block(h.first_parent(), [1, 2, 3], (b"k",)) for h in seeded}
    assert len(made) == 1
    assert len(made.pop()) == 16


def test_an_unknown_hash_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="'md5' is unknown"):
        make_hasher("md5")
