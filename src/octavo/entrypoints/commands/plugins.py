"""`octavo plugins`: what is installed, where it comes from, and whether it works (PLG-3).

Promises: every plugin of every group is tried once and listed with its state; nothing is started.
Does not know: what plugins do.
"""

import sys

from octavo.entrypoints.commands.arguments import Call
from octavo.plugins.general import GROUPS, try_all


def run(call: Call) -> int:
    """One line a plugin: group, name, package, what it names, state, and why it is not in use."""
    states = try_all(call.env.plugins)
    for group in dict.fromkeys((*GROUPS, *(found.group for found in states))):
        here = [found for found in states if found.group == group]
        for found in here:
            reason = f": {found.error}" if found.error else ""
            line = (group, found.name, found.source or "-", found.target or "-", f"{found.state}{reason}")
            sys.stdout.write("  ".join(line) + "\n")
        if not here:
            sys.stdout.write(f"{group}  none ({GROUPS[group]})\n")
    if not states:
        sys.stdout.write("no plugin is installed\n")
    return 0
