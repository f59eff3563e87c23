"""Groups of ranks, and moving tensors inside one.

Promises: a group of one rank is a no-op that copies nothing, so a single device pays nothing for parallelism.
Does not know: what the ranks are used for (see `distributed.context`).
"""

from dataclasses import dataclass
from typing import Protocol

import torch


class Group(Protocol):
    """Ranks that exchange tensors. `rank` is this process's place, `0 <= rank < size`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x` (same shape on all); may reuse `x`'s memory."""

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Every rank's `x` joined along `dim`, in rank order."""

    def send(self, x: torch.Tensor, to: int) -> None:
        """Give `x` to rank `to` of this group."""

    def recv(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """Take a tensor shaped like `like` from rank `source` of this group."""


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """The group of one rank."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        raise RuntimeError(f"a group of one rank has nobody to send to (asked for rank {to})")

    def recv(self, like: torch.Tensor, source: int) -> torch.Tensor:
        raise RuntimeError(f"a group of one rank has nobody to receive from (asked for rank {source})")


def split_evenly(total: int, group: Group, what: str) -> int:
    """`total / group.size`; a `ValueError` that names `what` when it does not divide."""
    if total % group.size:
        raise ValueError(f"{what} ({total}) cannot be split over {group.size} ranks")
    return total // group.size
