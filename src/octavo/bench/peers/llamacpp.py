"""llama.cpp's server as a peer, built under the peers' folder.

Promises: as many threads as cores, a slot for every request of the work, flash attention, prompt cache on.
Does not know: the others.

`bf16` reads the BF16 file, `int8` Q8_0 and `int4` Q4_0: the formats for which it has its fastest kernels.
"""

import os
from pathlib import Path

from octavo.bench.peers.api import WIDTHS, Checkpoint, Launch, ServerNeed


class LlamaCppPeer:
    """`llama-server`. `slots` (None: as the work asks) is how many requests it runs at once."""

    name = "llamacpp"
    widths = frozenset(WIDTHS)
    works: frozenset[str] | None = None

    def __init__(self, home: Path, *, flash_attention: str = "on") -> None:
        self._server = home / "build" / "llama-build" / "bin" / "llama-server"
        self._flash_attention = flash_attention

    def available(self) -> str | None:
        """The built server."""
        return None if self._server.exists() else f"{self._server} is missing; scripts/peers/setup.sh builds it"

    def files(self, model: Checkpoint, width: str) -> tuple[Path, ...]:
        """The GGUF file of this width."""
        return (model.gguf[width],)

    def version_command(self) -> tuple[str, ...]:
        """It prints build number and compiler."""
        return (str(self._server), "--version")

    def launch(self, model: Checkpoint, width: str, need: ServerNeed, port: int) -> Launch:
        """A context of all slots together; each has an equal part."""
        threads = str(len(os.sched_getaffinity(0)))
        command = (
            *(str(self._server), "--model", str(model.gguf[width]), "--alias", model.name),
            *("--host", "127.0.0.1", "--port", str(port), "--no-webui"),
            *("--threads", threads, "--threads-batch", threads),
            *("--parallel", str(need.slots), "--ctx-size", str(need.slots * need.tokens_per_slot)),
            *("--flash-attn", self._flash_attention),
        )
        return Launch(command=command, port=port, model=model.name, extra={"ignore_eos": True})
