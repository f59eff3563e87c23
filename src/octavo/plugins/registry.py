"""Finding implementations by name: tables of "module:Class" strings, and Python entry points.

Promises: looking at a registry imports nothing; loading one name imports that one only; an unknown name is an
error that shows the near ones; one plugin's failure stops no other and stays visible (PLG-1..3).
Does not know: what is registered, or the environment: the caller passes in what its variables say.
"""

import difflib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar, cast

from octavo.base.errors import ConfigError, ServerError

T = TypeVar("T")
Scan = Callable[[str], Iterable[importlib.metadata.EntryPoint]]  # entry-point group -> what is installed


def installed(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """The entry points of a group in this Python environment, in the order of their names."""
    return tuple(sorted(importlib.metadata.entry_points(group=group), key=lambda found: found.name))


def names_of(group: str, selected: Sequence[str] | None = None, *, scan: Scan = installed) -> tuple[str, ...]:
    """Names that installed packages give in a group, without importing them; `selected` as in `parse_selection`."""
    if selected is not None and not selected:
        return ()
    return tuple(found.name for found in scan(group) if selected is None or found.name in selected)


def near_names(name: str, known: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """The known names closest to `name`, best first; empty when none is close."""
    by_lower = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=limit, cutoff=0.5)
    return tuple(by_lower[match] for match in close)


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """The sentence that says a name is unknown and which ones exist."""
    near = near_names(name, known)
    if near:
        return f"there is no {kind} named {name!r}; did you mean {' or '.join(repr(n) for n in near)}?"
    return f"there is no {kind} named {name!r}; there are: {', '.join(sorted(known)) or 'none'}"


def parse_selection(value: str | None) -> tuple[str, ...] | None:
    """Plugin names from an environment variable's text: None (not set) means all, "" means none (PLG-2)."""
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(",") if name.strip())


class PluginState(StrEnum):
    """What became of one entry."""

    KNOWN = "known"  # not imported yet
    LOADED = "loaded"
    FAILED = "failed"
    NOT_SELECTED = "not selected"
    MISSING = "missing"  # selected by name, but not installed


@dataclass(frozen=True, slots=True)
class Explained:
    """One line of `explain()`: an entry, the package it came from, and its state."""

    name: str
    target: str
    source: str
    state: PluginState
    error: str | None = None
    group: str = ""  # of entry points, of a plugin


@dataclass(slots=True)
class _Entry:
    target: str
    source: str
    value: Any = None
    state: PluginState = PluginState.KNOWN
    error: str | None = None


class Registry(Generic[T]):
    """Implementations of one protocol, by name, imported when first loaded.

    `kind` is the word for one in messages ("attention backend"). `error` is raised for an unknown name or one
    whose import fails. Order of registration is kept: it is the order of preference where there is one.

    Owns: the table of entries and what was loaded.
    """

    def __init__(
        self, kind: str, entries: Mapping[str, str] | None = None, *, error: type[ServerError] = ConfigError
    ) -> None:
        self.kind = kind
        self._error = error
        self._entries: dict[str, _Entry] = {}
        for name, target in (entries or {}).items():
            self.register(name, target)

    def register(
        self, name: str, target: "str | T", *, source: str = "built in", replace: bool = False, first: bool = False
    ) -> None:
        """Add `name`: a "module:attribute" string, or the object itself.

        A name that exists is refused unless `replace`; `first` puts it at the head of the order.
        """
        if name in self._entries and not replace:
            raise ConfigError(
                f"{self.kind} {name!r} is registered already (from {self._entries[name].source}); replace it explicitly"
            )
        if isinstance(target, str):
            if not all(target.partition(":")):
                raise ConfigError(f"{self.kind} {name!r} must be registered as 'module:attribute', got {target!r}")
            entry = _Entry(target, source)
        else:
            entry = _Entry(getattr(target, "__qualname__", repr(target)), source, target, PluginState.LOADED)
        self._entries[name] = entry
        if first:
            self._entries = {name: entry, **self._entries}

    def discover(self, group: str, selected: Sequence[str] | None = None, *, scan: Scan = installed) -> None:
        """Add the entry points of `group` without importing them; `selected` as in `parse_selection`.

        Their names win over built-in ones. Safe to call again.
        """
        for found in scan(group):
            if selected is None or found.name in selected:
                known = self._entries.get(found.name)
                if known is None or known.target != found.value:
                    self.register(found.name, found.value, source=_package(found), replace=True)

    def names(self) -> tuple[str, ...]:
        """Every name, in order of registration."""
        return tuple(self._entries)

    def target(self, name: str) -> str:
        """Where `name` is, as "module:attribute"; it must be registered."""
        return self._entries[name].target

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def load(self, name: str) -> T:
        """The implementation called `name`, imported now if it was not before. A failure may be tried again."""
        entry = self._entries.get(name)
        if entry is None:
            raise self._error(unknown_name(self.kind, name, self.names()))
        if entry.state is not PluginState.LOADED:
            try:
                entry.value = load_target(entry.target)
            except Exception as error:
                entry.state, entry.error = PluginState.FAILED, _one_line(error)
                raise self._error(
                    f"{self.kind} {name!r} ({entry.target}, from {entry.source}) could not be loaded: {entry.error}"
                ) from error
            entry.state, entry.error = PluginState.LOADED, None
        return cast(T, entry.value)

    def explain(self) -> tuple[Explained, ...]:
        """Every entry with its origin and state, in order."""
        return tuple(Explained(n, e.target, e.source, e.state, e.error) for n, e in self._entries.items())


class Plugins:
    """The plugins of one entry-point group: found once, each loaded on its own (PLG-3).

    `selected` as in `parse_selection`; with `named_only` not set means none, since such plugins must be asked
    for (PLG-4). A plugin in `required` that is missing or fails makes `load` raise.

    Owns: what was found, and each plugin's state.
    """

    def __init__(
        self,
        group: str,
        *,
        selected: Sequence[str] | None,
        required: Sequence[str] = (),
        named_only: bool = False,
        scan: Scan = installed,
    ) -> None:
        self.group = group
        self._selected = () if selected is None and named_only else selected
        self._required = tuple(required)
        self._named_only = named_only
        self._scan = scan
        self._entries: dict[str, _Entry] = {}
        self._scanned = False

    def load(self) -> dict[str, Any]:
        """What each selected plugin's entry point names, by plugin name; those that failed are left out.

        Does its work once; a failed scan or a failed plugin is tried again by the next call.
        """
        self.find()
        for entry in self._entries.values():
            if entry.state in (PluginState.KNOWN, PluginState.FAILED):
                self._load_one(entry)
        self._check_required()
        return {name: e.value for name, e in self._entries.items() if e.state is PluginState.LOADED}

    def call(self, *args: Any) -> None:
        """Call every loaded plugin with `args`; one that raises counts as failed and stops no other."""
        for name, function in self.load().items():
            try:
                function(*args)
            except (Exception, SystemExit) as error:
                self._entries[name].state, self._entries[name].error = PluginState.FAILED, _one_line(error)
        self._check_required()

    def explain(self) -> tuple[Explained, ...]:
        """Every plugin found or asked for, with its state and error."""
        return tuple(Explained(n, e.target, e.source, e.state, e.error, self.group) for n, e in self._entries.items())

    def notices(self) -> tuple[str, ...]:
        """Sentences worth a warning in the log: failures, missing names, plugins that were not asked for."""
        lines = []
        for found in self.explain():
            if found.state in (PluginState.FAILED, PluginState.MISSING):
                lines.append(f"plugin {found.name!r} is not in use {_origin(found)}: {found.error}")
            elif found.state is PluginState.NOT_SELECTED and self._named_only:
                lines.append(
                    f"plugin {found.name!r} is installed but was not named, so it is not used {_origin(found)}"
                )
        return tuple(lines)

    def find(self) -> None:
        """Look which plugins there are, once; none is imported."""
        if self._scanned:
            return
        entries: dict[str, _Entry] = {}
        for found in self._scan(self.group):
            chosen = self._selected is None or found.name in self._selected or found.name in self._required
            entries[found.name] = _Entry(
                found.value, _package(found), state=PluginState.KNOWN if chosen else PluginState.NOT_SELECTED
            )
        for name in (*(self._selected or ()), *self._required):
            if name not in entries:
                sentence = unknown_name(f"plugin of {self.group}", name, tuple(entries))
                entries[name] = _Entry("", "", state=PluginState.MISSING, error=sentence)
        self._entries, self._scanned = entries, True

    @staticmethod
    def _load_one(entry: _Entry) -> None:
        try:
            entry.value, entry.state, entry.error = load_target(entry.target), PluginState.LOADED, None
        except (Exception, SystemExit) as error:
            entry.state, entry.error = PluginState.FAILED, _one_line(error)

    def _check_required(self) -> None:
        for found in self.explain():
            if found.name in self._required and found.state is not PluginState.LOADED:
                raise ConfigError(f"plugin {found.name!r} is required but not in use {_origin(found)}: {found.error}")


def _origin(found: Explained) -> str:
    """Where a plugin comes from, for messages: its group, and the package that one uninstalls."""
    return f"({found.group}, from {found.source})" if found.source else f"({found.group})"


def load_target(target: str) -> Any:
    """Import what a "module:attribute" string names; the attribute may have dots."""
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split(".") if attribute else ():
        value = getattr(value, part)
    return value


def load_feature(target: str, option: str) -> Any:
    """`load_target` for what an option asks for. Raises `ConfigError` where that part of the package is not there."""
    try:
        return load_target(target)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{option} needs a part of Octavo that is not installed: {error}") from None


def _package(found: importlib.metadata.EntryPoint) -> str:
    return found.dist.name if found.dist is not None else "an installed package"


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
