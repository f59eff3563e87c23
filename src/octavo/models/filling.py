"""How a checkpoint's tensors find their place in a built model, and how a finished one is saved and taken over.

Promises: a tensor that does not fit is refused with its name before anything of it is used; a linear layer is packed as
soon as its last piece has come.
Does not know: file formats, or any architecture.

The order of a load: `build_model` (on 'meta' or on the device) -> `materialize` when it was on meta -> a `Filling` that
takes every tensor of the checkpoint and finishes each linear layer as soon as it is complete. `wanted` says which pieces
must have come. Or `restore_state` with what `model_state` gave before.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from octavo.base.errors import LoadError
from octavo.models.build import Placeable, WeightTarget
from octavo.ops.pages import ModelMemory
from octavo.quant.api import Piece, as_piece, check_kind, check_shape


@runtime_checkable
class Finishable(Protocol):
    """A module with work to do once its weights are in: packing, tables."""

    def finish(self) -> None:
        """Called once, on the real device."""


@runtime_checkable
class Saveable(Protocol):
    """A module whose finished form can be saved and taken over, which saves placing and finishing."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """All that `restore` needs. Raises `NotImplementedError` when there is no such form."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors over as they are. Raises `KeyError` or `ValueError` for those of another."""


@runtime_checkable
class Sized(Protocol):
    """A module that knows better than its parameters how much memory it takes."""

    @property
    def num_bytes(self) -> int: ...


def wanted(model: nn.Module) -> frozenset[WeightTarget]:
    """Every piece that a checkpoint must bring."""
    return frozenset(_wanted(model, ""))


def _wanted(module: nn.Module, prefix: str) -> "list[WeightTarget]":
    if isinstance(module, Placeable):
        return [WeightTarget(prefix + name, shard) for name, shards in module.pieces().items() for shard in shards]
    own = [WeightTarget(prefix + name) for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        own += _wanted(child, f"{prefix}{name}.")
    return own


def expects(model: nn.Module, target: WeightTarget) -> tuple[int, ...]:
    """The shape of the checkpoint's tensor for one of the `wanted` pieces."""
    module = model.get_submodule(_module_of(target))
    parameter = target.parameter.rpartition(".")[2]
    if isinstance(module, Placeable):
        return module.expects(parameter, target.shard)
    return tuple(module.get_parameter(parameter).shape)


def check(model: nn.Module, target: WeightTarget, piece: Piece) -> None:
    """Whether `place` would take this tensor; nothing is read. Raises as `place` does, or `WrongKindError`."""
    _deliver(model, target, piece, check_only=True)


def place(model: nn.Module, target: WeightTarget, weight: torch.Tensor | Piece) -> None:
    """Give one checkpoint tensor to the model, which converts it to its own type.

    Raises `LoadError` when the model has no such parameter or the shapes disagree; both are named.
    """
    _deliver(model, target, as_piece(weight), check_only=False)


def _deliver(model: nn.Module, target: WeightTarget, piece: Piece, *, check_only: bool) -> None:
    module_name, _, parameter = target.parameter.rpartition(".")
    what = target.parameter + (f" (shard {target.shard})" if target.shard else "")
    try:
        module = model.get_submodule(module_name)
        if isinstance(module, Placeable):
            (module.check if check_only else module.place)(parameter, target.shard, piece)
        else:
            mine = module.get_parameter(parameter)
            check_kind(piece)
            check_shape(piece, tuple(mine.shape))
            if not check_only:
                with torch.no_grad():
                    mine.copy_(piece.rows(0, len(mine), mine.dtype))
    except (KeyError, AttributeError):
        raise LoadError(f"the checkpoint has a tensor for {what}, which this architecture does not have") from None
    except ValueError as error:
        raise LoadError(f"the checkpoint's tensor for {what} does not fit: {error}") from error


class Filling:
    """A model that is being filled: a linear layer is packed as soon as its last piece has come.

    Owns: which pieces are still to come, and which modules are finished.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._finished: set[int] = set()
        self._missing: dict[str, set[WeightTarget]] = {}
        for target in wanted(model):
            self._missing.setdefault(_module_of(target), set()).add(target)

    def place(self, target: WeightTarget, piece: Piece) -> None:
        """Give one piece; those of one layer are best given one after the other."""
        place(self._model, target, piece)
        name = _module_of(target)
        missing = self._missing.get(name, set())
        missing.discard(target)
        if not missing and self._missing.pop(name, None) is not None:
            module = self._model.get_submodule(name)
            if isinstance(module, Placeable):
                self._finish(module)

    def finish(self) -> None:
        """Everything is in: finish what is not."""
        self._finish(self._model)

    def _finish(self, root: nn.Module) -> None:
        for module in list(root.modules()):
            if isinstance(module, Finishable) and id(module) not in self._finished:
                self._finished.add(id(module))
                module.finish()


def _module_of(target: WeightTarget) -> str:
    return target.parameter.rpartition(".")[0]


def finish(model: nn.Module) -> None:
    """Let every module that has work after loading do it. Call once, when all weights are in."""
    Filling(model).finish()


# ---- memory and saved forms ---------------------------------------------------------------------


def materialize(model: nn.Module, memory: ModelMemory) -> None:
    """Give every parameter and buffer that was built on meta its memory; the content is undefined."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for owned in (module._parameters, module._buffers):
            for name, tensor in owned.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    room = memory.empty(tensor.shape, tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(room, requires_grad=False) if is_parameter else room
                owned[name] = made[id(tensor)]  # type: ignore[assignment]


def weight_bytes(model: nn.Module) -> int:
    """What parameters, packed weights and tables take, or will take while the model is on meta."""
    return _bytes_below(model)


def _bytes_below(module: nn.Module) -> int:
    if isinstance(module, Sized):
        return module.num_bytes
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(t.numel() * t.element_size() for t in own) + sum(_bytes_below(child) for child in module.children())


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The finished model's tensors by name. Raises `NotImplementedError` when a part cannot be saved."""
    return {
        f"{name}:{key}": tensor
        for name, module in _savers(model)
        for key, tensor in (module.state() if isinstance(module, Saveable) else _own(module)).items()
    }


def restore_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Make a model built on meta what the one was that gave `state`, over these tensors themselves.

    Buffers of modules that cannot be restored have their memory already. Raises `KeyError` or `ValueError` when the
    state is another model's; the model is of no use then.
    """
    by_module: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        owner, _, key = name.partition(":")
        by_module.setdefault(owner, {})[key] = tensor
    for name, module in _savers(model):
        mine = by_module.pop(name, {})
        if isinstance(module, Saveable):
            module.restore(mine)
        else:
            _take_over(module, mine)
    if by_module:
        raise KeyError(next(iter(by_module)))
    _finish_what_was_not_saved(model)


def _savers(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules with something to save; a `Saveable` speaks for all below it."""
    yield prefix, model
    if not isinstance(model, Saveable):
        for name, child in model.named_children():
            yield from _savers(child, f"{prefix}.{name}" if prefix else name)


def _finish_what_was_not_saved(module: nn.Module) -> None:
    if isinstance(module, Saveable):
        return
    for child in module.children():
        _finish_what_was_not_saved(child)
    if isinstance(module, Finishable):
        module.finish()


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.data for name, p in module.named_parameters(recurse=False)}


def _take_over(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    mine = dict(module.named_parameters(recurse=False))
    if mine.keys() != state.keys():
        raise KeyError(f"{sorted(state)} is not {sorted(mine)}")
    for name, tensor in state.items():
        if (tensor.shape, tensor.dtype) != (mine[name].shape, mine[name].dtype):
            raise ValueError(f"{name} is {tensor.dtype} of {list(tensor.shape)}")
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
