"""The one ambient value: what a step's layers need beyond their arguments.

Promises: complete before it is entered, frozen, keyed by KV group index and integer layer id; reading it when none
is entered is an error that says how to enter one (EXE-19).
Does not know: what a backend's plan holds, or who builds the context.

Readers: `attention.layer` (and later `layers.moe` and state layers). Nobody else.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What a compiled or captured step depends on, and nothing else: the key of its dispatch (EXE-20)."""

    num_tokens: int  # padding included
    num_rows: int | None = None  # None: any number
    uniform: bool = False  # every row has the same number of new tokens
    num_adapters: int = 0  # set by adapters (LoRA), once they are served


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One KV group's share of a step: the backend's own plan, and each token's slot.

    `slot_mapping` is int64 [T]: block * block_size + offset, -1 for padding.
    """

    plan: object
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBinding:
    """One layer's KV memory: views [blocks, kv heads, block size, head dim], perhaps not contiguous.

    Of a type that is scaled (`KVSpec.is_scaled`) the scales are float32 [blocks, kv heads, block size].
    """

    key: torch.Tensor
    value: torch.Tensor
    group: int
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


LayerTable = Sequence[LayerBinding]  # by layer id; made once, after the memory was allocated


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """What one forward pass needs; a new need is a new typed field."""

    shape: BatchShape
    groups: tuple[GroupPlan, ...]
    layers: LayerTable


class _Ambient(threading.local):
    """Owns: this thread's current context."""

    context: ForwardContext | None = None


_ambient = _Ambient()


def current() -> ForwardContext:
    """This thread's context. Raises `RuntimeError` when none is entered."""
    context = _ambient.context
    if context is None:
        raise RuntimeError("no forward context: run the model inside `with entered(context):` (octavo.forward.context)")
    return context


def is_entered() -> bool:
    """True inside `entered`, in this thread."""
    return _ambient.context is not None


@contextmanager
def entered(context: ForwardContext) -> Iterator[ForwardContext]:
    """Set this thread's context for the block, and restore the one before it."""
    before = _ambient.context
    _ambient.context = context
    try:
        yield context
    finally:
        _ambient.context = before
