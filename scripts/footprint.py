"""Print what the installation weighs and what imports cost: install size, import times, time of --help.

Promises: figures only; nothing fails here (the limits that must hold are tests).
Does not know: what is acceptable.
"""

import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

CODE = {
    "octavo": "import octavo",
    "control plane": "import octavo.engine.core, octavo.scheduler.scheduler, octavo.inputs.renderer, octavo.outputs.assembler",
    "server": "import octavo.entrypoints.http.app",
    "torch": "import torch",
}


def size_bytes(dist: metadata.Distribution) -> int:
    """Bytes of a distribution's files."""
    files = dist.files or []
    return sum(p.stat().st_size for f in files if (p := Path(str(dist.locate_file(f)))).is_file())


def seconds(args: list[str]) -> float:
    """Best of three runs of a command."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(args, check=True, capture_output=True)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Print the figures."""
    sizes = sorted(((size_bytes(d), d.name) for d in metadata.distributions()), reverse=True)
    total = sum(s for s, _ in sizes)
    print(f"install size: {total / 2**20:.0f} MiB in {len(sizes)} packages; largest:")
    for size, name in sizes[:8]:
        print(f"  {size / 2**20:8.1f} MiB  {name}")
    for name, code in CODE.items():
        print(f"import time, {name}: {seconds([sys.executable, '-c', code]):.2f} s")
    octavo = str(Path(sys.executable).parent / "octavo")
    print(f"octavo --help: {seconds([octavo, '--help']):.2f} s")


if __name__ == "__main__":
    main()
