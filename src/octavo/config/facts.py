"""Facts about a model and a device, read once and passed as values.

Promises: `read_model_facts` says everything the engine needs to know of a model without its weights, or raises
`LoadError` in one sentence; the values are frozen.
Does not know: intent (what the user wants) or decisions (what was chosen).
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from octavo.base.errors import ClientError, LoadError
from octavo.base.gguf import is_gguf
from octavo.base.params import SamplingParams
from octavo.config.facts_base import DeviceFacts, ModelFacts, RopeFacts
from octavo.config.facts_gguf import gguf_facts, gguf_generation_defaults
from octavo.config.facts_hf import hf_facts, hf_generation_defaults

__all__ = [
    "DeviceFacts",
    "ModelFacts",
    "RopeFacts",
    "gguf_alone",
    "model_place",
    "read_generation_defaults",
    "read_model_facts",
]


def read_model_facts(path: str | Path, *, more: Callable[[], Collection[str]] = tuple) -> ModelFacts:
    """Facts of a Hugging Face folder (config.json) or a GGUF file, given itself or alone in its folder.

    `more` gives architectures that plugins bring; it is asked for one that is not built in. Raises `LoadError` when
    there is no model, or it is damaged or of a kind that cannot be read.
    """
    place = model_place(path)
    return hf_facts(place, more) if place.is_dir() else gguf_facts(place)


def read_generation_defaults(path: str | Path, *, neutral: bool = False) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """EOS ids and default sampling parameters, by `SamplingParams`' names, that a model's author set (INP-22).

    `path` is a model as for `read_model_facts`, or a folder with a generation_config.json alone. Both parts are
    empty when the author said nothing; with `neutral` the sampling parameters are not even looked at.
    Raises `LoadError` for a damaged file.
    """
    folder = Path(path)
    try:
        own = folder.is_dir() and ((folder / "generation_config.json").exists() or not _ggufs(folder))
    except OSError as error:
        raise _unreadable(folder, error) from None
    if own:
        place = folder / "generation_config.json"
        eos, sampling = hf_generation_defaults(folder, neutral=neutral)
    else:
        place = model_place(path)
        eos, sampling = gguf_generation_defaults(place)
    if neutral:
        return eos, {}
    try:
        SamplingParams(**sampling)
    except ClientError as error:  # else every request without these values of its own would be refused
        raise LoadError(f"{place}: {error.message}; mend that value or take it out") from None
    return eos, sampling


def model_place(path: str | Path) -> Path:
    """The folder with config.json, or the GGUF file, that `path` means."""
    try:
        return _place(Path(path))
    except OSError as error:  # no permission, a disk that fails, something that is no file
        raise _unreadable(path, error) from None


def _unreadable(path: str | Path, error: OSError) -> LoadError:
    return LoadError(f"{path} cannot be read: {error.strerror}; see that this user may read all of it")


def _place(place: Path) -> Path:
    if not place.exists():
        raise LoadError(f"{place} does not exist; give a model folder, a GGUF file, or a name that was pulled")
    if place.is_file():
        if place.name.endswith(".gguf") or is_gguf(place):
            return place
        raise LoadError(f"{place} is not a GGUF file; give a GGUF file, or the folder that holds config.json")
    if (place / "config.json").exists():
        return place
    found = _ggufs(place)
    if not found:
        raise LoadError(f"{place} holds neither config.json nor a GGUF file: not a model (an interrupted download?)")
    if len(found) > 1:
        names = ", ".join(f.name for f in found[:5])
        raise LoadError(f"{place} holds {len(found)} GGUF files ({names}); give the path of one of them")
    return found[0]


def gguf_alone(place: Path) -> Path:
    """The GGUF file of a folder that is a model by it alone; any other place as it is."""
    alone = place.is_dir() and not (place / "config.json").exists() and bool(_ggufs(place))
    return model_place(place) if alone else place


def _ggufs(folder: Path) -> list[Path]:
    """GGUF models in a folder; of a split one, the first file."""
    return sorted(f for f in folder.glob("*.gguf") if "-of-" not in f.name or "-00001-of-" in f.name)
