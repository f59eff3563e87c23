"""`octavo bench compare`: the same work on every installed engine (OPS-9).

Promises: only this command loads what a comparison needs.
Does not know: engines, or works (see `bench.compare`).
"""

from octavo.base.errors import ConfigError, UsageError
from octavo.bench.compare import run_compare
from octavo.entrypoints.commands.arguments import Call


def run(call: Call) -> int:
    """Compare, and print."""
    try:
        return run_compare(call.arguments)
    except ConfigError as error:
        raise UsageError(str(error)) from None
