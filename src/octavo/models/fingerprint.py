"""Which packed weights are the same: one key of everything that decides their bytes.

Promises: the same checkpoint, copied or moved with its times, gives the same key; another checkpoint, type, scheme,
share, instruction set or build of the kernels another one. Nothing but headers is read.
Does not know: where packed weights are kept (see `models.packed`).
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from octavo import __version__
from octavo.models.build import BuildContext
from octavo.models.packed import FORMAT
from octavo.models.weights import StoredTensor
from octavo.plugins.registry import load_target

_PACKING: Final = ("layers", "models", "ops", "quant")  # folders whose code decides what is packed, and how


def fingerprint(ctx: BuildContext, tensors: Iterable[StoredTensor]) -> str:
    """The key of the packed weights of this checkpoint, built so: 64 hexadecimal digits."""
    parallel = ctx.parallel
    parts: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "facts": repr(dataclasses.replace(ctx.facts, source="")),
        "dtype": str(ctx.dtype),
        "scheme": ctx.scheme.name,
        "linear": _name(ctx.ops.linear),
        "device": ctx.memory.device.type,
        "ranks": [[group.rank, group.size] for group in (parallel.tp, parallel.pp, parallel.ep)],
        "code": _code(Path(__file__).parent.parent),
        "core": core_build(),
        "files": _files(tensors),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _name(operator: object) -> str:
    kind = operator if hasattr(operator, "__qualname__") else type(operator)
    return f"{kind.__module__}.{kind.__qualname__}"


def _code(package: Path) -> str:
    """The modules that pack: a version says it to those who install it, and not to those who change it."""
    digest = hashlib.sha256()
    for folder in _PACKING:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def core_build() -> list[str]:
    """The level in use, whose layouts differ, and the build of the native core, whose layouts may change."""
    try:
        core: Any = load_target("octavo.ops.native:core")  # the registry's way: the core may not be there
    except ImportError:
        return []
    build = hashlib.sha256(Path(core.__file__).read_bytes()).hexdigest()
    return [core.level(), build]


def _files(tensors: Iterable[StoredTensor]) -> list[list[Any]]:
    """Size and time of each file, and what its header says of its tensors, without any path."""
    found: dict[Path, list[list[Any]]] = {}
    for t in tensors:
        found.setdefault(t.file.path, []).append([t.stored_name, t.kind, list(t.shape), t.start, t.size])
    out: list[list[Any]] = []
    for path, entries in found.items():
        state = path.stat()
        header = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
        out.append([state.st_size, state.st_mtime_ns, header])
    return sorted(out)
