"""The data half: copies between KV blocks and host memory, and the threads of the tiers behind it.

Promises: a plan's stores are read before its step writes anything; loads and tiers run beside the steps, each tier on
threads of its own, so that a slow one holds up nobody; every job is reported once, whatever happened to it.
Does not know: why a chunk moves, or what is in which row.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from octavo.base.step import ResultPart, StepPlan
from octavo.features.transfer.address import (
    check_holds_one,
    chunk_bytes,
    num_rows,
    parse_listen,
    parse_tiers,
    row_bytes,
)
from octavo.features.transfer.connector import DataContext, load
from octavo.features.transfer.data.api import Tier
from octavo.features.transfer.data.disagg import DisaggAgent
from octavo.features.transfer.data.ledger import RowLedger
from octavo.features.transfer.data.peer_rows import RowPointer
from octavo.features.transfer.data.peer_server import PeerListener, RowService
from octavo.features.transfer.data.probe import measure
from octavo.features.transfer.data.regions import HostRegion, KVRegion, regions_of
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.tier_threads import TierThreads, check
from octavo.features.transfer.data.worker_thread import Outbox, WorkerThread
from octavo.features.transfer.options import TransferOptions
from octavo.features.transfer.plan import (
    NO_BLOCK,
    Copy,
    JobReport,
    TierJob,
    TierJobKind,
    TransferPlan,
    TransferReport,
    tier_speed,
)
from octavo.worker.batch import InputBatch
from octavo.worker.memory import KVMemory
from octavo.worker.seams import DataPart, NullDataPart

log = logging.getLogger(__name__)

MEASURED_BYTES = 16 << 20  # copied each way, each round
ROUNDS = 3  # of which the best counts: whatever else runs makes a copy slower, nothing makes it faster
CLOSE_S = 10.0  # how long a stop waits for what a tier is doing


def make(options: TransferOptions, identity: Mapping[str, str]) -> tuple[DataPart, ...]:
    """The worker's halves of tiers, hand-over and connectors. Raises `ConfigError` for what cannot be."""
    listener = PeerListener(None if options.kv_listen is None else parse_listen(options.kv_listen))
    parts: list[DataPart] = [TransferAgent(options.tiers, identity, listener)] if options.tiers else []
    if options.kv_role is not None:
        disagg = DisaggAgent(options.kv_role, options.kv_transport, identity, listener, by_layer=options.kv_by_layer)
        parts.append(disagg)
    context = DataContext(identity=identity)
    return (*parts, *(connector.data_part(context) for connector in load(options.kv_connector or ())))


class TransferAgent(NullDataPart):
    """A part of the worker.

    Owns: the host region, the tiers, the threads, and reports that wait for the next result.
    """

    name = "transfer"

    def __init__(self, tiers: tuple[str, ...], identity: Mapping[str, str], listener: PeerListener) -> None:
        """`identity`: all that KV depends on besides tokens, by name. `listener`: where peers come that read what is here.
        Raises `ConfigError`."""
        self._host_address, *self._addresses = parse_tiers(tiers)
        for address in self._addresses:
            check(address)
        self._identity = dict(identity)
        self._listener = listener
        self._ledger: RowLedger | None = None
        self._done: Outbox[JobReport] = Outbox()
        self._loads = WorkerThread("octavo-kv-loads")
        self._ahead = WorkerThread("octavo-kv-ahead")
        self._tiers: list[TierThreads] = []
        self._regions: tuple[KVRegion, ...] = ()
        self._host: HostRegion | None = None
        self._speeds: dict[str, float] = {}

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """`speeds`: bytes a second between KV blocks, host memory and tiers. `place`: where other processes find the latter."""
        return {
            "speeds": lambda: dict(self._speeds),
            "place": lambda: None if (place := self._need_host().place) is None else msgspec.to_builtins(place),
        }

    def bind(self, memory: KVMemory) -> None:
        layout = memory.layout
        blocks = self._host_address.blocks
        seal = Seal(self._identity, [chunk_bytes(layout, group.index, blocks) for group in layout.groups])
        for address in self._addresses:
            check_holds_one(address, seal.most_sealed_bytes, blocks)
        self._regions = regions_of(memory, "--kv-tier")
        self._host = HostRegion(num_rows(layout, self._host_address), row_bytes(layout, blocks))
        self._ledger = RowLedger(self._host)
        self._speeds = _measure(self._regions[0], self._host, layout.num_blocks)
        self._tiers = [TierThreads(a, seal) for a in self._addresses]
        read = measure(self._addresses, self._tiers, seal)
        self._speeds.update({tier_speed(name): per_s for name, per_s in read.items()})
        self._listener.serve(RowService(self._ledger, seal), seal)
        self._listener.serve(RowPointer(self._ledger, self._host), seal)

    # ---- steps --------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, batch: InputBatch) -> None:
        part = plan.part(TransferPlan)
        if part is None:
            return
        zeroed = set(plan.batch.blocks_to_zero)
        for copy in part.stores:
            self._finish(copy.job, len(copy.rows), lambda copy=copy: self._store(copy, zeroed))  # type: ignore[misc]
        for copy in part.loads:
            self._loads.put(partial(self._finish, copy.job, len(copy.rows), partial(self._load, copy)))
        for job in part.tier_jobs:
            threads = self._tiers[job.tier]
            threads.put(job.kind, partial(self._serve, job, threads.failed))

    def _finish(
        self,
        job: int,
        count: int,
        work: Callable[[], tuple[Sequence[bool], int]],
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """Do the work; report it, also when it fails, which `failed` is told."""
        began, error = time.monotonic(), None
        try:
            good, num_bytes = work()
        except Exception as problem:  # the border between one tier and everybody's steps
            good, num_bytes, error = (False,) * count, 0, f"{type(problem).__name__}: {problem}"
            if failed is None:
                log.warning("a transfer failed: %s", error)
            else:
                failed(error)
        seconds = time.monotonic() - began
        self._done.put(JobReport(job=job, good=tuple(good), num_bytes=num_bytes, seconds=seconds, error=error))

    def _store(self, copy: Copy, zeroed: set[int]) -> tuple[Sequence[bool], int]:
        region, host, ledger = self._regions[copy.group], self._need_host(), self._need_ledger()
        chunks, size = self._chunks(copy), region.chunk_bytes
        good = [zeroed.isdisjoint(blocks) for blocks in chunks]  # those were cleared before this was called
        for key, blocks, row, fine in zip(copy.keys, chunks, copy.rows, good, strict=True):
            ledger.begin(row)
            if fine:
                for at, block in enumerate(blocks):
                    region.read_in_step(block, host[row][at * size :])
                ledger.end(row, key)
        if host.wants_ahead(max(copy.rows, default=0)):
            self._ahead.put(host.make_ready)
        return good, size * len(copy.blocks)

    def _load(self, copy: Copy) -> tuple[Sequence[bool], int]:
        region, host = self._regions[copy.group], self._need_host()
        size, copied = region.chunk_bytes, 0
        for blocks, row in zip(self._chunks(copy), copy.rows, strict=True):
            for at, block in enumerate(blocks):
                if block != NO_BLOCK:
                    region.write(block, host[row][at * size :])
                    copied += size
        return (True,) * len(copy.rows), copied

    def _chunks(self, copy: Copy) -> list[tuple[int, ...]]:
        """The blocks of each chunk."""
        each = self._host_address.blocks
        return [copy.blocks[at : at + each] for at in range(0, len(copy.blocks), each)]

    def _serve(self, job: TierJob, failed: Callable[[str], None], tier: Tier) -> None:
        self._finish(job.job, len(job.keys), lambda: self._ask(tier, job), failed)

    def _ask(self, tier: Tier, job: TierJob) -> tuple[Sequence[bool], int]:
        host = self._need_host()
        if job.kind is TierJobKind.FIND:
            return tier.find(job.keys), 0
        rows = [host[row] for row in job.rows]
        if job.kind is TierJobKind.WRITE:
            good = tier.write(job.keys, rows)
        else:
            ledger = self._need_ledger()
            for row in job.rows:
                ledger.begin(row)
            good = tier.read(job.keys, rows)
            for key, row, fine in zip(job.keys, job.rows, good, strict=True):
                if fine:
                    ledger.end(row, key)
        return good, sum(len(row) for row, fine in zip(rows, good, strict=True) if fine)

    def report(self) -> ResultPart | None:
        jobs = self._done.take()
        return TransferReport(jobs=jobs) if jobs else None

    def close(self) -> None:
        """Loads first, then every tier; one that hangs keeps its memory mapped (TIR-21)."""
        self._listener.close()
        self._ahead.stop(0)
        self._loads.stop(CLOSE_S)
        until = time.monotonic() + CLOSE_S
        for tier in self._tiers:
            tier.stop()
        for tier in self._tiers:
            tier.close(until)
        self._tiers = []
        if self._host is not None:
            self._host.close()

    def _need_ledger(self) -> RowLedger:
        if self._ledger is None:
            raise RuntimeError("a transfer was planned before KV memory was allocated")
        return self._ledger

    def _need_host(self) -> HostRegion:
        if self._host is None:
            raise RuntimeError("a transfer was planned before KV memory was allocated")
        return self._host


def _measure(region: KVRegion, host: HostRegion, num_blocks: int) -> dict[str, float]:
    """Bytes a second each way. Blocks keep what they held; no row holds anything yet."""
    count = max(1, min(len(host), num_blocks - 1, MEASURED_BYTES // region.chunk_bytes))
    first = min(1, num_blocks - 1)  # after the null block: those are used first, too
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, copy in (("store_bytes_per_s", region.read_in_step), ("load_bytes_per_s", region.write)):
            began = time.perf_counter()
            for row in range(count):
                copy(first + row, host[row])
            took = max(time.perf_counter() - began, 1e-9)
            best[name] = max(best.get(name, 0.0), count * region.chunk_bytes / took)
    return best
