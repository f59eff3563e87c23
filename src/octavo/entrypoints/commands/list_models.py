"""`octavo list`: the models in the cache folder, and what an interrupted pull has left.

Promises: nothing is fetched, changed or counted as used; a model that cannot be read is listed as such.
Does not know: how models are kept (see `config.store`).
"""

import json
import sys
import time
from functools import partial
from typing import Any

from octavo.base.errors import OctavoError
from octavo.config.architectures import PLUGIN_GROUP
from octavo.config.facts import read_model_facts
from octavo.config.hub_files import tag_of
from octavo.config.meter import size_text
from octavo.config.store import Entry, Store
from octavo.entrypoints.commands.arguments import Call
from octavo.plugins.registry import names_of

HEAD = ("NAME", "REVISION", "SIZE", "FORMAT", "LAST USED", "PATH")
AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def run(call: Call) -> int:
    """One line a model, or JSON."""
    entries = Store(call.env.cache_dir).entries()
    if call.arguments.json:
        sys.stdout.write(json.dumps([_values(e) for e in entries], indent=1) + "\n")
        return 0
    if not entries:
        sys.stderr.write(f"octavo: no models in {call.env.cache_dir}; 'octavo pull NAME' fetches one.\n")
        return 0
    rows = [HEAD, *(_row(e, time.time()) for e in entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        sys.stdout.write("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() + "\n")
    return 0


def _values(entry: Entry) -> dict[str, Any]:
    used = entry.used_s
    return {
        "name": entry.name,
        "revision": entry.commit,
        "size_bytes": entry.size,
        "wanted_bytes": entry.wanted,
        "format": _format(entry),
        "partial": entry.partial,
        "last_used": None if used is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(used)),
        "path": str(entry.model),
    }


def _row(entry: Entry, now: float) -> tuple[str, ...]:
    size = size_text(entry.size)
    if entry.partial:
        size = f"{size} of {size_text(entry.wanted)}" if entry.wanted else f"{size} so far"
    used = "-" if entry.used_s is None or entry.partial else age(now - entry.used_s)
    return entry.name, (entry.commit or "-")[:12], size, _format(entry), used, str(entry.model)


def _format(entry: Entry) -> str:
    if entry.partial:
        return "unfinished"
    try:
        facts = read_model_facts(entry.model, more=partial(names_of, PLUGIN_GROUP))
    except OctavoError:
        return "unreadable"
    if facts.format == "gguf":
        tag = (entry.record.tag if entry.record else None) or tag_of(entry.model.name)
        return f"GGUF {tag}" if tag else "GGUF"
    how = facts.quantization.get("quant_method") if facts.quantization else None
    return f"safetensors {how or facts.dtype}"


def age(seconds: float) -> str:
    """How long ago, in the largest whole unit."""
    for unit, word in AGES:
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {word}{'s' if count > 1 else ''} ago"
    return "just now"
