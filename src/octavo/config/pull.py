"""A model by its name: found here, or fetched into the cache folder.

Promises: a name maps to one place in the cache; a model appears there whole or not at all. Ctrl-C and SIGTERM are
heard at once, and the next pull goes on from what has come.
Does not know: what is inside a model (see `config.facts`), how a hub speaks (see `config.hub`).
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from octavo.base.errors import LoadError
from octavo.config.embedded import fetch_embedded_model
from octavo.config.env import Env
from octavo.config.hub_files import FileChoice, HubFile, choose_files
from octavo.config.interrupts import sigterm_raises
from octavo.config.meter import Meter, size_text
from octavo.config.names import HubName, hub_name, is_embedded
from octavo.config.store import RECORD, Record, Store, read_record, write_record

Progress = Callable[[str], None]


def pull_model(name: str, env: Env, progress: Progress) -> Path:
    """A model's folder or file: a path, a name that the cache has, or a name that can be fetched into it.

    Raises `LoadError` when it is not here and cannot be fetched.
    """
    if (place := _path(name)) is not None:
        return place
    if is_embedded(name):
        return fetch_embedded_model(env.cache_dir, progress)
    asked, store = hub_name(name), Store(env.cache_dir)
    return store.find(asked) or _fetch(asked, store, env, progress)


def _path(name: str) -> Path | None:
    """The file or folder of this name, where there is one that can be looked at."""
    try:
        place = Path(name).expanduser()
        if place.exists():
            return place
    except PermissionError:
        raise LoadError(f"{name} cannot be read: this user may not look into the folder it is in") from None
    except (OSError, RuntimeError, ValueError):  # too long, of a user who does not exist, no text for a file system
        pass
    return None


def _fetch(name: HubName, store: Store, env: Env, progress: Progress) -> Path:
    if env.hub.offline:
        raise LoadError(
            f"{name} is not on this machine, and HF_HUB_OFFLINE says not to ask {env.hub.endpoint} for it; unset "
            "HF_HUB_OFFLINE, or copy the model's folder here and give its path ('octavo list' shows what is here)"
        )
    from octavo.config.hub import Hub  # noqa: PLC0415  an HTTP client, that only a pull needs

    with store.pulling(name.folder, progress) as partial:
        if (place := store.find(name)) is not None:  # somebody else was faster
            return place
        with _heard(name, partial, progress), closing(Hub(env.hub, progress)) as hub:
            found = hub.look(name)
            choice = choose_files(name, found.files)
            if choice.why:
                progress(choice.why)
            if choice.tag and (place := store.find(dataclasses.replace(name, tag=choice.tag))) is not None:
                return place
            _start(partial, Record(name=str(name), commit=found.commit, tag=choice.tag, files=choice.files))
            here = {f.path: num_bytes for f in choice.files if (num_bytes := _here(_target(partial, choice, f)))}
            meter = Meter(str(name), {f.path: f.size for f in choice.files}, here, progress)
            meter.check_room(store.cache)
            for file in choice.files:
                target = _target(partial, choice, file)
                if not target.exists():
                    part = _part(target)
                    part.parent.mkdir(parents=True, exist_ok=True)
                    hub.fetch(name, found.commit, file, part, meter.of(file.path))
                    part.replace(target)
            meter.end()
            place = store.keep(partial, name)
    progress(f"{name} at commit {found.commit[:12]} is at {place}")
    return place


def _target(folder: Path, choice: FileChoice, file: HubFile) -> Path:
    """Where a file goes: as in the repository, but GGUF files always stand at the top."""
    return folder / (file.path if choice.tag is None else file.name)


def _start(partial: Path, record: Record) -> None:
    """Keep of an earlier pull what is still right, and write down what this one wants."""
    before = read_record(partial)
    known = {f.path: f.digest for f in before.files} if before else {}
    flat = record.tag is not None
    keep = set()
    for file in record.files:
        if file.digest is not None and known.get(file.path) == file.digest:
            place = partial / (file.name if flat else file.path)
            keep |= {place, _part(place)}
    for path in sorted(partial.rglob("*"), reverse=True):
        if path.is_dir():
            with suppress(OSError):
                path.rmdir()
        elif path not in keep:
            path.unlink()
    write_record(partial, record)


def _here(target: Path) -> int:
    """Bytes of a file that an earlier pull left."""
    for place in (target, _part(target)):
        with suppress(OSError):
            return place.stat().st_size
    return 0


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


@contextmanager
def _heard(name: HubName, partial: Path, progress: Progress) -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is in the block at once, with a word on what has come."""
    with sigterm_raises():
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            kept = sum(p.stat().st_size for p in partial.rglob("*") if p.is_file() and p.name != RECORD)
            progress(f"stopped; {size_text(kept)} of {name} are kept, and the same command goes on from there")
            raise
