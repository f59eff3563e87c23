"""The only reader of the environment.

Promises: the environment is read once, here, into a frozen value that is passed down.
Does not know: what any option means; names of options come from `config.schema` through `config.args`.

Two kinds of names: the few below, and `OCTAVO_<OPTION>` for every option of the schema
(`OCTAVO_MAX_MODEL_LEN=4096`), which `config.args` reads from `Env.options`.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "OCTAVO_"
NAMES = {
    "OCTAVO_CACHE": "Folder for pulled models; ~/.cache/octavo when not set.",
    "OCTAVO_DEBUG": "1: show the stack of an error that ends the program.",
    "OCTAVO_PLUGINS": "Comma-separated plugins to load; not set: all, set and empty: none. One that is not installed ends the start.",
    "OCTAVO_CONFIG": "YAML file with options, as --config.",
}

# How long a compute thread spins for the next piece of work before it sleeps. GNU OpenMP's own default is some 10 ms:
# on cores that others use too, threads then spin while the one they wait for cannot run, and a step takes seconds.
# This is the number that library takes itself when it knows of too few cores; about one wake-up's worth of spinning.
SPIN_COUNT = "1000"
SPIN_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """Where models come from, by the variables that every program of that hub reads.

    HF_ENDPOINT: another address than the hub's own. HF_TOKEN (or the file that `hf auth login` writes: HF_TOKEN_PATH,
    HF_HOME): who asks. HF_HUB_OFFLINE: ask nobody.
    """

    endpoint: str = "https://huggingface.co"
    offline: bool = False
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None

    def read_token(self) -> str | None:
        """The token, from the file where the environment has none; None for none that a header can carry."""
        token = self.token
        if token is None and self.token_file is not None:
            try:
                token = self.token_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                return None
        return token if token and token.isascii() and token.isprintable() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """What the environment says. `plugins` None means not set; empty means none."""

    cache_dir: Path
    debug: bool = False
    plugins: tuple[str, ...] | None = None
    config_file: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)  # OCTAVO_MAX_MODEL_LEN -> under "OCTAVO_MAX_MODEL_LEN"
    hub: HubAccess = HubAccess()


def read_env(environ: Mapping[str, str] | None = None) -> Env:
    """Read the environment (or the mapping a test gives)."""
    env = os.environ if environ is None else environ
    plugins = env.get("OCTAVO_PLUGINS")
    cache = env.get("OCTAVO_CACHE")
    home = _home(env)
    return Env(
        cache_dir=Path(cache) if cache else home / ".cache" / "octavo",
        debug=env.get("OCTAVO_DEBUG", "") not in ("", "0"),
        plugins=None if plugins is None else tuple(p.strip() for p in plugins.split(",") if p.strip()),
        config_file=env.get("OCTAVO_CONFIG") or None,
        options={k: v for k, v in env.items() if k.startswith(PREFIX) and k not in NAMES},
        hub=_hub(env, home),
    )


def _home(env: Mapping[str, str]) -> Path:
    """The user's folder; the current one for a user that the machine does not know (a container's number)."""
    try:
        return Path(env.get("HOME") or "~").expanduser()
    except RuntimeError:
        return Path()


def _hub(env: Mapping[str, str], home: Path) -> HubAccess:
    folder = Path(env.get("HF_HOME") or home / ".cache" / "huggingface")
    return HubAccess(
        endpoint=(env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
        offline=env.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        token=env.get("HF_TOKEN") or None,
        token_file=Path(env.get("HF_TOKEN_PATH") or folder / "token"),
    )


def compute_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a new process that computes: ours, with spinning bounded unless the user has set it."""
    env = dict(os.environ if environ is None else environ)
    if not any(name in env for name in SPIN_SETTINGS):
        env[SPIN_SETTINGS[0]] = SPIN_COUNT
    return env


def environment_with(defaults: Mapping[str, str]) -> dict[str, str]:
    """For a program that is started: this process's environment, and these where it says nothing."""
    return {**defaults, **os.environ}


@contextmanager
def compute_settings() -> Iterator[None]:
    """The same for this process: the library that spins reads them once, when it is first imported in this block.

    Nothing stays in the environment. A process that has imported torch before keeps what it has.
    """
    added = compute_environment().items() - os.environ.items()
    os.environ.update(added)
    try:
        yield
    finally:
        for name, _ in added:
            os.environ.pop(name, None)
