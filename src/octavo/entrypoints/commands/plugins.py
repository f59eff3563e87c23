"""`octavo plugins`: what is installed, where it comes from, and whether it works (PLG-3).

Promises: every plugin of every group is tried once and listed with its state; nothing is started.
Does not know: what plugins do.
"""

import sys

from octavo.entrypoints.commands.arguments import Call
from octavo.plugins.general import GROUPS
from octavo.plugins.registry import Plugins


def run(call: Call) -> int:
    """One line a plugin."""
    found = False
    for group, meaning in GROUPS.items():
        plugins = Plugins(group, selected=call.env.plugins)
        plugins.load()
        for plugin in plugins.explain():
            found = True
            error = f": {plugin.error}" if plugin.error else ""
            sys.stdout.write(f"{group}  {plugin.name}  {plugin.target or '-'}  {plugin.state}{error}\n")
        if not plugins.explain():
            sys.stdout.write(f"{group}  none ({meaning})\n")
    if not found:
        sys.stdout.write("no plugin is installed\n")
    return 0
