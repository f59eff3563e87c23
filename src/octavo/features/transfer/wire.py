"""What two engines say to each other over a socket.

Promises: a message is whole or the connection is over; nothing that comes makes this side take more memory than the
other side may ask for; two engines that would misread each other's KV find out before the first byte of it, and which
part of them differs.
Does not know: who connects, rows, or keys' meaning.

A message is a frame: 4 bytes of magic, its length (uint32, little endian), and msgpack of one of the types below, told
apart by their tag. After `ChunkSizes` come the chunks themselves, sealed (see `data.seal`), so many bytes each.

    client: Hello   ->   server: Welcome, or Refused, and the connection is over
    client: Find    ->   server: Found
    client: Fetch   ->   server: Chunks, then their bytes
    client: Take    ->   server: Chunks, then their bytes      (blocks under a lease)
    client: Beat    ->   server: Alive                         (leases that are still wanted)
    client: Return  ->   server: Alive                         (leases that are over)
    client: Reach   ->   server: Reached                       (blocks under a lease, to be read one-sidedly)
    client: Release ->   server: Alive                         (that reading has ended)
    client: Point   ->   server: Pointed                       (host memory, to be read one-sidedly)
    client: Stood   ->   server: Found                         (which of it did not change until now)

`LeaseHeartbeat` and `Return` may come twice, late or for leases that nobody knows: the answer says so and nothing else happens.
"""

import socket
import struct
from typing import Annotated, Final, TypeVar

import msgspec

VERSION: Final = 1
MAGIC: Final = b"OKV1"
FRAME: Final = struct.Struct("<4sI")
MOST_BYTES: Final = 16 << 20  # of a message
MOST_KEYS: Final = 4096  # in one message
MOST_LEASE: Final = 512  # characters of a lease's name

LeaseName = Annotated[str, msgspec.Meta(max_length=MOST_LEASE)]


class WireError(ConnectionError):
    """The other side said something that makes no sense here, or nothing at all."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Any message."""


class Hello(Message, frozen=True, kw_only=True):
    """Who connects: the version of this protocol, and all that KV depends on besides tokens, by name."""

    version: int
    identity: dict[str, str]


class Welcome(Message, frozen=True, kw_only=True):
    """The two understand each other. `now`: the server's clock, in seconds."""

    now: float = 0.0


class Refused(Message, frozen=True):
    """They do not, or a request was wrong; the connection is over."""

    reason: str


class Find(Message, frozen=True):
    """Which of these keys are there?"""

    keys: tuple[bytes, ...]


class FoundKeys(Message, frozen=True):
    """An answer for each key."""

    good: tuple[bool, ...]


class Fetch(Message, frozen=True):
    """Send these."""

    keys: tuple[bytes, ...]


class FetchBlocks(Message, frozen=True, kw_only=True):
    """Send these blocks of a lease: by group, the places of blocks in the request's table."""

    lease: LeaseName
    group: int
    places: tuple[int, ...]


class LeaseHeartbeat(Message, frozen=True):
    """These leases are still wanted."""

    leases: tuple[LeaseName, ...]


class Return(Message, frozen=True):
    """These leases are over: `done` when everything was fetched, else given up."""

    leases: tuple[LeaseName, ...]
    done: bool = True


class Alive(Message, frozen=True):
    """For each lease, whether it was still there."""

    good: tuple[bool, ...]


class Reach(Message, frozen=True):
    """I am about to read this lease's blocks myself, until `Release` or the end of the connection."""

    lease: LeaseName


class Reached(Message, frozen=True, kw_only=True):
    """Where they are: by group, the spans of a block as (address of block 0, stride, bytes), and the lease's table.

    `agent` is what the transport needs to know of this side; empty when there is no such lease.
    """

    agent: bytes
    spans: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()


class Release(Message, frozen=True):
    """I read no more. What was read counts only if the answer says that the lease stood until now."""

    lease: LeaseName


class Point(Message, frozen=True):
    """Where are these, that I may read them myself? Until `Stood`, or the end of the connection."""

    keys: tuple[bytes, ...]


class Pointed(Message, frozen=True, kw_only=True):
    """The row of each key and its turn, which changes before the row does; row -1: it is not there. A row begins `stride`
    bytes after the one before it.

    `agent` is what the transport needs to know of this side; where it is empty, `never` says why that will stay so, and
    without a reason it is to be asked for again.
    """

    agent: bytes
    start: int = 0
    stride: int = 0
    rows: tuple[tuple[int, int], ...] = ()
    never: str = ""


class Stood(Message, frozen=True):
    """I read no more. Which of these rows are in the same turn as they were?"""

    rows: tuple[tuple[int, int], ...]


class ChunkSizes(Message, frozen=True):
    """For each key or place, how many bytes of it follow; 0: it is not there."""

    sizes: tuple[int, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(
    Hello
    | Welcome
    | Refused
    | Find
    | FoundKeys
    | Fetch
    | ChunkSizes
    | FetchBlocks
    | LeaseHeartbeat
    | Return
    | Alive
    | Reach
    | Reached
    | Release
    | Point
    | Pointed
    | Stood
)
M = TypeVar("M", bound=Message)


def lease_key(lease: str, place: int, group: int) -> bytes:
    """What names a block of a lease in its seal; its last four bytes are the group, as in every key."""
    return f"{lease}:{place}".encode() + group.to_bytes(4, "big")


def send(connection: socket.socket, message: Message, *bodies: memoryview) -> None:
    """A message, and what follows it. Raises `OSError`."""
    data = _ENCODER.encode(message)
    connection.sendall(FRAME.pack(MAGIC, len(data)) + data)
    for body in bodies:
        connection.sendall(body)


def receive(connection: socket.socket, kind: type[M]) -> M:
    """The next message, which must be of this kind. How long it may take is the socket's matter (`data.timed`).

    Raises `WireError` (with a refusal's reason) or `OSError`.
    """
    message = receive_any(connection)
    if isinstance(message, Refused):
        raise WireError(f"refused: {message.reason}")
    if not isinstance(message, kind):
        raise WireError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message


def receive_any(connection: socket.socket) -> Message:
    """The next message. Raises `WireError` or `OSError`."""
    head = bytearray(FRAME.size)
    receive_into(connection, memoryview(head))
    magic, length = FRAME.unpack(head)
    if magic != MAGIC or length > MOST_BYTES:
        raise WireError("what came is no message of ours")
    data = bytearray(length)
    receive_into(connection, memoryview(data))
    try:
        message: Message = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"what came is no message of ours: {error}") from None
    return message


def receive_into(connection: socket.socket, room: memoryview) -> None:
    """Fill `room`. Raises `WireError` when the connection ends before that."""
    while len(room):
        count = connection.recv_into(room)
        if not count:
            raise WireError("the connection ended in the middle of a message")
        room = room[count:]
