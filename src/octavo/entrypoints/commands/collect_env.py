"""`octavo collect-env`: what a bug report needs to know of this machine.

Promises: no network, no model, no secret.
Does not know: anything about devices beyond what the executor's probe says.
"""

import platform
import sys
from importlib import metadata

from octavo import __version__
from octavo.base.errors import OctavoError
from octavo.engine.startup import executor_class
from octavo.entrypoints.commands.arguments import Call

PACKAGES = (
    "torch", "numpy", "msgspec", "pyzmq", "tokenizers", "jinja2", "safetensors", "fastapi", "starlette", "uvicorn",
    "uvloop", "httptools", "httpx2", "prometheus-client", "prompt-toolkit", "pyyaml", "transformers", "huggingface-hub", "xxhash",
)  # fmt: skip


def run(call: Call) -> int:
    """Print lines of `name: value`."""
    lines = [
        f"octavo: {__version__}",
        f"python: {platform.python_version()} ({sys.executable})",
        f"system: {platform.platform()}",
        f"machine: {platform.machine()}",
        f"cache folder: {call.env.cache_dir}",
        f"options from the environment: {', '.join(sorted(call.env.options)) or 'none'}",
    ]
    lines += [f"{name}: {_version(name)}" for name in PACKAGES]
    lines += _device()
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device() -> list[str]:
    executor = executor_class()()
    try:
        facts = executor.probe()
    except OctavoError as error:
        return [f"device: {error}"]
    finally:
        executor.stop()
    return [
        f"device: {facts.name} ({facts.kind})",
        f"cores for this process: {facts.num_cores}",
        f"memory: {facts.memory_available_bytes / 2**30:.1f} of {facts.memory_total_bytes / 2**30:.1f} GiB available",
        f"capability: {', '.join(facts.capability)}",
    ]
