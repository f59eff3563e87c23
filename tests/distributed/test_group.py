"""One rank pays nothing for parallelism."""

import pytest
import torch

from octavo.distributed.context import ParallelContext
from octavo.distributed.group import SingleGroup, split_evenly


def test_one_rank_moves_nothing():
    group, x = SingleGroup(), torch.ones(2)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is x and group.all_gather(x, 0) is x
    with pytest.raises(RuntimeError, match="nobody to send to"):
        group.send(x, 1)
    with pytest.raises(RuntimeError, match="nobody to receive from"):
        group.recv(x, 1)


def test_a_single_context_has_one_rank_in_every_group():
    context = ParallelContext.single()
    assert all(getattr(context, name).size == 1 for name in ("tp", "pp", "dp", "ep", "cp"))


def test_splits_are_even_or_named():
    assert split_evenly(9, SingleGroup(size=3), "heads") == 3
    with pytest.raises(ValueError, match=r"heads \(8\) cannot be split over 3 ranks"):
        split_evenly(8, SingleGroup(size=3), "heads")
