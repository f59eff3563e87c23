"""How fast each tier gives and takes, beside what the machine gives to a program that does nothing else.

    python benchmarks/kv_tier_bandwidth.py [--chunks 64] [--rounds 5] [--folder DIR] [--s3 ADDRESS]

Through the tiers' own objects, with chunks of the size that a block of 64 tokens of SmolLM2-135M has in bfloat16
(1.4 MiB), sealed and checked as always. Beside them the limits: copying in memory; plain files, written and read in the
same pieces, through the cache of the system and past it (O_DIRECT, where the file system has it); plain sockets over
loopback. The other side of a peer is a thread of this process, so NIXL copies by what UCX finds within one machine; with
UCX_TLS=tcp it goes through sockets. Rounds go over all rows in turn, and the best of each counts, in MB/s. A ratio is that of a tier to its limit:
host to memory, files to files of the same kind, servers and peers to sockets.

Files are written without waiting for the disk, as the tier does; `cold` is read after the system was told to forget
them, which needs the disk to have them first.
"""

import argparse
import mmap
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from kv_tiers import redis_tier, s3_tier

from octavo.base.kvspec import FullAttentionSpec
from octavo.features.transfer.address import parse_tier
from octavo.features.transfer.data.api import Bytes, Tier
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.ledger import RowLedger
from octavo.features.transfer.data.one_sided import is_installed
from octavo.features.transfer.data.peer_rows import RowPointer
from octavo.features.transfer.data.peer_server import PeerServer, RowService
from octavo.features.transfer.data.regions import HostRegion, KVRegion
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.tier_threads import TIERS
from octavo.kvcache.groups import plan_layout
from octavo.plugins.registry import load_target

SPEC = FullAttentionSpec(block_size=64, num_kv_heads=3, head_dim=64, dtype="bfloat16")
LAYERS = 30
IDENTITY = {"model": "benchmark"}
PAGE = 4096


@dataclass
class Row:
    """What is measured: `write` and `read` move all chunks once; `prepare` comes before each write."""

    name: str
    limit: str | None
    write: Callable[[], None] | None
    read: Callable[[], None] | None
    prepare: Callable[[], None] = lambda: None
    chill: Callable[[], None] = lambda: None  # before each read
    best: dict[str, float] = field(default_factory=dict)

    def measure(self, num_bytes: int) -> None:
        for name, act, before in (("write", self.write, self.prepare), ("read", self.read, self.chill)):
            if act is not None:
                before()
                began = time.perf_counter()
                act()
                speed = num_bytes / (time.perf_counter() - began) / 1e6
                self.best[name] = max(speed, self.best.get(name, 0.0))


class Chunks:
    """Rows of random bytes, rows to read to, and keys that are new for each round.

    Owns: the two regions and the number of the round.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.source, self.target = HostRegion(count, size), HostRegion(count, size)
        rng = np.random.default_rng(0)
        for i in range(count):
            self.source[i][:] = rng.integers(0, 256, size, dtype=np.uint8)
            self.target[i][:] = 0
        self.round = 0

    @property
    def num_bytes(self) -> int:
        return self.count * self.size

    def keys(self) -> list[bytes]:
        return [self.round.to_bytes(16, "big") + i.to_bytes(16, "big") + bytes(4) for i in range(self.count)]

    def rows(self, region: HostRegion) -> list[Bytes]:
        return [region[i] for i in range(self.count)]

    def next_round(self) -> None:
        self.round += 1


# ---- limits -------------------------------------------------------------------------------------


def memory(chunks: Chunks) -> Row:
    def copy() -> None:
        for i in range(chunks.count):
            chunks.target[i][:] = chunks.source[i]

    return Row("memory copy", None, copy, copy)


def files(chunks: Chunks, folder: Path, *, direct: bool) -> Row:
    """One file a chunk. Past the cache, pieces must be whole pages in memory that begins on one."""
    flag = getattr(os, "O_DIRECT", 0) if direct else 0
    size = -(-chunks.size // PAGE) * PAGE if direct else chunks.size
    aligned = mmap.mmap(-1, size)
    view = memoryview(aligned)
    paths = [folder / f"{'direct' if direct else 'plain'}{i}" for i in range(chunks.count)]

    def write() -> None:
        for i, path in enumerate(paths):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag, 0o644)
            try:
                piece = view if direct else chunks.source[i].data
                done = 0
                while done < len(piece):
                    done += os.write(fd, piece[done:])
            finally:
                os.close(fd)

    def read() -> None:
        for i, path in enumerate(paths):
            fd = os.open(path, os.O_RDONLY | flag)
            try:
                room = view if direct else chunks.target[i].data
                done = 0
                while done < len(room):
                    count = os.readv(fd, [room[done:]])
                    if not count:
                        raise SystemExit(f"{path} is cut short")
                    done += count
            finally:
                os.close(fd)

    return Row("plain files, direct" if direct else "plain files", None, write, read)


@contextmanager
def sockets(chunks: Chunks) -> Iterator[Row]:
    """The other side sends what it has, or swallows what it gets, on a thread: it holds no lock while it does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    while order := connection.recv(1):
                        if order == b"r":
                            for i in range(chunks.count):
                                connection.sendall(chunks.source[i].data)
                        else:
                            for i in range(chunks.count):
                                fill(connection, chunks.target[i].data)
                            connection.sendall(b".")

        threading.Thread(target=serve, daemon=True).start()
        with socket.create_connection(listener.getsockname()) as connection:

            def write() -> None:
                connection.sendall(b"w")
                for i in range(chunks.count):
                    connection.sendall(chunks.source[i].data)
                connection.recv(1)

            def read() -> None:
                connection.sendall(b"r")
                for i in range(chunks.count):
                    fill(connection, chunks.target[i].data)

            yield Row("plain sockets", None, write, read)


def fill(connection: socket.socket, room: memoryview) -> None:
    while len(room):
        count = connection.recv_into(room)
        if not count:
            raise ConnectionError("the other side is gone")
        room = room[count:]


# ---- tiers --------------------------------------------------------------------------------------


def host(chunks: Chunks, count: int) -> Row:
    """Blocks of a cache to rows, and back."""
    layout = plan_layout(
        [SPEC] * LAYERS, budget_bytes=None, num_blocks=count + 1, max_model_len=64, max_batched_tokens=64, order="block"
    )
    region = KVRegion(layout, 0, torch.ones(layout.total_bytes, dtype=torch.uint8))

    def write() -> None:
        for i in range(count):
            region.read(i + 1, chunks.target[i])

    def read() -> None:
        for i in range(count):
            region.write(i + 1, chunks.target[i])

    return Row("host", "memory copy", write, read)


def tier(name: str, limit: str, chunks: Chunks, made: Tier, *, writes: bool = True) -> Row:
    def write() -> None:
        if not all(made.write(chunks.keys(), chunks.rows(chunks.source))):
            raise SystemExit(f"{name} did not take everything")

    def read() -> None:
        if not all(made.read(chunks.keys(), chunks.rows(chunks.target))):
            raise SystemExit(f"{name} did not give everything")

    return Row(name, limit, write if writes else None, read, prepare=chunks.next_round)


def cold(warm: Row, name: str, limit: str, folder: Path) -> Row:
    """The same reading, of files that the system was told to forget."""

    def forget() -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)

    return Row(name, limit, None, warm.read, chill=forget)


def open_tier(address: str, seal: Seal) -> Tier:
    parsed = parse_tier(address)
    made: Tier = load_target(TIERS[parsed.kind])(parsed, seal, TierHealth(address))
    return made


def begin(row: Row, pointer: RowPointer) -> None:
    """Read by TCP until NIXL has begun at the other side, and once by NIXL, which connects the two."""
    while not pointer.reads_by_nixl:
        row.measure(1)
        time.sleep(0.1)
    row.measure(1)
    row.best.clear()


def works(row: Row) -> bool:
    try:
        row.measure(1)
    except OSError as error:
        print(f"{row.name}: left out: {error}", file=sys.stderr)
        return False
    row.best.clear()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where files go; a temporary folder when not given")
    parser.add_argument("--s3", default=None, help="the address of a bucket that may be written to")
    call = parser.parse_args()
    size = SPEC.page_bytes * LAYERS
    chunks, seal = Chunks(call.chunks, size), Seal(IDENTITY, [size])
    with ExitStack() as stack:
        folder = Path(call.folder or stack.enter_context(tempfile.TemporaryDirectory())) / "kv-tier-bandwidth"
        (folder / "plain").mkdir(parents=True, exist_ok=True)
        plain, direct = (files(chunks, folder / "plain", direct=flag) for flag in (False, True))
        rows = [memory(chunks), host(chunks, call.chunks), plain]
        has_direct = hasattr(os, "O_DIRECT") and works(direct)
        rows += [direct] if has_direct else []
        files_tier = tier("file", plain.name, chunks, open_tier(f"file://{folder}/tier?size=4GiB", seal))
        rows += [files_tier, cold(plain, "plain files, cold", direct.name if has_direct else plain.name, folder)]
        rows.append(cold(files_tier, "file, cold", "plain files, cold", folder))
        rows.append(stack.enter_context(sockets(chunks)))
        for name, opened in (("redis", redis_tier()), ("s3", s3_tier(call.s3))):
            address = stack.enter_context(opened)
            if address is not None:
                made = open_tier(address, seal)
                stack.callback(made.close)
                rows.append(tier(name, "plain sockets", chunks, made))
        ledger = RowLedger(chunks.source)
        pointer = RowPointer(ledger, chunks.source)
        server = PeerServer("127.0.0.1", 0, seal, [RowService(ledger, seal), pointer])
        stack.callback(server.close)

        def publish() -> None:
            for i, key in enumerate(chunks.keys()):
                ledger.begin(i)
                ledger.end(i, key)

        for name, options in (("peer", ""), ("peer, NIXL", "?transport=nixl"))[: 1 + is_installed()]:
            peer = open_tier(f"peer://127.0.0.1:{server.port}{options}", seal)
            stack.callback(peer.close)
            row = tier(name, "plain sockets", chunks, peer, writes=False)
            row.chill = publish
            if options:
                publish()
                begin(row, pointer)
            rows.append(row)
        for _ in range(call.rounds):
            for each in rows:
                each.measure(chunks.num_bytes)
        show(rows, chunks)


def show(rows: list[Row], chunks: Chunks) -> None:
    print(f"{chunks.count} chunks of {chunks.size / 2**20:.2f} MiB; MB/s, best round; in brackets: share of the limit")
    best = {row.name: row.best for row in rows}
    print(f"{'':22} {'write':>18} {'read':>18}   limit")
    for row in rows:
        cells = []
        for way in ("write", "read"):
            if way not in row.best:
                cells.append(f"{'':18}")
                continue
            limit = best.get(row.limit or "", {}).get(way)
            share = "" if limit is None else f"({row.best[way] / limit:.0%})"
            cells.append(f"{row.best[way]:10.0f} {share:>7}")
        print(f"{row.name:22} {cells[0]} {cells[1]}   {row.limit or ''}")


if __name__ == "__main__":
    main()
