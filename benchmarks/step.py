"""Microseconds per decode step by part, in steady decode at depth 1, engine and worker in this process.

    python benchmarks/step.py [--rows 1,16,128] [--steps 200] [--model PATH] [--dtype float32] [--threads 1]

Without `--model`: a Llama with 2 layers, 64 wide, vocabulary 512 and random weights, so that what is not the
model's arithmetic shows. Every part is timed by wrapping the methods that do it; nothing in the engine knows.
Time is exclusive: a part does not contain the parts called from it. `hand-over` is what lies between the engine's
and the worker's thread. The figures are means over the fastest quarter of the steps, so that a busy machine
disturbs little and the parts still add up to the total.
"""

import argparse
import functools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers

from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.base.types import OutputKind
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.startup import build_core
from octavo.executor.uniproc import UniprocExecutor
from octavo.inputs.tokenizer import load_tokenizer
from octavo.models.catalogue.llama import LlamaForCausalLM
from octavo.outputs.assembler import Opening, OutputAssembler
from octavo.scheduler.apply import ResultApplier
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.batch import InputBatcher
from octavo.worker.choose import SampleChooser
from octavo.worker.runner import ContextBuilder, ModelRunner
from octavo.worker.seams import WatchedForward
from octavo.worker.table import RequestTable

PROMPT = 64  # tokens
WARM_UP = 10  # steps not counted
PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "schedule": ((Scheduler, "schedule"),),
    "hand-over": ((EngineCore, "step"),),
    "table": ((RequestTable, "apply"), (RequestTable, "append")),
    "batch": ((InputBatcher, "build"),),
    "attention plan": ((ContextBuilder, "build"),),
    "forward": ((WatchedForward, "run"),),
    "logits": ((LlamaForCausalLM, "logits"),),
    "sampling": ((SampleChooser, "choose"),),
    "runner, result": ((ModelRunner, "step"),),
    "apply": ((ResultApplier, "apply"),),
    "output": ((OutputAssembler, "push"),),
}
MODEL_PARTS = ("forward", "logits")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
}


class Stopwatch:
    """Exclusive seconds by part; calls nest within a thread.

    Owns: the sums of the step under way, and each thread's stack of open calls.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._local = threading.local()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time added to `part`."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            stack = self._local.__dict__.setdefault("stack", [])
            stack.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.sums[part] += took - stack.pop()
                if stack:
                    stack[-1] += took
                elif part == "runner, result":  # the worker's thread: the engine's waited for it
                    self.sums["hand-over"] -= took

        return wrapper

    @contextmanager
    def installed(self) -> Iterator[None]:
        """All methods of `PARTS` are timed inside the block."""
        places = [(owner, name, part) for part, methods in PARTS.items() for owner, name in methods]
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        try:
            for owner, name, part in places:
                setattr(owner, name, self.timed(part, getattr(owner, name)))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def take(self) -> dict[str, float]:
        """The sums since the last call."""
        sums, self.sums = self.sums, dict.fromkeys(PARTS, 0.0)
        return sums


def write_tiny_model(folder: Path) -> str:
    """A config and a byte-level tokenizer of 512 tokens; the weights are made on loading."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(a + b for a in alphabet[:16] for b in alphabet[:16])]
    merges = [(a, b) for a in alphabet[:16] for b in alphabet[:16]]
    core = Core(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engine(model: str, rows: int, args: argparse.Namespace) -> EngineCore:
    """A core for `rows` requests; prompts are computed in one step."""
    longest = PROMPT + args.steps + WARM_UP + 8
    config = EngineConfig(
        model=ModelConfig(model=model, dtype=args.dtype, max_model_len=longest),
        cache=CacheConfig(num_kv_blocks=rows * (longest // 16 + 2), block_size=args.block_size),
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(rows * PROMPT, 512)),
        device=DeviceConfig(device="cpu", num_threads=args.threads),
    )
    if args.model is None:
        config = replace(config, model=replace(config.model, load_format="dummy"))
    return build_core(config, lambda _: None, executor=UniprocExecutor("cpu")).core


def measure(model: str, rows: int, mode: str, args: argparse.Namespace) -> dict[str, float]:
    """Mean seconds by part, and "total", over the fastest quarter of the steps."""
    core = engine(model, rows, args)
    assembler = OutputAssembler(load_tokenizer(model))
    watch = Stopwatch()
    total = PROMPT + args.steps + WARM_UP
    try:
        for i in range(rows):
            prompt = tuple((i * 97 + j * 31) % 500 for j in range(PROMPT - i % 16))
            sampling = SamplingParams(
                max_tokens=total - len(prompt), ignore_eos=True, output_kind=OutputKind.DELTA, **MODES[mode]
            )
            name = f"request-{i}"
            assembler.open(
                Opening(parent_id=name, request_ids=(name,), params=sampling, prompt=None, prompt_token_ids=prompt)
            )
            core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        for _ in range(WARM_UP):
            assembler.push(core.step())  # type: ignore[arg-type]
        steps = []
        with watch.installed():
            for _ in range(args.steps - 1):
                began = time.perf_counter()
                assembler.push(core.step())  # type: ignore[arg-type]
                took = time.perf_counter() - began
                steps.append({**watch.take(), "total": took})
    finally:
        core.stop()
    steps.sort(key=lambda step: step["total"])
    best = steps[: max(1, len(steps) // 4)]
    return {name: sum(step[name] for step in best) / len(best) for name in best[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,128")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=None)
    args = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_tiny_model(Path(folder))
        for rows in map(int, args.rows.split(",")):
            for mode in args.modes.split(","):
                columns[f"{rows} {mode}"] = measure(model, rows, mode, args)
    print("us per step     " + "".join(f"{name:>12}" for name in columns))
    lines: dict[str, Callable[[dict[str, float]], float]] = {p: functools.partial(_one, p) for p in PARTS}
    lines["rest"] = lambda c: c["total"] - sum(c[p] for p in PARTS)
    lines["total"] = functools.partial(_one, "total")
    lines["without model"] = lambda c: c["total"] - sum(c[p] for p in MODEL_PARTS)
    for name, value in lines.items():
        print(f"{name:16}" + "".join(f"{value(column) * 1e6:12.0f}" for column in columns.values()))


def _one(part: str, column: dict[str, float]) -> float:
    return column[part]


if __name__ == "__main__":
    main()
