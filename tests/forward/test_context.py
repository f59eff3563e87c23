"""The one ambient value (EXE-19, EXE-20)."""

import dataclasses
import threading

import pytest
import torch

from octavo.forward.context import BatchShape, ForwardContext, GroupPlan, current, entered, is_entered


def context(num_tokens=1):
    return ForwardContext(
        shape=BatchShape(num_tokens=num_tokens), groups=(GroupPlan(plan=None, slot_mapping=torch.zeros(1)),), layers=()
    )


def test_reading_it_when_unset_says_how_to_set_it():
    """EXE-19."""
    with pytest.raises(RuntimeError, match=r"with entered\(context\)"):
        current()


def test_nesting_restores_the_one_before():
    """EXE-19."""
    outer, inner = context(1), context(2)
    with entered(outer):
        with entered(inner):
            assert current() is inner
        assert current() is outer
    assert not is_entered()


def test_an_error_inside_restores_it_too():
    with pytest.raises(ValueError), entered(context()):
        raise ValueError
    assert not is_entered()


def test_each_thread_has_its_own():
    seen = []
    with entered(context()):
        thread = threading.Thread(target=lambda: seen.append(is_entered()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        context().groups = ()


def test_the_shape_is_a_key():
    """EXE-20."""
    assert {BatchShape(num_tokens=4): 1}[BatchShape(num_tokens=4)] == 1
    assert BatchShape(num_tokens=4) != BatchShape(num_tokens=4, num_rows=2)
