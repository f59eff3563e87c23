"""What an engine keeps resident: cache as it is used, tables once (REQ-14)."""

import queue
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.base.outputs import EngineOutputs
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.client import InprocClient
from octavo.engine.startup import StartedCore, build_core
from octavo.executor.api import WorkerConfig
from octavo.executor.host import HostedWorker, probe
from octavo.executor.uniproc import UniprocExecutor
from octavo.worker.memory import KVMemory
from octavo.worker.seams import NullDataPart
from octavo.worker.worker import WorkerSeams
from tests.support import checkpoints
from tests.support.live import spawn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PAGE = resource.getpagesize()
MIB = 1 << 20
LARGE_PAGES = 2 * 2 * MIB  # a piece that begins and ends anywhere rounds up to that much more


class Watcher(NullDataPart):
    """Owns: the KV memory, to look at."""

    memory: KVMemory

    def bind(self, memory: KVMemory) -> None:
        self.memory = memory

    def resident(self) -> int:
        """Bytes of it that the system has given."""
        buffer = self.memory.buffer
        first, last = buffer.data_ptr() // PAGE, (buffer.data_ptr() + buffer.numel() - 1) // PAGE
        with Path("/proc/self/pagemap").open("rb") as file:
            file.seek(first * 8)
            entries = np.frombuffer(file.read((last + 1 - first) * 8), np.uint64)
        return int(np.count_nonzero(entries >> np.uint64(63))) * PAGE


def start(num_blocks: int, watcher: Watcher) -> StartedCore:
    model = checkpoints.tiny_llama(num_hidden_layers=12)
    config = EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32", max_model_len=256, weight_cache="off"),
        cache=CacheConfig(num_kv_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256),
        device=DeviceConfig(num_threads=1),
    )

    def make(worker_config: WorkerConfig) -> HostedWorker:
        seams = WorkerSeams(parts=(watcher,))
        return HostedWorker(worker_config, probe("cpu"), prober=lambda: probe("cpu"), seams=seams)

    return build_core(config, lambda line: None, executor=UniprocExecutor("cpu", make=make))


def test_cache_that_no_request_has_used_is_not_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is made ready after a start. Whatever the number of layers: a block's pages lie side by side."""
    monkeypatch.setattr("octavo.worker.memory.READY_BYTES", 0)
    watcher = Watcher()
    started = start(num_blocks=2_000, watcher=watcher)
    kv_bytes = started.report.kv_bytes
    block_bytes = kv_bytes // 2_001
    assert kv_bytes > 256 * MIB
    client = InprocClient(started.core)
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    client.start(inbox.put, inbox.put)
    try:
        assert watcher.resident() <= 2 * block_bytes + LARGE_PAGES, "warm-up uses a block"
        prompt = tuple(i % 100 for i in range(200))
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        for turn in range(3):
            prompts = [(turn + 1, i + 1, *prompt) for i in range(4)]
            client.submit(
                tuple(
                    EngineRequest(request_id=f"{turn} {i}", prompt_token_ids=p, sampling=sampling)
                    for i, p in enumerate(prompts)
                )
            )
            ended = 0
            while ended < len(prompts):
                outputs = inbox.get(timeout=60)
                assert isinstance(outputs, EngineOutputs), outputs
                ended += sum(delta.finish is not None for delta in outputs.deltas)
        used = 3 * 4 * (-(-203 // started.report.block_size))
        assert watcher.resident() <= (used + 2) * block_bytes + LARGE_PAGES
    finally:
        client.close()


ONE_ANSWER = """
import sys
from octavo.entrypoints.llm import LLM
llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=64, num_kv_blocks=16, num_threads=1, weight_cache="off")
llm.generate(["hello there"])
print(*(name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules))
"""


def test_an_engine_does_not_load_torchs_compiler() -> None:
    """A second of start-up and 74 MiB, and torch imports it in unexpected places."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_ANSWER, str(checkpoints.tiny_llama())], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip()


def libraries(pid: int) -> set[str]:
    """Names of the files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[5]).name for line in lines if len(line.split()) > 5}


def test_of_a_servers_processes_one_has_torch() -> None:
    """The other, which speaks HTTP and reads text, never loads it."""
    model = str(checkpoints.tiny_llama())
    with spawn(model, "--dtype", "bfloat16", "--num-threads", "1", "--num-kv-blocks", "16") as server:
        server.text("hello there", max_tokens=3)
        assert server.process is not None
        pid = server.process.pid
        children = [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]
        assert "libtorch_cpu.so" not in libraries(pid)
        assert ["libtorch_cpu.so" in libraries(child) for child in children] == [True]
