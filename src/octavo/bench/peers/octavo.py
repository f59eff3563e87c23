"""Octavo as a peer: `octavo serve` of this installation.

Promises: the same defaults a user gets; only what the work needs is set.
Does not know: the others.
"""

from pathlib import Path

from octavo.base.interpreter import module_command
from octavo.bench.peers.api import WIDTHS, Checkpoint, Launch, ServerNeed, folder_files

SCHEMES = {"int8": "int8_per_channel", "int4": "int4_group"}


class OctavoPeer:
    """`octavo serve` in a process of its own, run by the same Python."""

    name = "octavo"
    widths = frozenset(WIDTHS)
    works: frozenset[str] | None = None

    def available(self) -> str | None:
        """Always there."""
        return None

    def files(self, model: Checkpoint, width: str) -> tuple[Path, ...]:
        """The folder, for every width: weights are quantized while they are read."""
        return folder_files(model.folder)

    def version_command(self) -> tuple[str, ...]:
        """`octavo --version`."""
        return tuple(module_command("octavo.entrypoints.cli", "--version"))

    def launch(self, model: Checkpoint, width: str, need: ServerNeed, port: int) -> Launch:
        """bf16 is computed as it is; the other widths by their scheme."""
        scheme = ("--quantization", SCHEMES[width]) if width in SCHEMES else ()
        command = (
            *module_command("octavo.entrypoints.cli", "serve", str(model.folder)),
            *("--dtype", "bfloat16", *scheme),
            *("--max-model-len", str(need.tokens_per_slot), "--max-num-seqs", str(need.slots)),
            *("--kv-cache-memory", str(need.kv_bytes(model.shape))),
            *("--served-model-name", model.name, "--port", str(port), "--disable-access-log"),
        )
        return Launch(command=command, port=port, model=model.name, extra={"ignore_eos": True})
