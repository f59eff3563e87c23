"""Sampling parameters that a model's author recommends (INP-22).

Promises: the values of `generation_config.json` (or a GGUF file's `general.sampling.*`) under the names
requests use, each of them valid, and one line in the log that says which are in force.
Does not know: a request's own values; those win, and the caller merges them.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.base.errors import ClientError, ConfigError
from octavo.base.gguf import is_gguf, read_gguf
from octavo.base.params import SamplingParams
from octavo.inputs.tokenizer_folder import read_json

FOLDER_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

_log = logging.getLogger(__name__)


def load_default_sampling(source: str, choice: str = "auto") -> dict[str, Any]:
    """The author's recommendations, by field of `SamplingParams`.

    `choice` is `auto` (the model's own), `neutral` (none), or another folder with a `generation_config.json`.
    Values that are not valid are left out with a warning; `ConfigError` for a folder without the file.
    """
    if choice == "neutral":
        _log.info("default sampling parameters: neutral")
        return {}
    path = Path(source if choice == "auto" else choice)
    if choice != "auto" and not (path / "generation_config.json").is_file():
        raise ConfigError(f"--generation-config: there is no generation_config.json in {choice!r}")
    found = {name: value for name, value in _read(path).items() if _valid(name, value)}
    told = ", ".join(f"{name}={value}" for name, value in found.items()) or "neutral (the model recommends none)"
    _log.info("default sampling parameters: %s%s", told, f" (from {path})" if found else "")
    return found


def _read(path: Path) -> dict[str, Any]:
    if is_gguf(path):
        found = _renamed(read_gguf(path, with_tensors=False).metadata, GGUF_KEYS)
        # stored in single precision: 0.6 comes back as 0.6000000238
        return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()}
    return _renamed(read_json(path / "generation_config.json"), FOLDER_KEYS)


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: values[key] for key, name in names.items() if values.get(key) is not None}


def _valid(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except ClientError as e:
        _log.warning("the model's recommended %s is not used: %s", name, e.message)
        return False
    return True
