"""Microseconds per decode step by part, in steady decode at depth 1, engine and worker in this process.

    python benchmarks/step.py [--rows 1,16,128] [--steps 200] [--model PATH] [--dtype float32] [--threads N]
        [--kernels auto] [--option quantization=int4_group ...]

Without `--model`: a Llama with 2 layers, 64 wide, vocabulary 512 and random weights, so that what is not the
model's arithmetic shows. Every part is timed by wrapping the methods that do it; nothing in the engine knows.
Time is exclusive: a part does not contain the parts called from it. `hand-over` is what lies between the engine's
and the worker's thread. A recorded pass is timed call by call and its time given to `linear`, `attention` and `small
operators`; one that is not recorded is all `forward`. `messages` is what the step's outputs cost to encode, and to
decode on the other side. The figures are means over the fastest quarter of the steps, so that a busy machine
disturbs little and the parts still add up to the total. Where the machine is busy all the time, `--clock cpu` counts
the processor time of the two Python threads instead: right for what is Python, while native calls count one thread.

CMP-10 asks that `beside linear and attention` be at most 5 % of a bf16 step, and 10 % of an int4 one, with one row
on SmolLM2.
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

from octavo.base.codec import MessageDecoder, MessageEncoder
from octavo.base.outputs import EngineOutputs
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.base.types import OutputKind
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.startup import build_core
from octavo.executor.uniproc import UniprocExecutor
from octavo.inputs.tokenizer import load_tokenizer
from octavo.models.catalogue.llama import LlamaForCausalLM
from octavo.outputs.assembler import OutputAssembler, RequestOpening
from octavo.scheduler.apply import ResultApplier
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.batch import InputBatcher
from octavo.worker.choose import SampleChooser
from octavo.worker.recorded import Recording
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
    "linear": ((LlamaForCausalLM, "logits"),),
    "attention": (),
    "small operators": (),
    "sampling": ((SampleChooser, "choose"),),
    "runner, result": ((ModelRunner, "step"),),
    "apply": ((ResultApplier, "apply"),),
    "output": ((OutputAssembler, "push"),),
    "messages": ((MessageEncoder, "encode"), (MessageDecoder, "decode")),
}
LARGE = {
    "linear": "linear",
    "linear_gated": "linear",
    "qlinear": "linear",
    "attention": "attention",
}  # by a native call's name
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
}


class Stopwatch:
    """Exclusive seconds by part; calls nest within a thread.

    Owns: the sums of the step under way, each thread's stack of open calls, and the parts of recorded calls.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._names: dict[int, list[str]] = {}  # by recording
        self.sums: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._local = threading.local()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time added to `part`."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            stack = self._local.__dict__.setdefault("stack", [])
            stack.append(0.0)
            began = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = self._clock() - began
                self.sums[part] += took - stack.pop()
                if stack:
                    stack[-1] += took
                elif part == "runner, result" and self._clock is time.perf_counter:  # the engine's thread waited for it
                    self.sums["hand-over"] -= took

        return wrapper

    @contextmanager
    def installed(self) -> Iterator[None]:
        """All methods of `PARTS` are timed inside the block."""
        places = [(owner, name, part) for part, methods in PARTS.items() for owner, name in methods]
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        originals.append((Recording, "replay", Recording.replay))
        try:
            for owner, name, part in places:
                setattr(owner, name, self.timed(part, getattr(owner, name)))
            Recording.replay = lambda recording, count: self.replay(recording, count)  # type: ignore[method-assign]
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def replay(self, recording: Recording, num_tokens: int) -> Any:
        """In place of `Recording.replay`: each call's time goes to its part."""
        if id(recording) not in self._names:
            self._names[id(recording)] = [LARGE.get(name, "small operators") for name in recording.tape.names()]
        hidden, seconds = recording.timed_replay(num_tokens)
        for part, took in zip(self._names[id(recording)], seconds, strict=True):
            self.add(part, took)
        return hidden

    def add(self, part: str, seconds: float) -> None:
        """Time that a native call took, inside the part that is open."""
        self.sums[part] += seconds
        if stack := self._local.__dict__.get("stack"):
            stack[-1] += seconds

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
        device=DeviceConfig(device="cpu", num_threads=args.threads, kernels=args.kernels),
    )
    options = dict(option.split("=", 1) for option in args.option)
    if args.model is None:
        options["load_format"] = "dummy"
    config = replace(config, model=replace(config.model, **options))
    return build_core(config, lambda _: None, executor=UniprocExecutor("cpu")).core


def measure(model: str, rows: int, mode: str, args: argparse.Namespace) -> dict[str, float]:
    """Mean seconds by part, and "total", over the fastest quarter of the steps."""
    core = engine(model, rows, args)
    assembler = OutputAssembler(load_tokenizer(model))
    encoder, decoder = MessageEncoder(), MessageDecoder(EngineOutputs)
    clock = time.perf_counter if args.clock == "wall" else time.thread_time
    watch = Stopwatch(clock)

    def step() -> None:
        outputs = core.step()
        assembler.push(decoder.decode(encoder.encode(outputs)))

    total = PROMPT + args.steps + WARM_UP
    try:
        for i in range(rows):
            prompt = tuple((i * 97 + j * 31) % 500 for j in range(PROMPT - i % 16))
            sampling = SamplingParams(
                max_tokens=total - len(prompt), ignore_eos=True, output_kind=OutputKind.DELTA, **MODES[mode]
            )
            name = f"request-{i}"
            assembler.open(
                RequestOpening(
                    parent_id=name, request_ids=(name,), params=sampling, prompt=None, prompt_token_ids=prompt
                )
            )
            core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        for _ in range(WARM_UP):
            step()
        steps = []
        with watch.installed():
            for _ in range(args.steps - 1):
                began = time.perf_counter()
                step()
                took = time.perf_counter() - began
                parts = watch.take()
                steps.append({**parts, "total": took if args.clock == "wall" else sum(parts.values())})
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
    parser.add_argument("--threads", type=int, default=None, help="compute threads; every core when not given")
    parser.add_argument("--block-size", type=int, default=None)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--option", action="append", default=[], help="name=value of a model option; may be repeated")
    args = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_tiny_model(Path(folder))
        for rows in map(int, args.rows.split(",")):
            for mode in args.modes.split(","):
                columns[f"{rows} {mode}"] = measure(model, rows, mode, args)
    print(f"{'us per step':28}" + "".join(f"{name:>12}" for name in columns))
    lines: dict[str, Callable[[dict[str, float]], float]] = {p: functools.partial(_one, p) for p in PARTS}
    lines["rest"] = lambda c: c["total"] - sum(c[p] for p in PARTS)
    lines["total"] = functools.partial(_one, "total")
    lines["beside linear and attention"] = _beside
    for name, value in lines.items():
        print(f"{name:28}" + "".join(f"{value(column) * 1e6:12.0f}" for column in columns.values()))
    print(f"{'  of the total':28}" + "".join(f"{_beside(c) / c['total']:12.1%}" for c in columns.values()))


def _beside(column: dict[str, float]) -> float:
    return column["total"] - column["linear"] - column["attention"]


def _one(part: str, column: dict[str, float]) -> float:
    return column[part]


if __name__ == "__main__":
    main()
