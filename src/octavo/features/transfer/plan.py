"""What the two halves of the feature say to each other: jobs down with a plan, reports up with a result.

Promises: a job is named by its number once, is reported once it has ended, however it ended, and is reported key by
key, so that what was good counts (TIR-16, PDX-4).
Does not know: who decided it, or how bytes move.

Words: a *chunk* is the KV of one block of one group in all its layers, or of several that follow each other, named by
its *key*: the last block's hash and the group (TIR-2). A *row* is a place for one chunk in the primary tier, in host memory. A *tier* is one of the secondary
ones, by its number in the order of lookup.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from octavo.base.step import PlanPart, ResultPart

NO_BLOCK: Final = 0  # in a copy: nothing is copied here


class TierJobKind(StrEnum):
    """What a secondary tier is asked."""

    FIND = "find"  # which of the keys are there
    READ = "read"  # copy their chunks to these rows
    WRITE = "write"  # copy the chunks of these rows there


class TierJob(msgspec.Struct, frozen=True, kw_only=True):
    """Work for one secondary tier; `rows` belong to `keys` one to one, and there are none to be found."""

    job: int
    tier: int
    kind: TierJobKind
    keys: tuple[bytes, ...]
    rows: tuple[int, ...] = ()


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks between KV blocks of one group and rows of the primary: as many blocks for each row as a chunk has, of
    which the null block stands for one that is not to be copied."""

    job: int
    group: int
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    rows: tuple[int, ...]


class TransferPlan(PlanPart, frozen=True, kw_only=True):
    """The feature's share of a step. Stores are read before the step writes anything; loads take their time."""

    stores: tuple[Copy, ...] = ()
    loads: tuple[Copy, ...] = ()
    tier_jobs: tuple[TierJob, ...] = ()


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at the start; 0, or no entry, where nothing could be (TIR-33)."""

    prompt_tokens_per_s: float = 0.0
    load_bytes_per_s: float = 0.0  # host memory to KV blocks
    store_bytes_per_s: float = 0.0  # the other way
    read_bytes_per_s: dict[str, float] = {}  # a tier, by name, to host memory

    @staticmethod
    def of(speeds: Mapping[str, float]) -> "Speeds":
        """From what the engine's start collects, which is flat: a tier's speed is called `tier_speed` of its name."""
        prefix = tier_speed("")
        tiers = {name.removeprefix(prefix): value for name, value in speeds.items() if name.startswith(prefix)}
        rest = {name: value for name, value in speeds.items() if not name.startswith(prefix)}
        return Speeds(read_bytes_per_s=tiers, **rest)


def tier_speed(name: str) -> str:
    """What the speed of reading from a tier is called among all that was measured."""
    return f"read_bytes_per_s.{name}"


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended: `good` says it of each key or row. `error` is for the log."""

    job: int
    good: tuple[bool, ...]
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class TransferReport(ResultPart, frozen=True, kw_only=True):
    """Jobs that have ended since the last report."""

    jobs: tuple[JobReport, ...] = ()
