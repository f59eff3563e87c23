"""Which kernels compute: the native core at one of its levels, or PyTorch's own operators.

Promises: the one place that knows whether the native core is there; without it everything else works, and one note
says so.
Does not know: any operator, or which backend attends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from octavo.base.errors import ConfigError
from octavo.ops.registry import OP_NAMES, REFERENCE

try:
    from octavo.ops import native
except ImportError as error:  # built without a compiler, or for another processor
    NATIVE: Any = None
    WHY_NOT = str(error)
else:
    NATIVE = native
    WHY_NOT = ""

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What was chosen.

    `make_tape` writes native calls down (see `worker.recorded`); None where there are none. `forced` goes to
    `OpRegistry.bind`.
    """

    make_tape: Callable[[], Any] | None = None
    forced: Mapping[str, str] = field(default_factory=dict)
    attention_backend: str | None = None  # None: any
    notes: tuple[str, ...] = ()


def choose(name: str, device_kind: str) -> Kernels:
    """The kernels that `--kernels` names: "auto", "reference", or a level of instructions.

    A level counts for the whole process. Raises `ConfigError` when this machine cannot run it, or there is no core.
    """
    if name == REFERENCE:
        return Kernels(forced=dict.fromkeys(OP_NAMES, REFERENCE), attention_backend="torch_sdpa")
    if device_kind != "cpu":
        if name != AUTO:
            raise ConfigError(f"--kernels {name} is for the CPU; on {device_kind} it can be {AUTO} or {REFERENCE}")
        return Kernels()
    if NATIVE is None:
        if name != AUTO:
            raise ConfigError(f"--kernels {name} needs the native core, which is not there: {WHY_NOT}")
        return Kernels(notes=(f"the native core is not there ({WHY_NOT}): running on PyTorch's operators",))
    if name != AUTO:
        NATIVE.use_level(name)
    return Kernels(make_tape=NATIVE.core.Tape)
