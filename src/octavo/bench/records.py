"""The comparison's file: one JSON object a line, written as soon as it is known.

Promises: a run that is cut off loses at most the measurement it was in; a file can be continued; a half-written last
line is dropped.
Does not know: how anything was measured.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from octavo.base.errors import ConfigError

SAMPLE_DIGITS = 6  # of a second


class About(msgspec.Struct, frozen=True, kw_only=True, tag="about"):
    """Where and with what a session of measurements ran."""

    time: str
    machine: dict[str, str]
    versions: dict[str, str]
    arguments: dict[str, Any]


class Probed(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """The machine's limits, once."""

    before: str  # what was measured next
    read_gb_s: float | None = None
    bf16_gflop_s: float | None = None
    int8_gop_s: float | None = None


class BenchRun(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """One work on one peer in one round, or why it failed. `requests` are the samples of every request."""

    work: str
    model: str
    width: str
    peer: str
    round: int
    values: dict[str, tuple[float, ...]] = {}
    error: str | None = None
    rate: float | None = None  # requests a second that W5's loads are shares of
    seconds: float = 0.0
    requests: list[list[dict[str, Any]]] = []  # by run of the work

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What it measured."""
        return (self.work, self.model, self.width, self.peer, self.round)


Record = About | Probed | BenchRun


class RecordLog:
    """All records of one file.

    Owns: the records read and written, and the file's end.
    """

    def __init__(self, path: Path | None, *, append: bool) -> None:
        self.records: list[Record] = []
        self._path = path
        if path is None:
            return
        if append and path.exists():
            self.records = _read(path)
            _write(path, self.records)  # without a half-written end
        else:
            _write(path, ())

    @property
    def runs(self) -> tuple[BenchRun, ...]:
        """The runs, a later one of the same key in place of an earlier."""
        return tuple({run.key: run for run in self.records if isinstance(run, BenchRun)}.values())

    @property
    def probes(self) -> tuple[Probed, ...]:
        """The probes."""
        return tuple(record for record in self.records if isinstance(record, Probed))

    def done(self, work: str, model: str, width: str, peer: str, round_: int) -> bool:
        """True when this was measured; what failed is to be tried again."""
        return any(run.key == (work, model, width, peer, round_) and run.error is None for run in self.runs)

    def add(self, record: Record) -> None:
        """Keep and write one record."""
        self.records.append(record)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(record) + b"\n")


def _read(path: Path) -> list[Record]:
    decoder = msgspec.json.Decoder(Record)
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            if number == len(lines):  # no newline after it: it was cut off
                continue
            raise ConfigError(f"line {number} of {path} is not a record of a comparison ({error}).") from None
    return found


def _write(path: Path, records: Iterable[Record]) -> None:
    try:
        path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}.") from None


def plain_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample's fields as JSON has them, times rounded and what says nothing left out: null and false, but not 0."""
    return {key: _rounded(value) for key, value in sample.items() if value is not None and value is not False}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, SAMPLE_DIGITS)
    if isinstance(value, int | str):
        return value
    return [round(v, SAMPLE_DIGITS) for v in value]
