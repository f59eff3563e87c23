"""A hand-over through a folder that both engines can write to, for machines that cannot connect to each other.

Promises: a producer's blocks are free as soon as they are written; a prompt in the folder is whole or is not there; what
nobody took is removed some time after its lease; a folder that is full or gone loses prompts and nothing else.
Does not know: leases' ends, or what a consumer does with blocks.

A prompt is a folder `<root>/<fingerprint>/<lease>` of one sealed file for each block; its name ends in `.part` while it
is written. A consumer that watches it touches it, and removes it when it is done.
"""

import contextlib
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from octavo.base.errors import ConfigError
from octavo.features.transfer.data.guard import Tables
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.regions import KVRegion
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.transport import ConsumerTransport, Place, ProducerTransport, Pull
from octavo.features.transfer.data.worker_thread import Outbox, WorkerThread
from octavo.features.transfer.disagg import LeaseDrop, LeaseEvent, LeaseNews, LeaseWatch
from octavo.features.transfer.plan import JobReport
from octavo.features.transfer.wire import lease_key

WAIT_S: Final = 10.0  # for a prompt that is still being written
POLL_S: Final = 0.01
KEEP_S: Final = 600.0  # of a prompt that nobody touches
TOUCH_S: Final = 60.0
STOP_S: Final = 10.0
READERS: Final = 4  # prompts that are read at once: one that does not appear holds up no other


class Shelf:
    """Prompts in the folder.

    Owns: what the log was told of it; the folder is everybody's.
    """

    def __init__(self, root: str, seal: Seal) -> None:
        """Raises `ConfigError` when there can be no such folder."""
        self.seal = seal
        self.health = TierHealth(f"--kv-transport file://{root}")
        self.folder = Path("/" + root.lstrip("/")) / f"handover-{seal.space}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--kv-transport file://{root}: the folder cannot be made: {error.strerror}; "
                "name one that this user may write to"
            ) from None

    def prompt(self, lease: str) -> Path:
        """The prompt's folder. Raises `ValueError` for a lease that is no name of ours."""
        if not lease.isalnum():
            raise ValueError("a lease is a row of letters and digits")
        return self.folder / lease

    @staticmethod
    def block(prompt: Path, group: int, place: int) -> Path:
        """A block's file."""
        return prompt / f"{group}-{place}.kv"

    @staticmethod
    def remove(path: Path) -> None:
        """Remove a prompt, or what there is of one."""
        shutil.rmtree(path, ignore_errors=True)

    def say_unread(self, error: str) -> None:
        """For the log, once for many."""
        self.health.note("unread", f"a prompt could not be fetched, and is computed: {error}")

    def sweep(self) -> None:
        """Remove what nobody has touched for long, from a folder that is made again if somebody deleted it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.utime(self.folder)  # by the clock that dates what is in it, which need not be this machine's
        old = self.folder.stat().st_mtime - KEEP_S
        for each in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if each.stat().st_mtime < old:
                    shutil.rmtree(each, ignore_errors=True)


class FileProducerTransport:
    """A producer's end.

    Owns: the thread that writes, and notices that wait for the next report.
    """

    def __init__(self, shelf: Shelf, regions: tuple[KVRegion, ...]) -> None:
        self._shelf = shelf
        self._regions = regions
        self._events: Outbox[LeaseEvent] = Outbox()
        self._writer = WorkerThread("octavo-kv-disagg")

    def open(self, lease: str, blocks: Tables) -> None:
        self._writer.put(lambda: self._write(lease, blocks))

    def close(self, lease: str) -> None:
        self._writer.put(lambda: self._events.put(LeaseEvent(lease, LeaseNews.CLOSED)))  # after it was written

    def _write(self, lease: str, blocks: Tables) -> None:
        news = LeaseNews.DONE
        part = self._part(lease)
        try:
            self._shelf.sweep()
            self._fill(part, lease, blocks)
            part.rename(self._shelf.prompt(lease))
        except Exception as error:  # the border between one prompt and all others
            self._shelf.health.note("unwritten", f"a prompt could not be put there, and is computed again: {error}")
            self._say_lost(part, lease)
            news = LeaseNews.ABORTED
        self._events.put(LeaseEvent(lease, news))

    def _say_lost(self, part: Path, lease: str) -> None:
        """An empty prompt, where there can be one: whoever waits for it computes at once."""
        with contextlib.suppress(OSError):
            for file in part.iterdir():
                file.unlink()
            part.rename(self._shelf.prompt(lease))
        self._shelf.remove(part)

    def _part(self, lease: str) -> Path:
        """The prompt's folder while it is written."""
        return self._shelf.prompt(lease).with_suffix(".part")

    def _fill(self, part: Path, lease: str, blocks: Tables) -> None:
        part.mkdir()
        for group, (region, table) in enumerate(zip(self._regions, blocks, strict=True)):
            body = np.empty(region.chunk_bytes, dtype=np.uint8)
            for place, block in enumerate(table):
                if block:
                    region.read(block, body)
                    head = self._shelf.seal.head(lease_key(lease, place, group), body.data)
                    with open(self._shelf.block(part, group, place), "wb") as file:
                        file.write(head)
                        file.write(body.data)

    def news(self) -> tuple[LeaseEvent, ...]:
        return self._events.take()

    def stop(self) -> None:
        self._writer.stop(STOP_S)


class FileConsumerTransport:
    """A consumer's end.

    Owns: the threads that read, and when each watched prompt was last touched.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._touched: dict[str, float] = {}
        self._readers = ThreadPoolExecutor(READERS, "octavo-kv-fetch")
        self._over = threading.Event()

    def watch(self, watch: LeaseWatch) -> None:
        self._touched[watch.lease] = time.monotonic()

    def pull(self, pull: Pull) -> None:
        self._readers.submit(self._read, pull, time.monotonic())

    def drop(self, drop: LeaseDrop) -> None:
        self._touched.pop(drop.lease, None)
        self._readers.submit(self._remove, drop.lease)

    def news(self) -> tuple[LeaseEvent, ...]:
        now = time.monotonic()
        for lease, touched in self._touched.items():
            if now - touched > TOUCH_S:
                self._touched[lease] = now
                self._readers.submit(self._touch, lease)
        return ()

    def stop(self) -> None:
        self._over.set()
        self._readers.shutdown()

    def _touch(self, lease: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.utime(self._shelf.prompt(lease))

    def _remove(self, lease: str) -> None:
        with contextlib.suppress(ValueError):
            self._shelf.remove(self._shelf.prompt(lease))

    def _read(self, pull: Pull, asked: float) -> None:
        began, job = time.monotonic(), pull.job
        good = [[False] * len(places) for places in job.places]
        error, num_bytes = None, 0
        try:
            prompt = self._wait_for(job.lease, asked)
            for group, places in enumerate(job.places):
                for at, place in enumerate(places):
                    good[group][at] = self._read_block(pull, prompt, group, at, place)
                    num_bytes += self._shelf.seal.length(lease_key("", 0, group)) * good[group][at]
        except Exception as problem:  # the border between one prompt and who waits for it
            error = str(problem) or type(problem).__name__
            self._shelf.say_unread(error)
        flat = tuple(fine for row in good for fine in row)
        seconds = time.monotonic() - began
        pull.done(JobReport(job=job.job, good=flat, num_bytes=num_bytes, seconds=seconds, error=error))

    def _wait_for(self, lease: str, asked: float) -> Path:
        """The prompt, once it is there. Raises `FileNotFoundError` when it does not come."""
        prompt = self._shelf.prompt(lease)
        while not prompt.exists():
            if time.monotonic() - asked > WAIT_S:  # since it was asked for: those before it may have waited as long
                raise FileNotFoundError(f"the prompt did not appear within {WAIT_S:g} s")
            if self._over.wait(POLL_S):
                raise FileNotFoundError("the prompt had not appeared when this engine ended")
        return prompt

    def _read_block(self, pull: Pull, prompt: Path, group: int, at: int, place: int) -> bool:
        key, seal = lease_key(pull.job.lease, place, group), self._shelf.seal
        try:
            data = bytearray(self._shelf.block(prompt, group, place).read_bytes())
        except FileNotFoundError:
            return False
        head, body = data[: seal.head_bytes(key)], memoryview(data)[seal.head_bytes(key) :]
        if len(body) != seal.length(key) or not seal.opens(key, bytes(head), body):
            return False
        pull.write(pull.job, group, at, body)
        return True


def make(place: Place) -> tuple[ProducerTransport | None, ConsumerTransport | None]:
    """The ends that this engine takes, over the folder in its address. Raises `ConfigError`."""
    if not place.address:
        raise ConfigError("--kv-transport file: give the folder as file:///absolute/path")
    shelf = Shelf(place.address, place.seal)
    producer = FileProducerTransport(shelf, place.regions) if place.role.produces else None
    return producer, FileConsumerTransport(shelf) if place.role.consumes else None
