"""Options from the command line, the environment, a YAML file or Python keywords, all from one definition.

Promises: every field of `config.schema` gets a flag, a variable, a key and a keyword of one name; a name that
does not exist is an error with the nearest one; each value remembers where it came from.
Does not know: what values are sensible together (see `config.resolve`).

Precedence: command line or Python keyword, then environment, then YAML file, then the default.
"""

import argparse
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import yaml

from octavo.base.errors import ConfigError
from octavo.base.numbers import whole
from octavo.base.params import shown
from octavo.config.env import NAMES, PREFIX, Env
from octavo.config.schema import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    PluginConfig,
    SchedulerConfig,
    ServerConfig,
)

ENGINE_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "plugins": PluginConfig,
}
SERVER_SECTIONS: dict[str, type] = {**ENGINE_SECTIONS, "server": ServerConfig}

Sections = Callable[[], Mapping[str, type]]

MAX_WAIT_S = 86_400.0 * 365  # longer waits overflow in the event loop's clock
MIN_KEEP_ALIVE_S = 0.01  # a shorter silence would be nothing but comments; no other wait is shorter either

MISSPELLED = 0.8  # how alike two names are of which one is taken for the other
SERVICE_LINK = "tcp://"  # how the value begins that Kubernetes gives to NAME_PORT for every service of a namespace

_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kKmMgGtT]?)(i?)[bB]?\s*")
_COUNT = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kKmM]?)(i?)\s*")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Option:
    """One field of the schema, seen as an option."""

    name: str  # Python keyword and YAML key: max_model_len
    section: str
    type: Any
    default: Any
    help: str
    unit: str
    choices: tuple[str, ...]
    kind: str
    several: bool  # one flag may be followed by several values
    value: str  # what help calls its value, where the type does not say it

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def plain_type(self) -> Any:
        """Its type where it is set."""
        if isinstance(self.type, types.UnionType):
            return next(a for a in typing.get_args(self.type) if a is not type(None))
        return self.type

    @property
    def shown_default(self) -> str:
        """Its default as somebody would write it; empty when it is not set."""
        if self.default is None:
            return ""
        if self.plain_type is bool:
            return "on" if self.default else "off"
        if self.kind == "size":
            return shown_size(self.default)
        return f"{self.default:g}" if self.plain_type is float else f"{self.default}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return "OCTAVO_" + self.name.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Options that somebody set: name -> value, and name -> who (`flag`, `environment`, `file`, `keyword`)."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    notices: tuple[str, ...] = ()  # what whoever set them should hear, a sentence each
    features: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # a feature's options, where any was set


def options(sections: Mapping[str, type]) -> dict[str, Option]:
    """All options of these sections by name, in schema order."""
    found: dict[str, Option] = {}
    for section, kind in sections.items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            meta = field.metadata
            found[field.name] = Option(
                field.name, section, hints[field.name], field.default, meta["help"], meta["unit"],
                tuple(meta["choices"]), meta.get("kind", ""), meta.get("several", False), meta.get("value", ""),
            )  # fmt: skip
    return found


def parse_size(text: str | int, name: str) -> int:
    """Bytes of '2GiB', '512M', '1.5g' or a plain number; powers of 1024."""
    match = _SIZE.fullmatch(_text(text))
    if not match:
        raise ConfigError(f"{name} must be a size such as 2GiB or 512MiB, got {shown(text)}.")
    return int(Fraction(match[1]) * 1024 ** _POWERS[match[2].lower()])


def shown_size(size: int) -> str:
    """Bytes in the largest unit that divides them: 8GiB."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return f"{size}"


def parse_count(text: str | int, name: str) -> int:
    """A whole number; '8k' is 8,000 and '8Ki' is 8,192."""
    match = _COUNT.fullmatch(_text(text))
    count = Fraction(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()] if match else Fraction(1, 2)
    if count.denominator != 1:
        raise ConfigError(f"{name} must be a whole number such as 4096 or 8k, got {shown(text)}.")
    return int(count)


def convert(option: Option, value: Any, name: str | None = None) -> Any:
    """A value for this option from text or a Python value; raises `ConfigError` naming the flag, or `name`."""
    name = name or option.flag
    if value is None:
        return None
    if option.kind == "size":
        return parse_size(value, name)
    if option.kind == "count":
        return parse_count(value, name)
    if option.kind == "list":
        return _to_texts(value, name)
    plain = option.plain_type
    result = _to_bool(value, name) if plain is bool else _to_plain(plain, value, name)
    if option.choices and result not in option.choices:
        near = nearest(str(result), option.choices)
        hint = f" Did you mean {near}?" if near else ""
        raise ConfigError(f"{name} must be one of {', '.join(option.choices)}, got {shown(value)}.{hint}")
    return result


def _text(value: object) -> str:
    return "" if isinstance(value, bool) else shown(value) if isinstance(value, int) else str(value)


def _to_texts(value: Any, name: str) -> tuple[str, ...]:
    """One text or several, none of them empty: an empty key, say, would be one that anybody has."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise ConfigError(f"{name} must be text, or a list of texts, got {shown(value)}.")
    found = tuple(str(text) for text in texts)
    for text in found:
        _check_text(text, name)
    if not found or not all(found):
        raise ConfigError(f"{name} must not be empty; leave it out instead.")
    return found


def _check_text(text: str, name: str) -> None:
    """Bytes that are no text cannot be sent to the engine's process, shown to clients, or opened by every library."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{name} must be text in UTF-8, got {shown(text)}; give a path another name, or a link."
        ) from None


def _to_bool(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if (text := str(value).strip().lower()) in known:
        return known[text]
    raise ConfigError(f"{name} must be true or false, got {shown(value)}.")


def _to_plain(kind: Any, value: Any, name: str) -> Any:
    words = {int: "a whole number", float: "a number", str: "text"}
    try:
        if isinstance(value, bool | list | tuple | dict) or (
            kind is int and whole(value) is None and not isinstance(value, str)
        ):
            raise ValueError
        plain = kind(value)
        if kind is float and not math.isfinite(plain):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} must be {words.get(kind, kind)}, got {shown(value)}.") from None
    if kind is str:
        _check_text(plain, name)
    if plain == "":
        raise ConfigError(f"{name} must not be empty; leave it out instead.")
    return plain


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to this one, if any is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def given_from_flags(
    namespace: argparse.Namespace, sections: Mapping[str, type], env: Env, others: Sections = dict
) -> Given:
    """What flags, environment and file set together.

    `sections` are those that the command takes; `others` gives those of other commands, whose variables are no mistake.
    """
    flags = {k[4:]: v for k, v in vars(namespace).items() if k.startswith("opt_")}
    positional = getattr(namespace, "model_positional", None)
    if positional is not None:
        if "model" in flags and flags["model"] != positional:
            raise ConfigError(f"the model is given twice: {positional!r} and --model {flags['model']!r}; keep one.")
        flags["model"] = positional
    return _merge(sections, "flag", flags, getattr(namespace, "config", None), env, others)


def given_from_keywords(
    keywords: Mapping[str, Any],
    sections: Mapping[str, type],
    env: Env,
    *,
    others: Sections = dict,
    missing: Callable[[], Sequence[str]] = tuple,
) -> Given:
    """What Python keywords, environment and file set together. `sections` and `others` as in `given_from_flags`;
    `missing` gives features that are not installed, whose options cannot be known."""
    known = options(sections)
    for name in keywords:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{hint(repr(name), map(repr, known), missing())}")
    return _merge(sections, "keyword", keywords, None, env, others)


def _merge(
    sections: Mapping[str, type],
    top: str,
    top_values: Mapping[str, Any],
    file: str | None,
    env: Env,
    others: Sections,
) -> Given:
    known = options(sections)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path = file or env.config_file
    layers: list[tuple[str, Mapping[str, Any]]] = [("file", read_yaml(path, known) if path else {})]
    from_environment, notices = _environment(known, sections, env, others)
    layers.append(("environment", from_environment))
    layers.append((top, top_values))
    for source, layer in layers:
        for name, value in layer.items():
            if value is None:
                continue
            # A mistake is named as whoever made it wrote it: nobody who sets a variable looks for a flag.
            places = {"environment": known[name].variable, "file": f"{name} in the configuration file {path}"}
            values[name] = convert(known[name], value, places.get(source))
            sources[name] = source
    return Given(values=values, sources=sources, notices=notices, features=_of_features(sections, values))


def _of_features(sections: Mapping[str, type], values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of features, by feature; of those only that were given any."""
    found = {}
    for name, kind in sections.items():
        if name in SERVER_SECTIONS:
            continue
        own = {f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values}
        if own:
            found[name] = kind(**own)
    return found


def _environment(
    known: Mapping[str, Option], sections: Mapping[str, type], env: Env, others: Sections
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Options that the environment sets, and sentences about variables of our prefix that are no option.

    Raises `ConfigError` for one that is nearly an option: a misspelled setting must not be lost.
    """
    by_variable = {opt.variable: name for name, opt in known.items()}
    found, foreign = {}, []
    every: set[str] = set()
    if not env.options.keys() <= by_variable.keys():  # most often there is nothing to look up
        every = {o.variable for o in options({**SERVER_SECTIONS, **others(), **sections}).values()}
    for variable, value in env.options.items():
        if value.startswith(SERVICE_LINK):  # Kubernetes sets OCTAVO_PORT so for a service of that name
            foreign.append(variable)
        elif variable in by_variable:
            found[by_variable[variable]] = value
        elif variable not in every:
            if near := _misspelled(variable, every | NAMES.keys()):
                raise ConfigError(f"environment variable {variable} is not an option of Octavo; did you mean {near}?")
            foreign.append(variable)
    if not foreign:
        return found, ()
    are = "is no option" if len(foreign) == 1 else "are no options"
    return found, (f"{', '.join(sorted(foreign))} in the environment {are} of Octavo, and ignored",)


def _misspelled(variable: str, known: Iterable[str]) -> str | None:
    """The variable that this one was meant to be; what they all begin with says nothing."""
    names = {name.removeprefix(PREFIX): name for name in known}
    found = difflib.get_close_matches(variable.removeprefix(PREFIX), names, n=1, cutoff=MISSPELLED)
    return names[found[0]] if found else None


class _Unique(yaml.SafeLoader):
    """YAML in which no key stands twice; the library itself drops all but the last in silence.

    Owns: what its base owns.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: str, known: Mapping[str, Option]) -> dict[str, Any]:
    """Options in a YAML file: a flat mapping of names, dashes or underscores."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), _Unique)
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"configuration file {path} is not text in UTF-8.") from None
    except RecursionError:
        raise ConfigError(f"configuration file {path} is nested too deeply.") from None
    except ValueError as error:  # a path or a value that Python cannot read, such as a day 32
        raise ConfigError(f"configuration file {path!r} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"configuration file {path} must hold a mapping of option names to values.")
    named = {str(k).replace("-", "_"): v for k, v in data.items()}
    if len(named) != len(data):
        raise ConfigError(f"configuration file {path} gives an option twice, with dashes and with underscores.")
    for name in named:
        _check_name(name, known, f"configuration file {path} has the unknown option")
    return named


def hint(name: str, known: Iterable[str], missing: Sequence[str] = ()) -> str:
    """The end of a sentence that says a name is unknown."""
    if missing:
        return f"; it may be one of a feature that is not installed here: {', '.join(missing)}"
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else "."


def _check_name(name: str, known: Mapping[str, Option], what: str) -> None:
    if name not in known:
        near = nearest(name, known)
        raise ConfigError(f"{what} {name!r}" + (f"; did you mean {near!r}?" if near else "."))


C = TypeVar("C")


def _section(kind: type[C], given: Given) -> C:
    names = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{k: v for k, v in given.values.items() if k in names})


def engine_config(given: Given) -> EngineConfig:
    """The engine's part of what was given."""
    return EngineConfig(
        model=_section(ModelConfig, given),
        cache=_section(CacheConfig, given),
        scheduler=_section(SchedulerConfig, given),
        device=_section(DeviceConfig, given),
        plugins=_section(PluginConfig, given),
        features=dict(given.features),
    )


def server_config(given: Given) -> ServerConfig:
    """The HTTP server's part of what was given; raises `ConfigError` for a number out of range."""
    config = _section(ServerConfig, given)
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"--port must be in 0..65535, got {config.port}.")
    if config.max_request_bytes < 1:
        raise ConfigError(f"--max-request-bytes must be at least 1, got {config.max_request_bytes}.")
    if not 0 <= config.drain_timeout_s <= MAX_WAIT_S:
        raise ConfigError(f"--drain-timeout-s must be in 0..{MAX_WAIT_S:.0f} seconds, got {config.drain_timeout_s:g}.")
    if not MIN_KEEP_ALIVE_S <= config.stream_keep_alive_s <= MAX_WAIT_S:
        raise ConfigError(
            f"--stream-keep-alive-s must be in {MIN_KEEP_ALIVE_S:g}..{MAX_WAIT_S:.0f} seconds, "
            f"got {config.stream_keep_alive_s:g}."
        )
    return config
