"""A hand-over through a folder, layer by layer (PDX-3).

Promises: a layer is written while later ones are computed, by threads that take only time nobody else wants, and a step
waits for copies in memory and never for the folder; a layer waits for its own rows only, and for nothing that has
stopped moving; nothing is written to blocks once `end_loads` has returned; what was damaged or is missing is not good.
Does not know: why a prompt is saved, or what becomes of a fetch that failed.

A prompt is a folder as in `over_file`, of one file for each layer. In it a block's record lies at its place times the
length of a record: a seal, and the layer's page. What was not saved in the steps is written when the lease is opened,
before the folder gets its name, so a prompt that can be seen is whole, or empty where it could not be written.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.data.guard import Tables
from octavo.features.transfer.data.over_file import STOP_S, WAIT_S, FileConsumerTransport, FileProducerTransport, Shelf
from octavo.features.transfer.data.regions import LayerRegion
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.transport import LayerConsumerTransport, LayerProducerTransport, Place, Pull
from octavo.features.transfer.data.worker_thread import Outbox, WorkerThread
from octavo.features.transfer.disagg import LeaseDrop, LeaseEvent, LeaseNews, LeaseWatch, Save
from octavo.features.transfer.plan import JobReport
from octavo.ops import spare

log = logging.getLogger(__name__)

MOST_HELD: Final = 256 << 20  # bytes of layers that wait for the folder; what is more is written in the end
STALL_S: Final = 2.0  # without a single row, after which a step goes on without its fetch
LOOK_S: Final = 0.002  # between looks for prompts that somebody waits for
REST_S: Final = 30.0  # after that, in which no step waits for this folder
RUN: Final = 64  # records that are read or written at once
READERS: Final = 2  # layers that are read at once: one after the other is when they are needed


class _Records:
    """How rows of a layer lie in its file. Owns: nothing."""

    def __init__(self, seal: Seal, lease: str, layer: int) -> None:
        self._seal, self._lease, self._layer = seal, lease, layer
        self.head = seal.head_bytes(self._key(0))
        self.length = self.head + seal.length(self._key(0))

    def _key(self, place: int) -> bytes:
        return f"{self._lease}:{place:08d}".encode() + self._layer.to_bytes(4, "big")

    def empty(self, count: int) -> Bytes:
        """Room for so many records [count, length]; the rows lie behind `head`."""
        return np.empty((count, self.length), dtype=np.uint8)

    def close(self, record: Bytes, place: int, *, hurry: bool) -> None:
        """Put the seal before the row."""
        body = record[self.head :].data
        head = (
            self._seal.head(self._key(place), body) if hurry else self._seal.head(self._key(place), body, spare.crc32)
        )
        record[: self.head] = np.frombuffer(head, dtype=np.uint8)

    def opens(self, record: Bytes, place: int) -> bool:
        """Whether this is what was written for the place."""
        return self._seal.opens(self._key(place), record[: self.head].tobytes(), record[self.head :].data)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where rows of places that follow each other begin and end, `RUN` at most."""
    begin = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1 or at - begin == RUN:
            yield begin, at
            begin = at


class LayerFileProducerTransport(FileProducerTransport):
    """A producer's end.

    Owns: beside the thread that writes, the one that copies; which rows of prompts that are computed were written; and
    how many bytes wait to be.
    """

    def __init__(self, shelf: Shelf, layers: tuple[LayerRegion, ...]) -> None:
        super().__init__(shelf, ())
        self._layers = layers
        self._copier = WorkerThread("octavo-kv-layers")  # never touches the folder, so a step can wait for it
        self._saves: Sequence[Save] = ()
        self._written: dict[str, set[tuple[int, int]]] = {}  # the writer's: layer and place, by lease
        self._wanted: set[str] = set()  # leases that somebody may be waiting for by now
        self._lock = threading.Lock()
        self._held = 0

    # ---- the engine's thread --------------------------------------------------------------------

    def begin_saves(self, saves: Sequence[Save]) -> None:
        self._saves = saves

    def save_layer(self, layer: int) -> None:
        self._copier.put(partial(self._copy, layer, self._saves))

    def wait_for_save(self) -> None:
        copied = threading.Event()
        self._copier.put(copied.set)
        copied.wait()
        self._saves = ()

    def forget(self, lease: str) -> None:
        self._behind(partial(self._remove, lease))

    def open(self, lease: str, blocks: Tables) -> None:
        self._wanted.add(lease)
        self._behind(partial(self._write, lease, blocks))

    def close(self, lease: str) -> None:
        self._behind(lambda: self._events.put(LeaseEvent(lease, LeaseNews.CLOSED)))

    def stop(self) -> None:
        self._copier.stop(STOP_S)
        super().stop()

    # ---- the copier's thread --------------------------------------------------------------------

    def _behind(self, job: Callable[[], None]) -> None:
        """Have it done by the writer after all that was copied before; only the copier puts work there."""
        self._copier.put(lambda: self._writer.put(job))

    def _copy(self, layer: int, saves: Sequence[Save]) -> None:
        region = self._layers[layer]
        for save in saves:
            blocks, records = save.blocks[region.group], _Records(self._shelf.seal, save.lease, layer)
            size = len(blocks) * records.length
            if not size or not self._take(size):
                continue
            try:
                rows = records.empty(len(blocks))
                region.read(blocks, rows[:, records.head :])
            except MemoryError:  # it is written in the end, row by row
                self._give(size)
                continue
            self._writer.put(partial(self._save, save.lease, layer, save.places[region.group], rows))

    def _take(self, size: int) -> bool:
        with self._lock:
            fits = self._held + size <= MOST_HELD
            self._held += size if fits else 0
        return fits

    def _give(self, size: int) -> None:
        with self._lock:
            self._held -= size

    # ---- the writer's thread --------------------------------------------------------------------

    def _save(self, lease: str, layer: int, places: Sequence[int], rows: Bytes) -> None:
        try:
            part = self._begin(lease)
            self._put(part, lease, layer, places, rows)
            self._written.setdefault(lease, set()).update((layer, place) for place in places)
        except (OSError, ValueError) as error:  # it is tried again when the lease is opened
            log.debug("layer %d could not be put in %s: %s", layer, self._shelf.folder, error)
        finally:
            self._give(rows.nbytes)

    def _begin(self, lease: str) -> Path:
        """The prompt's folder while it is written. Raises `OSError`."""
        part = self._part(lease)
        try:
            os.utime(part)  # or it would be swept away while a long prompt is computed
        except FileNotFoundError:
            part.mkdir(parents=True)  # somebody may have deleted the folder
            self._written.pop(lease, None)
        return part

    def _put(self, part: Path, lease: str, layer: int, places: Sequence[int], rows: Bytes) -> None:
        records, hurry = _Records(self._shelf.seal, lease, layer), lease in self._wanted
        for place, record in zip(places, rows, strict=True):
            records.close(record, place, hurry=hurry)
        file = os.open(part / f"{layer}.kv", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            for begin, end in _runs(places):
                os.lseek(file, places[begin] * records.length, os.SEEK_SET)
                data = rows[begin:end].reshape(-1).data
                while len(data):
                    data = data[os.write(file, data) if hurry else spare.write(file, data) :]
        finally:
            os.close(file)

    def _fill(self, part: Path, lease: str, blocks: Tables) -> None:
        """All that was not saved while it was computed."""
        self._begin(lease)
        written = self._written.get(lease, set())
        for layer, region in enumerate(self._layers):
            table = blocks[region.group]
            places = [i for i, block in enumerate(table) if block and (layer, i) not in written]
            records = _Records(self._shelf.seal, lease, layer)
            for begin, end in _runs(places):
                rows = records.empty(end - begin)
                region.read([table[i] for i in places[begin:end]], rows[:, records.head :])
                self._put(part, lease, layer, places[begin:end], rows)

    def _write(self, lease: str, blocks: Tables) -> None:
        super()._write(lease, blocks)
        self._written.pop(lease, None)
        self._wanted.discard(lease)

    def _remove(self, lease: str) -> None:
        self._written.pop(lease, None)
        self._shelf.remove(self._part(lease))


class _Load:
    """A fetch under way.

    Owns: which rows came and which layers are done with; and whether it may still write.
    """

    def __init__(self, pull: Pull, num_layers: int) -> None:
        self.job = pull.job
        self._report = pull.done
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._done = [False] * num_layers
        self._good = [np.zeros((num_layers, len(places)), dtype=bool) for places in pull.job.places]
        self._num_bytes = 0
        self._over = False
        self.stalled = False
        self.error: str | None = None

    @property
    def is_over(self) -> bool:
        """Nobody wants more of it."""
        return self._over

    def put(self, region: LayerRegion, layer: int, at: Sequence[int], rows: Bytes) -> None:
        """These rows, by their places in the job, are good."""
        blocks = self.job.blocks[region.group]
        with self._changed:
            if not self._over:
                region.write([blocks[i] for i in at], rows)
                self._good[region.group][layer, list(at)] = True
                self._num_bytes += rows.nbytes
                self._changed.notify_all()

    def end_layer(self, layer: int, error: str | None = None) -> None:
        """The layer is done with, for better or worse."""
        with self._changed:
            self._done[layer] = True
            self.error = self.error or error
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Until the layer is done with, or nothing has moved for `STALL_S`: then it is over."""
        with self._changed:
            while not (self._done[layer] or self._over):
                if not self._changed.wait(STALL_S):
                    self._over = self.stalled = True
                    self.error = f"the folder gave nothing for {STALL_S:g} s"

    def finish(self, layers: Sequence[LayerRegion]) -> None:
        """Nothing is written from now on; it is told."""
        with self._changed:
            self._over = True
        of_group = [[i for i, region in enumerate(layers) if region.group == g] for g in range(len(self._good))]
        good = tuple(fine for g, rows in enumerate(self._good) for fine in np.all(rows[of_group[g]], axis=0).tolist())
        seconds = time.monotonic() - self._began
        self._report(
            JobReport(job=self.job.job, good=good, num_bytes=self._num_bytes, seconds=seconds, error=self.error)
        )


class LayerFileConsumerTransport(FileConsumerTransport):
    """A consumer's end.

    Owns: beside what any has, the threads that read layers for steps, the one that looks for prompts, what it looks
    for, and until when no step waits for the folder.
    """

    def __init__(self, shelf: Shelf, layers: tuple[LayerRegion, ...]) -> None:
        super().__init__(shelf)
        self._layers = layers
        self._team = ThreadPoolExecutor(READERS, "octavo-kv-layers")
        self._loads: list[_Load] = []
        self._awaited: dict[str, float] = {}  # leases, since when
        self._events: Outbox[LeaseEvent] = Outbox()
        self._looker = threading.Thread(target=self._look, name="octavo-kv-look", daemon=True)
        self._any = threading.Event()
        self._rests_until = 0.0

    # ---- the engine's thread --------------------------------------------------------------------

    def watch(self, watch: LeaseWatch) -> None:
        super().watch(watch)
        self._awaited[watch.lease] = time.monotonic()
        self._any.set()
        if not self._looker.ident:
            self._looker.start()

    def drop(self, drop: LeaseDrop) -> None:
        self._awaited.pop(drop.lease, None)
        super().drop(drop)

    def news(self) -> tuple[LeaseEvent, ...]:
        super().news()
        oldest = time.monotonic() - WAIT_S
        for lease in [lease for lease, asked in list(self._awaited.items()) if asked < oldest]:
            self._awaited.pop(lease, None)
            self._events.put(LeaseEvent(lease, LeaseNews.LOST))
        return self._events.take()

    def begin_loads(self, pulls: Sequence[Pull]) -> None:
        self._loads = [_Load(pull, len(self._layers)) for pull in pulls]
        for layer in range(len(self._layers)):
            for load in self._loads:
                self._team.submit(self._read_layer, load, layer)

    def wait_for_layer(self, layer: int) -> None:
        for load in self._loads:
            load.wait(layer)

    def end_loads(self) -> None:
        for load in self._loads:
            for layer in range(len(self._layers)):
                load.wait(layer)
            if load.error is not None:
                self._shelf.say_unread(load.error)
            if load.stalled:
                self._rests_until = time.monotonic() + REST_S
            load.finish(self._layers)
        self._loads = []

    def stop(self) -> None:
        self._over.set()
        self._any.set()
        self._team.shutdown(wait=False, cancel_futures=True)
        super().stop()

    # ---- other threads --------------------------------------------------------------------------

    def _look(self) -> None:
        """Tell of each awaited prompt when it is there."""
        while not self._over.is_set():
            self._any.wait()
            self._any.clear()
            while self._awaited and not self._over.wait(LOOK_S):
                for lease in list(self._awaited):
                    if time.monotonic() > self._rests_until and self._is_there(lease):
                        self._awaited.pop(lease, None)
                        self._events.put(LeaseEvent(lease, LeaseNews.THERE))

    def _is_there(self, lease: str) -> bool:
        try:
            return self._shelf.prompt(lease).exists()
        except (OSError, ValueError):
            return False

    def _read(self, pull: Pull, asked: float) -> None:
        """A fetch that no step waits for: as soon as the prompt is there, all of it."""
        load = _Load(pull, len(self._layers))
        try:
            self._wait_for(pull.job.lease, asked)
        except (OSError, ValueError) as problem:
            load.error = str(problem)
        else:
            for layer in range(len(self._layers)):
                self._read_layer(load, layer)
        if load.error is not None:
            self._shelf.say_unread(load.error)
        load.finish(self._layers)

    def _read_layer(self, load: _Load, layer: int) -> None:
        region, job = self._layers[layer], load.job
        places = job.places[region.group]
        try:
            if not places:
                return
            records = _Records(self._shelf.seal, job.lease, layer)
            with open(self._shelf.prompt(job.lease) / f"{layer}.kv", "rb", buffering=0) as file:
                for begin, end in _runs(places):
                    if load.is_over:
                        return
                    rows = records.empty(end - begin)
                    got = os.preadv(file.fileno(), [rows.data], places[begin] * records.length) // records.length
                    fine = [i for i in range(got) if records.opens(rows[i], places[begin + i])]
                    load.put(region, layer, [begin + i for i in fine], rows[fine, records.head :])
        except Exception as problem:  # the border between one prompt and who waits for it
            load.end_layer(layer, str(problem) or type(problem).__name__)
        finally:
            load.end_layer(layer)


def make(place: Place) -> tuple[LayerProducerTransport | None, LayerConsumerTransport | None]:
    """The ends that this engine takes, over the folder in its address. Raises `ConfigError`."""
    identity = {**place.seal.identity, "a file holds": "one layer"}
    shelf = Shelf(place.address, Seal(identity, [region.page_bytes for region in place.layers]))
    producer = LayerFileProducerTransport(shelf, place.layers) if place.role.produces else None
    return producer, LayerFileConsumerTransport(shelf, place.layers) if place.role.consumes else None
