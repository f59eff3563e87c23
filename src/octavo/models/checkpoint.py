"""A checkpoint's tensors against the model that they are for.

Promises: whatever is missing, does not fit or would be lost is found from headers and named; where a configuration ties
the head to the embeddings and the file holds another head, the file is right, as in Transformers.
Does not know: file formats, how a model is filled, or any architecture.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import nn

from octavo.base.errors import LoadError
from octavo.config.facts import ModelFacts
from octavo.models.build import Placeable, WeightMap, WeightTarget
from octavo.models.filling import check, wanted
from octavo.models.weights import StoredTensor
from octavo.quant.api import WrongKindError

_QUANTIZED_ENDINGS = (
    ".qweight",
    ".qzeros",
    ".scales",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".absmax",
)

_ROWS: Final = 4096  # compared at a time


def separate_head(facts: ModelFacts, weight_map: WeightMap, stored: Sequence[StoredTensor]) -> str | None:
    """What to say where the head is stored apart although the configuration ties it; None where it is not."""
    by_name = {tensor.name: tensor for tensor in stored}
    for name, other in weight_map.tied.items():
        if name in by_name and other in by_name and not _are_equal(by_name[name], by_name[other]):
            return (
                f"{facts.source}: config.json ties {name} to {other} (tie_word_embeddings), but the file holds both and "
                "they differ: each is used as it is stored"
            )
    return None


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape or one.kind != other.kind:
        return False
    for first in range(0, one.shape[0], _ROWS):
        count = min(_ROWS, one.shape[0] - first)
        if not torch.equal(one.rows(first, count), other.rows(first, count)):
            return False
    one.forget()
    other.forget()
    return True


def check_checkpoint(
    model: nn.Module, facts: ModelFacts, weight_map: WeightMap, stored: Iterable[StoredTensor]
) -> tuple[list[tuple[StoredTensor, WeightTarget]], tuple[str, ...]]:
    """Where each tensor goes, layer by layer, and warnings about those that go nowhere; nothing is read.

    Raises `LoadError` when a tensor is missing, of a wrong shape, or not made of floats, and for one that belongs to a
    part of the model which makes no use of it: answers would be another model's.
    """
    missing = set(wanted(model))
    places: list[tuple[StoredTensor, WeightTarget]] = []
    extra: list[StoredTensor] = []
    for tensor in stored:
        target = weight_map.target(tensor.name)
        if target is None:
            continue
        if target in missing:
            _check_one(model, facts, tensor, target)
            missing.discard(target)
            places.append((tensor, target))
        elif _takes(model, target, tensor):
            places.append((tensor, target))
        else:
            extra.append(tensor)
    if missing:
        raise LoadError(_missing_message(facts, weight_map, missing, [t.stored_name for t in extra]))
    if lost := [t.stored_name for t in extra if _is_part_of(model, facts, weight_map, t) and not _adds_nothing(t)]:
        raise LoadError(_lost_message(facts, lost))
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    places.sort(key=lambda place: order[place[1].parameter.rpartition(".")[0]])
    return places, (_extra_message(facts, [t.stored_name for t in extra]),) if extra else ()


def _check_one(model: nn.Module, facts: ModelFacts, tensor: StoredTensor, target: WeightTarget) -> None:
    where = f"tensor {tensor.stored_name!r} in {tensor.file.path}"
    try:
        check(model, target, tensor)
    except LoadError as error:
        if isinstance(error.__cause__, WrongKindError):
            hint = "the weights look quantized, but config.json has no quantization_config"
            raise LoadError(
                f"{where} has type {tensor.kind}, but {facts.architecture} needs floats there: {hint}"
            ) from None
        why = str(error).partition("does not fit: ")[2] or str(error)
        raise LoadError(f"{where} does not fit {facts.architecture}: {why} (config.json of another model?)") from None


def _takes(model: nn.Module, target: WeightTarget, tensor: StoredTensor) -> bool:
    """True when a module accepts this tensor although it needs none, such as GGUF's rotary divisors."""
    try:
        if not isinstance(model.get_submodule(target.parameter.rpartition(".")[0]), Placeable):
            return False
        check(model, target, tensor)
    except (AttributeError, LoadError):
        return False
    return True


def _is_part_of(model: nn.Module, facts: ModelFacts, weight_map: WeightMap, tensor: StoredTensor) -> bool:
    """True for what the model's own layers would compute with: a bias of one of its modules, or a norm beside them.

    False for parts that are not built at all, such as an encoder, or layers after the last: Transformers leaves them out
    with a warning too. A GGUF file holds nothing but the model, so all of its tensors are parts.
    """
    if facts.format == "gguf" and not tensor.known:
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        return layer is None or int(layer[1]) < facts.num_layers
    target = weight_map.target(tensor.name)
    module = "" if target is None else target.parameter.rpartition(".")[0]
    parent, _, leaf = module.rpartition(".")
    return _has(model, module) or ("norm" in leaf and _has(model, parent))


def _has(model: nn.Module, module: str) -> bool:
    if not module:
        return False
    try:
        model.get_submodule(module)
    except AttributeError:
        return False
    return True


def _adds_nothing(tensor: StoredTensor) -> bool:
    """A bias of zeros, which some tools write for every layer."""
    return tensor.name.endswith(".bias") and len(tensor.shape) == 1 and not tensor.rows(0, tensor.shape[0]).any()


def _lost_message(facts: ModelFacts, lost: list[str]) -> str:
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"{facts.source} holds the tensor {lost[0]!r}{more}, and {facts.architecture} has no use for it as this model is "
        "configured: answers without it would be another model's (config.json of another model, or an architecture that "
        "is not supported?)"
    )


def _missing_message(facts: ModelFacts, weight_map: WeightMap, missing: set[WeightTarget], extra: list[str]) -> str:
    names = sorted(_checkpoint_name(target, weight_map) for target in missing)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if any(name.endswith(_QUANTIZED_ENDINGS) for name in extra):
        why = "its tensors look quantized, but config.json has no quantization_config"
    elif extra:
        why = (
            f"it has others that {facts.architecture} does not know, such as {extra[0]}: config.json of another model?"
        )
    else:
        why = "an interrupted download? fetch it again"
    return f"{facts.source} lacks {len(names)} tensors that {facts.architecture} needs: {shown} ({why})"


def _extra_message(facts: ModelFacts, extra: list[str]) -> str:
    shown = ", ".join(sorted(extra)[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
    return f"{len(extra)} tensors of the checkpoint have no place in {facts.architecture} and were left out: {shown}"


def _checkpoint_name(target: WeightTarget, weight_map: WeightMap) -> str:
    """The checkpoint's name of what goes to `target`."""
    module, _, ending = target.parameter.rpartition(".")
    parent, _, ours = module.rpartition(".")
    for leaf, fused in weight_map.fused.items():
        if fused == (ours, target.shard):
            return f"{parent}.{leaf}.{ending}"
    return target.parameter
