"""Weight quantization: from what a user says and what a checkpoint says to one exact plan (QNT-1 to QNT-4).

Promises: every name is translated here, once; what this machine cannot run is refused by name before any weight is
read, with what it can run; a user's fields win over a short name's, field by field, and contradict no checkpoint.
Does not know: how weights are stored or multiplied (see `quant`).
"""

import dataclasses
import difflib
import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from octavo.base.errors import ConfigError
from octavo.config.facts_base import DeviceFacts, ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantKey:
    """What exactly is meant: types of weights, activations and scales, and what shares a scale.

    `activation` None: the model's own type. `group`: "tensor", "channel" (a row of the weight), a number of inputs, or
    "128x128". `dynamic`: activations' scales are measured as they come.
    """

    weight: str
    activation: str | None
    scale: str
    group: str | int
    symmetric: bool = True
    dynamic: bool = True


SHORT_NAMES: Final[Mapping[str, QuantKey]] = {
    "int8_per_channel": QuantKey(weight="int8", activation="int8", scale="float32", group="channel"),
    "int8_per_channel_weight_only": QuantKey(weight="int8", activation=None, scale="float32", group="channel"),
    "int4_group": QuantKey(weight="int4", activation="int8", scale="float16", group=32),
    "int4_group_weight_only": QuantKey(weight="int4", activation=None, scale="float16", group=32),
    "fp8_per_tensor": QuantKey(weight="fp8_e4m3", activation="fp8_e4m3", scale="float32", group="tensor"),
    "fp8_per_channel": QuantKey(weight="fp8_e4m3", activation="fp8_e4m3", scale="float32", group="channel"),
    "fp8_per_block": QuantKey(weight="fp8_e4m3", activation="fp8_e4m3", scale="float32", group="128x128"),
    "mxfp8": QuantKey(weight="fp8_e4m3", activation="fp8_e4m3", scale="e8m0", group=32),
    "mxfp4": QuantKey(weight="fp4_e2m1", activation=None, scale="e8m0", group=32),
    "nvfp4": QuantKey(weight="fp4_e2m1", activation="fp4_e2m1", scale="fp8_e4m3", group=16),
}
NONE: Final = "none"  # weights as floats in the model's type, whatever the checkpoint stores
GGUF: Final = "gguf"  # a GGUF file's block types as they are
ONLINE: Final = "online"  # rounded while the weights are read
COMPRESSED: Final = "compressed-tensors"
METHODS: Final = (
    "awq", "bitsandbytes", COMPRESSED, "fbgemm_fp8", "fp8", GGUF, "gptq", "hqq", "modelopt", "mxfp4", "quark", "torchao",
)  # fmt: skip
"""What checkpoints call their own methods."""
_HEAD: Final = "lm_head"
_FIELDS: Final = tuple(field.name for field in dataclasses.fields(QuantKey))
_BITS: Final = {"int8": 8, "int4": 4, "fp8_e4m3": 8, "fp4_e2m1": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantPlan:
    """How a model's linear weights are kept. `method` is none, gguf, online or compressed-tensors.

    Online: `default` for every layer but those that match `ignore` (kept as floats) or a pattern of `targets`; `head`
    for the output head. `text` is for people.
    """

    method: str = NONE
    default: QuantKey | None = None
    head: QuantKey | None = None
    ignore: tuple[str, ...] = ()
    targets: tuple[tuple[str, QuantKey], ...] = ()
    text: str = NONE

    def key_of(self, name: str) -> QuantKey | None:
        """The key of the layer that the checkpoint calls `name`; None: floats. The first target that matches wins."""
        if any(matches(pattern, name) for pattern in self.ignore):
            return None
        for pattern, key in self.targets:
            if matches(pattern, name):
                return key
        return self.head if name == _HEAD else self.default

    def check_names(self, names: Sequence[str]) -> None:
        """Raises `ConfigError` for a pattern that matches none of the model's layers (QNT-4)."""
        for pattern in (*self.ignore, *(pattern for pattern, _ in self.targets)):
            if not any(matches(pattern, name) for name in names):
                near = _near(pattern, names)
                raise ConfigError(f"--quantization: {pattern!r} matches no layer of this model; near it {near}")


def plan_quantization(option: str | None, facts: ModelFacts, device: DeviceFacts) -> QuantPlan:
    """What `--quantization` and the checkpoint mean together; nothing is read.

    Raises `ConfigError` for a name that does not exist, for what this device cannot run, and for an option that
    contradicts the checkpoint.
    """
    stored = facts.quantization
    if option is None:
        return QuantPlan() if stored is None else _of_checkpoint(stored, device)
    asked = _parse(option)
    if stored is None:
        return _online(asked, device)
    mine = _described(stored)
    if asked.name == _method(stored):
        return _of_checkpoint(stored, device)
    if asked.name == NONE and _method(stored) == GGUF:
        return QuantPlan()
    if asked.plain and _method(stored) == COMPRESSED and SHORT_NAMES.get(asked.name, stored) == _compressed_key(stored):
        return _of_checkpoint(stored, device)
    remedy = "leave it out to compute them as they are" if _method(stored) == GGUF else "leave it out"
    also = ", or say none to have them as floats" if _method(stored) == GGUF else ""
    raise ConfigError(
        f"--quantization {asked.name} contradicts the checkpoint, whose weights are quantized with {mine} "
        f"(asked for on {_place(device)}); {remedy}{also}, or take an unquantized checkpoint"
    )


def float_plan(facts: ModelFacts, device: DeviceFacts) -> QuantPlan:
    """The plan of one who says nothing about quantization and wants floats where the checkpoint can be had so."""
    stored = facts.quantization
    return QuantPlan() if stored is None or _method(stored) == GGUF else _of_checkpoint(stored, device)


def matches(pattern: str, name: str) -> bool:
    """A layer's name against an exact name, a glob, or `re:` and a regular expression for its beginning."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if any(mark in pattern for mark in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern == name


def supported(device: DeviceFacts) -> str:
    """What can be asked for on a device, in words."""
    names = [name for name, key in SHORT_NAMES.items() if _objection(key, device) is None]
    own = ["compressed-tensors (int8, channel scales, dynamic int8 activations)", "GGUF's types"] if names else []
    return ", ".join([*names, *own]) or "nothing but unquantized weights"


# ---- what a user says ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    name: str
    fields: Mapping[str, Any]
    head: Mapping[str, Any] | None
    ignore: tuple[str, ...]
    targets: tuple[tuple[str, Mapping[str, Any]], ...]

    @property
    def plain(self) -> bool:
        return not (self.fields or self.ignore or self.targets or self.head)


def _parse(option: str) -> _Asked:
    given: Any = {"scheme": option}
    if option.lstrip().startswith("{"):
        try:
            given = json.loads(option)
        except ValueError as error:
            raise ConfigError(f"--quantization is neither a name nor JSON: {error}") from None
    known = ("scheme", "linear", "moe", "head", "ignore", "targets", *_FIELDS)
    for name in given:
        if name not in known:
            raise ConfigError(f"--quantization: {_unknown('field', name, known)}")
    if given.get("targets") and (given.get("linear") or given.get("moe")):
        raise ConfigError("--quantization: targets and linear or moe exclude each other; say it by one of them")
    if given.get("moe"):
        raise ConfigError("--quantization: moe was given, but this engine has no mixture-of-experts models yet")
    linear = _fields(given.get("linear") or {}, "linear")
    own = {name: given[name] for name in _FIELDS if name in given}
    name = given.get("scheme") or linear.get("scheme")
    if name is None and not (own or linear):
        raise ConfigError(f"--quantization names no scheme; there are {', '.join(SHORT_NAMES)}")
    if name is not None and name not in (NONE, *SHORT_NAMES, *METHODS):
        raise ConfigError(_unknown("quantization", str(name), (NONE, *SHORT_NAMES, *METHODS)))
    targets = given.get("targets") or {}
    if not isinstance(targets, Mapping):
        raise ConfigError("--quantization: targets must be an object of patterns, each with a scheme or fields")
    head = given.get("head")
    return _Asked(
        name=str(name or "fields"),
        fields=_checked({**own, **{k: v for k, v in linear.items() if k != "scheme"}}),
        head=None if head is None else _fields(head, "head"),
        ignore=_patterns(given.get("ignore") or ()),
        targets=tuple((pattern, _fields(targets[pattern], pattern)) for pattern in _patterns(targets)),
    )


def _fields(value: Any, where: str) -> Mapping[str, Any]:
    """A short name, or an object of fields that may name one as its scheme."""
    value = {"scheme": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"--quantization: {where!r} must be a scheme's name or an object, got {value!r:.60}")
    for name in value:
        if name not in ("scheme", *_FIELDS):
            raise ConfigError(f"--quantization: {_unknown('field', str(name), ('scheme', *_FIELDS))}")
    scheme = value.get("scheme")
    if scheme is not None and scheme not in SHORT_NAMES:
        raise ConfigError(_unknown("quantization", str(scheme), tuple(SHORT_NAMES)))
    _checked({k: v for k, v in value.items() if k != "scheme"})
    return value


def _checked(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in fields.items():
        if name in ("symmetric", "dynamic"):
            fits = isinstance(value, bool)
        elif name == "group":
            fits = isinstance(value, str | int) and not isinstance(value, bool)
        else:
            fits = isinstance(value, str) or (name == "activation" and value is None)
        if not fits:
            raise ConfigError(f"--quantization: {name} cannot be {value!r:.60}")
    return fields


def _patterns(given: Any) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(f"--quantization: a pattern is a name, a glob or re:..., not {pattern!r:.60}")
        try:
            re.compile(pattern[3:] if pattern.startswith("re:") else "")
        except re.error as error:
            raise ConfigError(f"--quantization: {pattern!r} is no regular expression: {error}") from None
    return patterns


def _online(asked: _Asked, device: DeviceFacts) -> QuantPlan:
    if asked.name == NONE:
        return QuantPlan()
    if asked.name in METHODS and asked.name not in SHORT_NAMES:
        raise ConfigError(
            f"--quantization {asked.name} was asked for on {_place(device)}, but the checkpoint does not say that its weights "
            f"are stored so (no quantization_config in config.json); supported are {supported(device)}"
        )
    default = _key(SHORT_NAMES.get(asked.name), asked.fields, asked.name)
    _refuse_unless_it_runs(asked.name, default, device)
    targets = []
    for pattern, fields in asked.targets:
        scheme = fields.get("scheme")
        base = default if scheme is None else SHORT_NAMES[scheme]
        key = _key(base, {k: v for k, v in fields.items() if k != "scheme"}, pattern)
        _refuse_unless_it_runs(f"{scheme or asked.name} for {pattern}", key, device)
        targets.append((pattern, key))
    head = _head(asked, default)
    _refuse_unless_it_runs(f"{asked.name} for the head", head, device)
    return QuantPlan(
        method=ONLINE, default=default, head=head, ignore=asked.ignore, targets=tuple(targets), text=asked.name
    )


def _head(asked: _Asked, default: QuantKey) -> QuantKey:
    """A head in 4 bits costs more in quality than it saves; it has 8 unless it is asked for."""
    if asked.head is not None:
        scheme = asked.head.get("scheme")
        fields = {k: v for k, v in asked.head.items() if k != "scheme"}
        return _key(default if scheme is None else SHORT_NAMES[scheme], fields, "head")
    return SHORT_NAMES["int8_per_channel"] if _BITS.get(default.weight) == 4 else default


def _key(base: QuantKey | None, fields: Mapping[str, Any], where: str) -> QuantKey:
    """Fields that are set win over the short name's, one by one (QNT-2)."""
    if base is not None:
        return dataclasses.replace(base, **fields)
    if lacking := [name for name in ("weight", "activation", "scale", "group") if name not in fields]:
        raise ConfigError(f"--quantization: {where} lacks {', '.join(lacking)}; name a scheme whose values are taken")
    return QuantKey(**fields)


# ---- what a checkpoint says ---------------------------------------------------------------------


def _method(stored: Mapping[str, Any]) -> str:
    return str(stored.get("quant_method") or stored.get("quant_algo") or "an unnamed method")


def _of_checkpoint(stored: Mapping[str, Any], device: DeviceFacts) -> QuantPlan:
    method = _method(stored)
    if method == GGUF:
        return QuantPlan(method=GGUF, text="GGUF's own types")
    if method == COMPRESSED:
        key = _compressed_key(stored)
        if key is not None and _objection(key, device) is None and stored.get("format") in (None, "int-quantized"):
            ignore = tuple(str(name) for name in stored.get("ignore") or ())
            return QuantPlan(method=COMPRESSED, default=key, head=key, ignore=ignore, text=_described(stored))
    raise ConfigError(
        f"the checkpoint's weights are quantized with {_described(stored)}, which cannot run on {_place(device)}; "
        f"supported are {supported(device)}; nearest is {_nearest(_bits(stored), device)}"
    )


def _compressed_key(stored: Mapping[str, Any]) -> QuantKey | None:
    """The one key of all groups of a compressed-tensors checkpoint, if it is one that can be said by a key."""
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    group = next(iter(groups.values()))
    weights, inputs = (
        (group.get("weights") or {}, group.get("input_activations")) if isinstance(group, Mapping) else ({}, None)
    )
    kinds: dict[Any, str] = {("int", 8): "int8", ("int", 4): "int4", ("float", 8): "fp8_e4m3", ("float", 4): "fp4_e2m1"}
    weight = kinds.get((weights.get("type"), weights.get("num_bits")))
    if weight is None or group.get("output_activations") or list(group.get("targets") or ["Linear"]) != ["Linear"]:
        return None
    of = inputs or {}
    by_token = of.get("strategy") in (None, "token") and of.get("symmetric", True)
    return QuantKey(
        weight=weight,
        activation=kinds.get((of.get("type"), of.get("num_bits")), "?")
        if inputs and by_token
        else "?"
        if inputs
        else None,
        scale="float32",
        group=str(weights.get("group_size") or weights.get("strategy")),
        symmetric=bool(weights.get("symmetric", True)),
        dynamic=bool(of.get("dynamic", True)),
    )


def _described(stored: Mapping[str, Any]) -> str:
    """A method with what sets it apart: gptq (4 bits, groups of 128, act-order)."""
    method = _method(stored)
    if method == GGUF:
        types = stored.get("types") or {}
        return f"gguf ({', '.join(types)})" if types else GGUF
    more: list[str] = []
    if bits := _bits(stored):
        more.append(f"{bits} bits")
    if isinstance(size := stored.get("group_size"), int) and size > 0:
        more.append(f"groups of {size}")
    if stored.get("desc_act"):
        more.append("act-order")
    if kind := stored.get("bnb_4bit_quant_type") or stored.get("fmt") or stored.get("format"):
        more.append(str(kind))
    if size := stored.get("weight_block_size"):
        more.append(f"blocks of {'x'.join(str(n) for n in size)}" if isinstance(size, list) else str(size))
    known = "" if method in METHODS else ", a method that is not known here"
    return f"{method} ({', '.join(more)})" + known if more else method + known


def _bits(stored: Mapping[str, Any]) -> int | None:
    for name in ("bits", "w_bit", "num_bits"):
        if isinstance(bits := stored.get(name), int):
            return bits
    if stored.get("load_in_4bit") or "fp4" in str(stored.get("quant_algo") or stored.get("quant_method")).lower():
        return 4
    if stored.get("load_in_8bit") or "fp8" in str(stored.get("quant_algo") or stored.get("quant_method")).lower():
        return 8
    groups = stored.get("config_groups")
    if isinstance(groups, Mapping):
        for group in groups.values():
            if isinstance(group, Mapping) and isinstance(bits := (group.get("weights") or {}).get("num_bits"), int):
                return bits
    return None


# ---- what a device can run ----------------------------------------------------------------------


def _objection(key: QuantKey, device: DeviceFacts) -> str | None:
    """Why a key cannot run on a device, in words; None when it can."""
    if device.kind != "cpu":
        return "there are no kernels for it"
    if key.weight not in ("int8", "int4"):
        return f"there are no kernels for weights in {key.weight}"
    if key.activation != "int8" or not key.dynamic:
        return f"activations are int8 with dynamic scales, not {key.activation or 'floats'}{'' if key.dynamic else ' with static ones'}"
    if key.weight == "int8" and (key.group != "channel" or not key.symmetric):
        return "int8 weights have one scale for a channel and are symmetric"
    if key.weight == "int4" and str(key.group) != "32":
        return f"int4 weights have groups of 32, not {key.group}"
    if key.scale != {"int8": "float32", "int4": "float16"}[key.weight]:
        return f"{key.weight} weights have no scales in {key.scale}"
    return None


def _refuse_unless_it_runs(name: str, key: QuantKey, device: DeviceFacts) -> None:
    if (why := _objection(key, device)) is not None:
        raise ConfigError(
            f"--quantization {name} cannot run on {_place(device)}: {why}; supported are {supported(device)}; "
            f"nearest is {_nearest(_BITS.get(key.weight), device, online=True)}"
        )


def _nearest(bits: int | None, device: DeviceFacts, *, online: bool = False) -> str:
    name = "int4_group" if bits is not None and bits <= 4 else "int8_per_channel"
    if _objection(SHORT_NAMES[name], device) is not None:
        return "an unquantized checkpoint"
    return f"--quantization {name}" if online else f"an unquantized checkpoint with --quantization {name}"


def _place(device: DeviceFacts) -> str:
    return f"{device.kind} ({device.name})"


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"there are {', '.join(known)}"
    return f"there is no {what} named {name!r}; {hint}"


def _near(pattern: str, names: Iterable[str]) -> str:
    """Names like a pattern that matches none: by the whole, or by the last part."""
    words = pattern.removeprefix("re:")
    known = list(dict.fromkeys(names))
    leaves = {name.rpartition(".")[2]: name for name in known}
    wanted = re.sub(r"[^\w.]", "", words).rpartition(".")[2] or words
    near = [leaves[leaf] for leaf in difflib.get_close_matches(wanted, leaves, n=3, cutoff=0.6)]
    found = list(dict.fromkeys([*difflib.get_close_matches(words, known, n=3, cutoff=0.5), *near]))[:4] or known[:4]
    return f"are {', '.join(found)}"
