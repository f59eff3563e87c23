"""Importing torch without what only its compiler needs.

Promises: torch as it always is, but that some operators have no shape-only ("meta") version until `complete` was called
or something imports `torch._meta_registrations`, as torch's compiler does; a version of torch that was not tried is
imported whole. An engine's process starts a quarter of a second sooner, with 18 MiB less.
Does not know: who needs those versions (see `models.build`).
"""

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Final

TRIED: Final = ("2.13.",)  # beginnings of torch's version
_PARENT, _NAME = "torch", "_meta_registrations"
_FULL: Final = f"{_PARENT}.{_NAME}"


def import_torch() -> None:
    """Import torch, if this process has not done so. For a process of our own: others may build on the whole of it."""
    if _PARENT in sys.modules:
        return
    left_out = ModuleType(_FULL) if _is_tried() else None
    if left_out is not None:
        sys.modules[_FULL] = left_out  # torch imports it as the last thing, and uses nothing of it
    try:
        torch = importlib.import_module(_PARENT)
    finally:
        if left_out is not None and sys.modules.get(_FULL) is left_out:
            del sys.modules[_FULL]  # whoever imports it from now on gets it
    if left_out is not None and getattr(torch, _NAME, None) is left_out:
        delattr(torch, _NAME)
        _finish_generators(torch)


def _finish_generators(torch: ModuleType) -> None:
    """`torch.Generator` refuses to be made before what was left out has imported `torch._prims.rng_prims`, which says
    its last word about that class. That word alone costs nothing; said again by whoever imports the rest, it is the same.
    """
    base = importlib.import_module("torch._opaque_base")
    torch._C._set_generator_metaclass(base.OpaqueBaseMeta)


def complete() -> bool:
    """Import what was left out. False when nothing was."""
    if _FULL in sys.modules:
        return False
    importlib.import_module(_FULL)
    return True


def _is_tried() -> bool:
    try:
        return version(_PARENT).startswith(TRIED)
    except PackageNotFoundError:
        return False
