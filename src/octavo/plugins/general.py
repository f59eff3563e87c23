"""The plugins that every process loads, and the groups that there are.

Promises: a general plugin is a function without arguments, called once in each process, safe to call again; one
that fails is told of and stops no other, unless it is required (PLG-1, PLG-3). A name that somebody gave and that no
group has ends the start, whichever way it was given.
Does not know: what plugins do.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Final

from octavo.base.errors import ConfigError
from octavo.plugins.registry import Explained, Plugins, PluginState, Scan, installed, unknown_name

GENERAL: Final = "octavo.plugins"
GROUPS: Final = {
    GENERAL: "called once in every process",
    "octavo.platforms": "devices",
    "octavo.attention_backends": "attention backends, found when a model is built",
    "octavo.executors": "what runs the worker, by --distributed-executor-backend",
    "octavo.models": "architectures, found when a model is built",
    "octavo.logits_processors": "change logits before a token is chosen, made when a worker is",
    "octavo.block_policies": "what a kind of cache keeps and may forget, found when a model has that kind",
    "octavo.features": "what joins the engine with options of its own",
}
Names = Sequence[str]


def load_general(
    selected: Names | None, required: Names, tell: Callable[[str], None], *, scan: Scan = installed
) -> tuple[Explained, ...]:
    """Load and call the general plugins; every plugin of every group with its state.

    Those of other groups are imported where they are used. Failures are told; `ConfigError` for a required plugin that
    fails here, and for a name that no group has.
    """
    found = {group: tuple(scan(group)) for group in GROUPS}
    for names, option in ((required, "--require-plugin"), (selected or (), "OCTAVO_PLUGINS")):
        for name in _absent(found, names):
            raise ConfigError(f"{option} {name}: {unknown_name('plugin', name, _names(found))}")
    groups = [_plugins(group, found, selected, required) for group in GROUPS]
    general = groups[0]
    general.call()
    for notice in general.notices():
        tell(f"warning: {notice}")
    for other in groups[1:]:
        other.find()
    return tuple(plugin for group in groups for plugin in group.explain())


def load_required(required: Names, *, scan: Scan = installed) -> None:
    """Import the required plugins of the other groups, in the process that will use them.

    Raises `ConfigError` for one that fails.
    """
    found = {group: tuple(scan(group)) for group in GROUPS if group != GENERAL} if required else {}
    for group in found:
        _plugins(group, found, (), required).load()


def with_required(selected: Names | None, required: Names | None) -> tuple[str, ...] | None:
    """The selection that required plugins are part of; None: all."""
    return None if selected is None else tuple(dict.fromkeys((*selected, *(required or ()))))


def try_all(selected: Names | None, *, scan: Scan = installed) -> tuple[Explained, ...]:
    """Every plugin of every group, tried, with its state; nothing raises."""
    found = {group: tuple(scan(group)) for group in GROUPS}
    states: list[Explained] = []
    for group in GROUPS:
        plugins = _plugins(group, found, selected, ())
        if group == GENERAL:
            plugins.call()
        else:
            plugins.load()
        states += plugins.explain()
    for name in _absent(found, selected or ()):
        error = unknown_name("plugin", name, _names(found))
        states.append(Explained(name, "", "", PluginState.MISSING, error, "OCTAVO_PLUGINS"))
    return tuple(states)


def _plugins(
    group: str, found: Mapping[str, tuple[EntryPoint, ...]], selected: Names | None, required: Names
) -> Plugins:
    """One group's; names that other groups have are none of its business."""
    here = {plugin.name for plugin in found[group]}
    return Plugins(
        group,
        selected=None if selected is None else [name for name in selected if name in here],
        required=[name for name in required if name in here],
        scan=lambda _: found[group],
    )


def _names(found: Mapping[str, tuple[EntryPoint, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(plugin.name for group in found.values() for plugin in group))


def _absent(found: Mapping[str, tuple[EntryPoint, ...]], names: Names) -> list[str]:
    known = _names(found)
    return [name for name in names if name not in known]
