"""Transformers' own `generate()` as a peer, in its own environment `tf` under the peers' folder.

Promises: the same HTTP as the others, through a server of a hundred lines that scripts/peers installs.
Does not know: batching: `generate()` answers one request after the other, so only the works of one stream are run.
"""

import os
from pathlib import Path

from octavo.bench.peers.api import Checkpoint, Launch, ServerNeed, folder_files


class TransformersPeer:
    """`transformers_server.py` in its environment."""

    name = "transformers"
    widths = frozenset({"bf16"})
    works: frozenset[str] | None = frozenset({"W1", "W3", "W6"})

    def __init__(self, home: Path) -> None:
        self._python = home / "tf" / "bin" / "python"
        self._script = home / "transformers_server.py"

    def available(self) -> str | None:
        """Its environment and the script."""
        missing = [path for path in (self._python, self._script) if not path.exists()]
        return f"{missing[0]} is missing; scripts/peers/setup.sh makes it" if missing else None

    def files(self, model: Checkpoint, width: str) -> tuple[Path, ...]:
        """The folder."""
        return folder_files(model.folder)

    def version_command(self) -> tuple[str, ...]:
        """From its package's metadata."""
        code = (
            "from importlib.metadata import version as v; print('transformers', v('transformers'), 'torch', v('torch'))"
        )
        return (str(self._python), "-c", code)

    def launch(self, model: Checkpoint, width: str, need: ServerNeed, port: int) -> Launch:
        """One request at a time."""
        command = (str(self._python), str(self._script), str(model.folder), "--port", str(port), "--name", model.name)
        env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        return Launch(command=command, port=port, model=model.name, env=env, extra={"ignore_eos": True})
