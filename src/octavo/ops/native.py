"""The native core: the one importer of `octavo._native`.

Promises: importing this raises `ImportError` where the package was built without the core, and the operators' registry
then takes the references; torch is imported before it, so that both share one pool of compute threads.
Does not know: what any operator computes (see `native/` in the repository), or who chose it.

Functions of `core` take addresses (`tensor.data_ptr()`), sizes and strides in elements, and check nothing: their
wrappers in `ops.native_*` and `attention.cpu` do. Within `Tape.start` and `stop` they are written down instead of run.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from octavo import _native
from octavo.base.errors import ConfigError

core: Final[Any] = _native

DTYPES: Final[Mapping[torch.dtype, int]] = {  # as `octavo/types.h` numbers them
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.int8: 2,
    torch.uint8: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.float16: 6,
}

LINE_BYTES: Final = 64  # of a cache
APART_FROM_ROWS: Final = 64  # fewer rows than this lie side by side


def rows_apart(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty [rows, width] whose rows do not all fall into the same places of a cache.

    Many rows that begin a multiple of 512 bytes apart share a few sets of the first cache: a block of 32 of them pushes
    out what it is multiplied by. One more line between two rows costs at most an eighth more memory.
    """
    if rows < APART_FROM_ROWS or width * dtype.itemsize % (8 * LINE_BYTES):
        return torch.empty(rows, width, dtype=dtype)
    return torch.empty(rows, width + LINE_BYTES // dtype.itemsize, dtype=dtype)[:, :width]


def levels() -> tuple[str, ...]:
    """Instruction set levels that this machine can run, the best last."""
    return tuple(core.levels())


def use_level(name: str) -> None:
    """Take another level than the best. Raises `ConfigError` for one that this machine cannot run.

    Call it before weights are packed: each level has a layout of its own.
    """
    if not core.use_level(name):
        raise ConfigError(
            f"--kernels {name}: this machine's processor cannot run them; it can run {', '.join(levels())}"
        )
