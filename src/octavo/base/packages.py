"""The command that installs a package which only some need.

Promises: it works as it is printed, in a checkout and where Octavo is installed: it names this Python, and packages by
their own names with the versions that `pyproject.toml` states. Octavo's own extras are never named: a package index
may know something else under that name.
Does not know: what the packages are for.
"""

import importlib.util
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Final

PROJECT: Final = "octavo"


def install_command(extra: str, requires: Iterable[str] | None = None, package: str = "") -> str:
    """The command for the packages of one extra, in a shell. `requires` stands for the metadata in tests. `package`:
    what to name where nothing says what the extra needs, such as an environment made before there was this extra."""
    if requires is None:
        try:
            requires = metadata.requires(PROJECT) or ()
        except metadata.PackageNotFoundError:  # run from a folder that was never installed
            requires = ()
    ending = f'extra == "{extra}"'
    found = [text.partition(";")[0].strip() for text in requires if text.replace("'", '"').endswith(ending)]
    installer = f"{shlex.quote(sys.executable)} -m pip install"
    if importlib.util.find_spec("pip") is None:  # environments that uv made
        installer = f"uv pip install --python {shlex.quote(sys.executable)}"
    return f"{installer} {' '.join(shlex.quote(each) for each in found or [package or extra])}"
