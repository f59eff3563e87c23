"""How a Python process of ours is started.

Promises: a file in the current folder never takes the place of a module that the process imports (`queue.py`, `json.py`).
Does not know: which module is run, or why.
"""

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter, without the current folder on its path (`-P`)."""
    return [sys.executable, "-P", "-m", module, *arguments]
