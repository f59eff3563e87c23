"""The plugins that every process loads, and the groups that there are.

Promises: a general plugin is a function without arguments, called once in each process, safe to call again; one
that fails is told of and stops no other, unless it is required (PLG-1, PLG-3).
Does not know: what plugins do.
"""

from collections.abc import Callable, Sequence

from octavo.plugins.registry import Plugins, Scan, installed

GENERAL = "octavo.plugins"
GROUPS = {
    GENERAL: "called once in every process",
    "octavo.platforms": "devices",
    "octavo.attention_backends": "attention backends, found when a model is built",
    "octavo.models": "architectures, found when a model is built",
}


def load_general(
    selected: Sequence[str] | None,
    required: Sequence[str],
    tell: Callable[[str], None],
    *,
    scan: Scan = installed,
) -> None:
    """Load and call the general plugins; failures are told, required ones raise `ConfigError`."""
    # A name may stand for a plugin of another group only, which is found where it is used.
    elsewhere = {found.name for group in GROUPS if group != GENERAL for found in scan(group)}
    here = {found.name for found in scan(GENERAL)}
    named = None if selected is None else [name for name in selected if name in here or name not in elsewhere]
    plugins = Plugins(GENERAL, selected=named, required=required, scan=scan)
    plugins.call()
    for notice in plugins.notices():
        tell(f"warning: {notice}")
