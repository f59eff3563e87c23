"""Which groups this rank belongs to, by kind of parallelism.

Promises: frozen, built once, passed down; parallelism is visible in signatures.
Does not know: how the groups move tensors.
"""

from dataclasses import dataclass

from octavo.distributed.group import Group, SingleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """The groups of one rank: tensor, pipeline, data, expert and context parallel."""

    tp: Group
    pp: Group
    dp: Group
    ep: Group
    cp: Group

    @classmethod
    def single(cls) -> "ParallelContext":
        """One rank in every group."""
        one = SingleGroup()
        return cls(tp=one, pp=one, dp=one, ep=one, cp=one)
