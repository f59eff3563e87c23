"""The table of features: what each joins the engine by, and nothing of how it works.

Promises: the lines here are all that the rest of Octavo knows of a feature; one that nobody asks for is not imported
beyond its options; a folder that was deleted, or a package that is not installed, is a feature less and no failure.
Installed packages register features of their own as entry points of the group `octavo.features`.
Does not know: any feature.

A feature is one object (`Feature`), found by name. It has a section of options, and a method for each place where it
may join: what it does not do it inherits from `Feature` as a method that does nothing.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from octavo.base.errors import ConfigError
from octavo.config.args import ENGINE_SECTIONS, SERVER_SECTIONS
from octavo.config.env import read_env
from octavo.config.schema import CacheConfig, EngineConfig
from octavo.plugins.registry import Registry

if TYPE_CHECKING:  # a command's help is shown without them
    from octavo.base.kvspec import KVLayout
    from octavo.base.outputs import OutputPart
    from octavo.base.requests import RequestPart

FEATURES: Final = {
    "router": "octavo.features.router.feature:FEATURE",
    "transfer": "octavo.features.transfer.feature:FEATURE",
}
COMMANDS: Final = {  # that features bring: the feature, and the line of help, which is shown without importing it
    "route": ("router", "serve one address in front of many servers"),
}
GROUP: Final = "octavo.features"

BlocksOf = Callable[[str], tuple[tuple[int, ...], ...]]  # a request's block table by group, by the request's id


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlContext:
    """What the scheduler's halves are made with.

    `blocks_of` gives a request's block table by group, 0 where a window has passed; `hash_block_size` is in tokens;
    `measured` is what `Feature.measure` gave.
    """

    layout: "KVLayout"
    hash_block_size: int
    blocks_of: BlocksOf
    clock: Callable[[], float]
    cache: CacheConfig = field(default_factory=CacheConfig)
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataContext:
    """What the worker's halves are made with: all that KV depends on besides tokens, by name."""

    identity: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureCommand:
    """A command of the command line: where it runs ("module:function", given a `config.args.Given`, gives the exit code),
    the option sections that it takes, and the options that its help shows where not all are asked for."""

    run: str
    sections: Mapping[str, type]
    common: tuple[str, ...] = ()


class Feature:
    """One feature. Subclasses override the places where it joins; `name` is that of its options' section, too."""

    name: ClassVar[str]
    options: ClassVar[type | None] = None
    command: ClassVar[FeatureCommand | None] = None  # of the name that `COMMANDS` has for it
    request_field: ClassVar[str | None] = None  # of requests and answers, that it reads and writes
    request_help: ClassVar[str] = ""  # what the API's description says of it

    def check(self, options: Any, config: EngineConfig) -> None:
        """Raise `ConfigError` for options that cannot be, alone or beside the engine's own."""

    def is_on(self, options: Any) -> bool:
        """Whether these options ask for anything at run time."""
        return True

    def reserve(self, options: Any, available_bytes: int) -> int:
        """Of so many bytes of host memory, those that it takes beside the KV cache. Raises `ConfigError`."""
        return 0

    def measure(self, options: Any, call: Callable[[str], Any], prompt_tokens_per_s: float) -> Mapping[str, float]:
        """What is to be measured once at the start; `call` asks a worker's half by the name of one of its calls."""
        return {}

    def control(self, options: Any, context: ControlContext) -> Sequence[Any]:
        """The scheduler's halves, each a `scheduler.seams.ControlPart`. Raises `ConfigError`."""
        return ()

    def data(self, options: Any, context: DataContext) -> Sequence[Any]:
        """The worker's halves, each a `worker.seams.DataPart`. Raises `ConfigError`."""
        return ()

    def request(self, value: Any, options: Any, num_answers: int) -> "RequestPart | None":
        """What the engine is told of a request's `request_field`, checked. `options` is None where nobody gave any.

        Raises `ClientError`.
        """
        return None

    def response(self, parts: "Sequence[OutputPart]") -> Mapping[str, Any] | None:
        """What `request_field` of the answer is, from the parts that came with it."""
        return None

    def notes(self, options: Any, layout: "KVLayout", measured: Mapping[str, float]) -> tuple[str, ...]:
        """What was asked for, in lines for the start's summary."""
        return ()


@dataclass(frozen=True, slots=True)
class Active:
    """A feature that is asked for, with its options."""

    feature: Feature
    options: Any


@functools.cache
def registry() -> Registry[Feature]:
    """Features by name, those of installed packages that are in use included (PLG-2).

    Looked for once: neither what is installed nor this process's environment changes.
    """
    found: Registry[Feature] = Registry("feature", FEATURES)
    found.discover(GROUP, read_env().plugins)
    return found


def present(known: "Registry[Feature] | None" = None) -> dict[str, Feature]:
    """All features whose code is here, by name; those that were deleted are left out."""
    known = known or registry()
    found: dict[str, Feature] = {}
    for name in known.names():
        try:
            found[name] = known.load(name)
        except ConfigError as error:
            if not _is_gone(known.target(name), error.__cause__):
                raise
    return found


def _is_gone(target: str, cause: BaseException | None) -> bool:
    """Whether the feature's own module, or a folder that it is in, is what could not be found."""
    module = target.partition(":")[0]
    return isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}.")


def absent(known: "Registry[Feature] | None" = None) -> tuple[str, ...]:
    """Names in the table whose code is not here."""
    known = known or registry()
    here = present(known)
    return tuple(name for name in known.names() if name not in here)


def sections() -> dict[str, type]:
    """The option sections of all features, by name."""
    return {name: found.options for name, found in present().items() if found.options is not None}


def all_sections() -> dict[str, type]:
    """The option sections of all features, those of their commands included."""
    found = sections()
    for feature in present().values():
        if feature.command is not None:
            found.update(feature.command.sections)
    return found


def command(name: str) -> FeatureCommand:
    """What a feature brings for one of `COMMANDS`. Raises `ConfigError` where the feature is not here."""
    feature = COMMANDS[name][0]
    if feature in absent():
        raise ConfigError(f"octavo {name} needs the feature {feature!r}, which is not installed here")
    found = registry().load(feature).command
    assert found is not None, f"{feature} is named in COMMANDS"
    return found


def engine_sections() -> dict[str, type]:
    """All option sections that an engine takes."""
    return {**ENGINE_SECTIONS, **sections()}


def server_sections() -> dict[str, type]:
    """All option sections that a server takes."""
    return {**SERVER_SECTIONS, **sections()}


def active(given: Mapping[str, Any]) -> tuple[Active, ...]:
    """The features that ask for something, of those with options here (`EngineConfig.features`); no other is imported.

    Raises `ConfigError` for one that is not here.
    """
    return tuple(found for found in _with_options(given) if found.feature.is_on(found.options))


def joined(given: Mapping[str, Any]) -> tuple[Active, ...]:
    """Every feature that is here; `options` of one that was given none is None."""
    asked = {found.feature.name: found for found in _with_options(given)}
    return tuple(asked.get(name) or Active(feature, None) for name, feature in present().items())


def check(config: EngineConfig) -> None:
    """Raise `ConfigError` for options of features that cannot be."""
    for found in _with_options(config.features):
        found.feature.check(found.options, config)


def _as_given(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _with_options(given: Mapping[str, Any]) -> list[Active]:
    known = registry() if given else None
    found = []
    for name, options in given.items():
        feature = known.load(name)  # type: ignore[union-attr]
        if feature.options is not None and not isinstance(options, feature.options):  # from another process
            options = feature.options(**{name: _as_given(value) for name, value in options.items()})
        found.append(Active(feature, options))
    return found
