"""Chunks in a bucket of S3, or of a server that speaks like it, shared by engines on any machine (TIR-31).

Promises: a server that is slow, gone or answers nonsense makes misses, each call as a whole within `STALL_S` and what its
bytes take at `LEAST_BYTES_PER_S`, and is then left alone for a while; what it gives is used only when its seal fits.
Does not know: what a chunk holds. How much the bucket keeps, and for how long, is the bucket's matter (its life cycle
rules). Credentials come the client's usual way: environment, files, the machine's role.

A chunk is one object, `<prefix>/<fingerprint>/<2 digits>/<key>.kv`: the digits spread keys over the store's partitions.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final, TypeVar

from octavo.base.errors import ConfigError
from octavo.base.packages import install_command
from octavo.features.transfer.address import TierAddress
from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.data.call_pool import CallPool
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.timed import seconds_for
from octavo.ops import spare

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
except ImportError:  # an extra
    boto3 = None

T = TypeVar("T")
CONNECT_S: Final = 1.0
READ_S: Final = 2.0  # for the server to send anything at all
STALL_S: Final = 4.0
SIDE_BY_SIDE: Final = 8  # calls at a time: a store answers late and gives fast
MANY: Final = 64  # keys for which a page of the bucket's list, 1,000 names, is asked for first
REGION: Final = "us-east-1"  # the client wants one; servers other than Amazon's do not care
ABSENT: Final = frozenset({"404", "NoSuchKey", "NotFound"})


class S3Tier:
    """One bucket.

    Owns: the client, the threads that call it, and when the call on this tier must be over.
    """

    def __init__(self, client: Any, bucket: str, prefix: str, seal: Seal, health: TierHealth) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix}/{seal.space}" if prefix else seal.space
        self._seal = seal
        self._health = health
        self._until = 0.0
        self._call_pool = CallPool(SIDE_BY_SIDE, "octavo-kv-s3")

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """One by one; of a long prompt's keys first those that a few pages of the list tell of."""
        self._begin()
        sizes, end = self._list(len(keys) // MANY)
        good, unknown = [False] * len(keys), []
        for number, key in enumerate(keys):
            name = self._place(key)["Key"]
            if end is None or name <= end:
                good[number] = sizes.get(name) == self._num_bytes(key)
            else:
                unknown.append(number)
        calls = (partial(self._size_is_right, keys[number]) for number in unknown)
        self._each(calls, lambda number, fine: good.__setitem__(unknown[number], fine))
        return good

    def _list(self, most_pages: int) -> tuple[dict[str, int], str | None]:
        """Sizes by name, and the name up to which they are all there are; None when that is everything."""
        sizes: dict[str, int] = {}
        pages: list[dict[str, Any]] = []
        end = ""
        for _ in range(most_pages):
            call = partial(self._client.list_objects_v2, Bucket=self._bucket, Prefix=f"{self._prefix}/", StartAfter=end)
            self._each(iter([call]), lambda _, page: pages.append(page))
            if not pages:
                break  # no answer, or none of use
            page = pages.pop()
            sizes |= {
                entry["Key"]: entry["Size"] for entry in page.get("Contents", ()) if {"Key", "Size"} <= entry.keys()
            }
            if not page.get("IsTruncated") or not sizes:
                return sizes, None
            end = max(sizes)
        return sizes, end

    def read(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        good = [False] * len(keys)
        self._begin(keys)

        def take(number: int, chunk: memoryview | None) -> None:
            if chunk is not None:  # rows are written here: a call that was given up may still be at its own memory
                rows[number].data[: len(chunk)] = chunk
                good[number] = True

        self._each((partial(self._get, key) for key in keys), take)
        return good

    def write(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        good = [False] * len(keys)
        self._begin(keys)

        def calls() -> Iterator[Callable[[], bool]]:
            for key, row in zip(keys, rows, strict=True):  # a row may hold something else once a call was given up
                body = row.data[: self._seal.length(key)]
                yield partial(self._put, key, b"".join((self._seal.head(key, body, spare.crc32), body)))

        self._each(calls(), good.__setitem__)
        return good

    def close(self) -> None:
        self._call_pool.stop()
        self._client.close()

    # ---- one chunk, on a thread of the crew ---------------------------------------------------

    def _place(self, key: bytes) -> dict[str, str]:
        name = key.hex()
        return {"Bucket": self._bucket, "Key": f"{self._prefix}/{name[:2]}/{name}.kv"}

    def _num_bytes(self, key: bytes) -> int:
        return self._seal.head_bytes(key) + self._seal.length(key)

    def _size_is_right(self, key: bytes) -> bool:
        """There is an object, and of the size that ours has."""
        answer = _or_absent(lambda: self._client.head_object(**self._place(key)))
        return answer is not None and answer.get("ContentLength") == self._num_bytes(key)

    def _get(self, key: bytes) -> memoryview | None:
        answer = _or_absent(lambda: self._client.get_object(**self._place(key)))
        if answer is None:
            return None
        with closing(answer["Body"]) as body:
            data = memoryview(body.read() if answer.get("ContentLength") == self._num_bytes(key) else b"")
        head = self._seal.head_bytes(key)
        if len(data) == self._num_bytes(key) and self._seal.opens(key, bytes(data[:head]), data[head:]):
            return data[head:]
        self._health.note("odd", "an object under a key of ours is not a chunk of ours, and is removed")
        self._client.delete_object(**self._place(key))
        return None

    def _put(self, key: bytes, data: bytes) -> bool:
        """One that is there was put by another engine, or by this one before."""
        if not self._size_is_right(key):
            self._client.put_object(Body=data, **self._place(key))
        return True

    # ---- the server ---------------------------------------------------------------------------

    def _begin(self, keys: Sequence[bytes] = ()) -> None:
        """A call on this tier begins, which moves these keys' chunks."""
        self._until = time.monotonic() + STALL_S + seconds_for(sum(self._seal.length(key) for key in keys))

    def _each(self, calls: Iterator[Callable[[], T]], take: Callable[[int, T], None]) -> None:
        if self._health.rests or not self._call_pool.is_free:
            return
        try:
            self._call_pool.each(calls, take, max(0.0, self._until - time.monotonic()))
        except (BotoCoreError, ClientError, OSError, ValueError) as error:
            self._health.failed(error)
        else:
            self._health.worked()


def _or_absent(call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """The answer, or None when it is that there is no such object."""
    try:
        return call()
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in ABSENT:
            return None
        raise


def check(address: TierAddress) -> None:
    """Raises `ConfigError` without the package, or without credentials."""
    if boto3 is None:
        raise ConfigError(f"--kv-tier {address.text} needs the package boto3: {install_command('s3', package='boto3')}")
    if boto3.session.Session().get_credentials() is None:
        raise ConfigError(
            f"--kv-tier {address.text}: no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )


def make(address: TierAddress, seal: Seal, health: TierHealth) -> S3Tier:
    """The tier of an `s3://` address, after `check`."""
    session = boto3.session.Session()
    bucket, _, prefix = address.place.partition("/")
    settings = Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        retries={"total_max_attempts": 1},
        max_pool_connections=SIDE_BY_SIDE,
        s3={"addressing_style": "path" if address.endpoint else "auto"},  # other servers have no name for each bucket
        request_checksum_calculation="when_required",  # chunks carry their own
        response_checksum_validation="when_required",
    )
    client = session.client(
        "s3",
        endpoint_url=address.endpoint,
        region_name=address.region or session.region_name or REGION,
        config=settings,
    )
    return S3Tier(client, bucket, prefix.strip("/"), seal, health)
