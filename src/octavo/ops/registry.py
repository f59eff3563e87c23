"""All operators by name, their implementations, and the choice for one device.

Promises: importing this never fails for a missing library, since implementations are "module:function" strings
until chosen; a caller holds the chosen function itself, so a call costs nothing extra; an implementation with
other parameters than the reference is refused (QNT-20, QNT-21).
Does not know: how any operator is computed.

To add a fast version: a line in `BUILT_IN`, or `OpRegistry.register` for one from outside. To add an operator: a function in
`ops.reference`, a `Protocol` and a field of `Ops` here, and a test against a plain loop.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

import torch

from octavo.base.errors import ConfigError, OctavoError
from octavo.config.facts import DeviceFacts
from octavo.ops.quantized import QuantizedLinear, QuantizeRows
from octavo.plugins.registry import load_target, unknown_name


class Multiply(Protocol):
    """[T, in] -> [T, out]. `packed` is True when it keeps the weight in a form of its own, so that the tensor it
    was made from may go."""

    @property
    def packed(self) -> bool: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Linear(Protocol):
    """Makes the multiplication by one weight; `out_dtype` is the result's type, x's when None."""

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Multiply: ...


class RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class AddRmsNorm(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Pointwise(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Rotary(Protocol):
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class WriteKV(Protocol):
    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None: ...


class GatherRows(Protocol):
    def __call__(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The operators of one device, chosen once. What each computes stands in `ops.reference`."""

    linear: Linear
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    silu_mul: Pointwise
    gelu_mul: Pointwise
    gelu_tanh_mul: Pointwise
    rotary: Rotary
    write_kv: WriteKV
    gather_rows: GatherRows
    quantized_linear: QuantizedLinear
    quantize_rows: QuantizeRows


OP_NAMES = tuple(field.name for field in fields(Ops))
REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to compute an operator, and where it can.

    `function` is the function, or "module:function" to be imported when chosen; a class is instantiated then, once a
    `bind`, so that what it keeps (memory for packed weights) belongs to one model. `devices` are kinds of device
    (empty: any), `capability` must all be among the device's, `dtypes` are the model's types (empty: any).
    Shapes that a version has no code for are its own matter: it calls the reference for them.
    """

    name: str
    function: "str | Callable[..., Any]"
    devices: tuple[str, ...] = ()
    capability: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()

    def objections(self, device: DeviceFacts, dtype: torch.dtype) -> tuple[str, ...]:
        """Why it cannot serve, in words; empty when it can."""
        out = []
        if self.devices and device.kind not in self.devices:
            out.append(f"runs on {', '.join(self.devices)}, not on {device.kind}")
        if lacking := [c for c in self.capability if c not in device.capability]:
            out.append(f"needs {', '.join(lacking)}")
        if self.dtypes and dtype not in self.dtypes:
            out.append(f"has no {dtype_name(dtype)}")
        return tuple(out)


@dataclass(frozen=True, slots=True)
class OpChoice:
    """What was chosen for one operator, and why the ones before it were not."""

    op: str
    implementation: str
    passed_over: Mapping[str, tuple[str, ...]]


FLOATS: Final = (torch.float32, torch.bfloat16)


def _native(function: str, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Implementation:
    return Implementation(name="native", function=f"octavo.ops.{function}", devices=("cpu",), dtypes=dtypes)


BUILT_IN: Final[tuple[tuple[str, Implementation], ...]] = (
    ("rms_norm", _native("native_norms:rms_norm")),
    ("add_rms_norm", _native("native_norms:add_rms_norm")),
    ("silu_mul", _native("native_pointwise:silu_mul")),
    ("gelu_mul", _native("native_pointwise:gelu_mul")),
    ("gelu_tanh_mul", _native("native_pointwise:gelu_tanh_mul")),
    ("rotary", _native("native_rotary:rotary")),
    ("write_kv", _native("native_rotary:write_kv")),
    ("gather_rows", _native("native_gather:gather_rows")),
    ("linear", _native("native_linear:NativeLinear")),
    ("quantized_linear", _native("native_qlinear:NativeQuantizedLinear")),
    ("quantize_rows", _native("native_qlinear:quantize_rows")),
)
"""(operator, implementation) of the fast versions in this package, the most wanted last; none is imported here."""


class OpRegistry:
    """Implementations of every operator, in order of preference; the reference comes last.

    Owns: the lists of implementations.
    """

    def __init__(self, known: Iterable[tuple[str, Implementation]] = BUILT_IN) -> None:
        self._implementations = {
            op: [Implementation(name=REFERENCE, function=f"octavo.ops.reference:{op}")] for op in OP_NAMES
        }
        for op, implementation in known:
            self.register(op, implementation)

    def register(self, op: str, implementation: Implementation) -> None:
        """Put `implementation` before all others of `op`; one of the same name is replaced.

        Raises `ConfigError` for an unknown operator, and for a function whose parameters are not the
        reference's (for a "module:function" string that is found out when it is chosen).
        """
        if op not in self._implementations:
            raise ConfigError(unknown_name("operator", op, OP_NAMES))
        if implementation.name == REFERENCE:
            raise ConfigError(
                f"the reference of operator {op!r} cannot be replaced: it is what the others are tested by"
            )
        if not isinstance(implementation.function, str):
            _check_parameters(op, implementation, implementation.function)
        others = [i for i in self._implementations[op] if i.name != implementation.name]
        self._implementations[op] = [implementation, *others]

    def implementations(self, op: str) -> tuple[Implementation, ...]:
        """All implementations of `op`, the most wanted first."""
        return tuple(self._implementations[op])

    def bind(self, device: DeviceFacts, dtype: torch.dtype, *, forced: Mapping[str, str] | None = None) -> Ops:
        """The first implementation of each operator that can serve; `forced` names one by operator."""
        return self.bind_explained(device, dtype, forced=forced)[0]

    def bind_explained(
        self, device: DeviceFacts, dtype: torch.dtype, *, forced: Mapping[str, str] | None = None
    ) -> tuple[Ops, tuple[OpChoice, ...]]:
        """As `bind`, with what was chosen and why."""
        forced = forced or {}
        for op in forced:
            if op not in self._implementations:
                raise ConfigError(unknown_name("operator", op, OP_NAMES))
        functions, choices = {}, []
        for op in OP_NAMES:
            functions[op], choice = self._choose(op, device, dtype, forced.get(op))
            choices.append(choice)
        return Ops(**functions), tuple(choices)

    def _choose(
        self, op: str, device: DeviceFacts, dtype: torch.dtype, forced: str | None
    ) -> tuple[Callable[..., Any], OpChoice]:
        candidates = self._implementations[op]
        if forced is not None:
            candidates = [i for i in candidates if i.name == forced]
            if not candidates:
                known = [i.name for i in self._implementations[op]]
                raise ConfigError(unknown_name(f"implementation of {op}", forced, known))
        passed_over: dict[str, tuple[str, ...]] = {}
        for implementation in candidates:
            objections = implementation.objections(device, dtype)
            if not objections:
                try:
                    return _resolve(op, implementation), OpChoice(op, implementation.name, passed_over)
                except OctavoError:
                    raise
                except Exception as error:  # a library that is not there is a reason like any other
                    objections = (f"could not be loaded: {error}",)
            passed_over[implementation.name] = objections
        reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in passed_over.items())
        raise ConfigError(f"no implementation of operator {op!r} can serve: {reasons}")


def _resolve(op: str, implementation: Implementation) -> Callable[..., Any]:
    if not isinstance(implementation.function, str):
        return implementation.function
    function: Callable[..., Any] = load_target(implementation.function)
    if isinstance(function, type):
        function = function()
    _check_parameters(op, implementation, function)
    return function


def _check_parameters(op: str, implementation: Implementation, function: Callable[..., Any]) -> None:
    want = tuple(inspect.signature(load_target(f"octavo.ops.reference:{op}")).parameters)
    try:
        got = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise ConfigError(f"{implementation.name!r} for operator {op!r} has no readable signature; wrap it") from None
    if got != want:
        raise ConfigError(
            f"{implementation.name!r} cannot serve operator {op!r}: its parameters are ({', '.join(got)}) "
            f"and must be ({', '.join(want)})"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")
