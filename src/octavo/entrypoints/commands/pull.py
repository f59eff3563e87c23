"""`octavo pull`: fetch a model into the cache folder and say where it is.

Promises: the path is the only line on standard output; how far it is stands in one line of the terminal, or in a
line every ten seconds where there is none.
Does not know: how models are fetched (see `config.pull`).
"""

import sys

from octavo.config.names import EMBEDDED_NAME
from octavo.config.pull import pull_model
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.console import progress


def run(call: Call) -> int:
    """Fetch and print the path."""
    path = pull_model(call.arguments.name or EMBEDDED_NAME, call.env, progress())
    sys.stdout.write(f"{path}\n")
    return 0
