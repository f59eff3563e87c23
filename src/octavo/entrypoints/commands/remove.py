"""`octavo rm`: remove models, and what interrupted pulls have left, from the cache folder.

Promises: only what the cache holds is removed, after a question unless `-y`; a model that a running engine uses stays.
Does not know: how models are kept (see `config.store`).
"""

import sys

from octavo.base.errors import LoadError, UsageError
from octavo.config.meter import size_text
from octavo.config.store import Entry, Store
from octavo.entrypoints.commands.arguments import Call


def run(call: Call) -> int:
    """Remove what the names mean; nothing when one of them means nothing."""
    store = Store(call.env.cache_dir)
    found = list(dict.fromkeys(entry for name in call.arguments.names for entry in _find(store, name)))
    total = size_text(sum(entry.size for entry in found))
    if not call.arguments.yes and not _agreed(found, total):
        sys.stderr.write("octavo: nothing was removed.\n")
        return 1
    for entry in found:
        store.remove(entry)
        sys.stdout.write(f"removed {entry.name}{' (unfinished)' if entry.partial else ''}, {size_text(entry.size)}\n")
    return 0


def _find(store: Store, name: str) -> list[Entry]:
    found = store.named(name)
    if found:
        return found
    near = [e.name for e in store.entries() if name.lower() in e.name.lower() or e.name.lower() in name.lower()]
    hint = f"did you mean {' or '.join(near[:4])}?" if near else "'octavo list' shows what is there"
    raise LoadError(f"{name} is not in the cache folder {store.cache}; {hint}")


def _agreed(found: list[Entry], total: str) -> bool:
    names = ", ".join(entry.name for entry in found)
    if not sys.stdin.isatty():
        raise UsageError(f"nobody can be asked whether to remove {names} ({total}); give -y.")
    sys.stderr.write(f"Remove {names} ({total})? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
