"""How decode speed grows with the number of rows and with the context: tokens per second, one table.

    python benchmarks/scaling.py MODEL [--dtype bfloat16] [--quantization int8_per_channel]
        [--rows 1,2,4,8,16,32,64] [--contexts 128,512,2048,8192] [--steps 12] [--most-kv 4GiB]

Each cell is a batch of decode steps of the whole worker (plan to sampled tokens) over KV memory filled with noise, so
that no prompt needs computing. Its figure is the median step. Beside the tokens per second stands the share of the
machine's streaming read bandwidth (probed in the same process) that the step reaches, counting the bytes it must
read: weights once, and the KV of every row. A cell whose KV would not fit in `--most-kv` is left out.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from octavo.base.kvspec import KVLayout, KVSpec
from octavo.base.params import SamplingParams
from octavo.base.step import BatchPlan, NewRow, StepPlan, as_ints, ragged
from octavo.config.args import parse_size
from octavo.config.facts import read_model_facts
from octavo.config.resolve import resolve
from octavo.config.schema import DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.startup import worker_config
from octavo.executor.host import make_worker
from octavo.executor.host import probe as probe_device
from octavo.ops.native import core
from octavo.ops.pages import reserve
from octavo.worker.dummy import first_blocks
from octavo.worker.memory import KVMemory, scratch_layout
from octavo.worker.seams import NullDataPart
from octavo.worker.worker import NothingLate

SPARE_TOKENS = 64  # beside the context and what the steps add


class Noise(NullDataPart):
    """Fills KV memory with small random numbers: pages never written would all be one page of zeros.

    Owns: nothing.
    """

    name = "noise"

    def bind(self, memory: KVMemory) -> None:
        for binding in memory.bindings:
            for view in (binding.key, binding.value):
                view.copy_(torch.randn(view.shape[1:]).to(view.dtype).expand(view.shape))


class Decoder:
    """A worker that decodes rows of any context.

    Owns: the worker.
    """

    def __init__(self, args: argparse.Namespace, rows: int, context: int) -> None:
        device = probe_device("cpu")
        facts = read_model_facts(args.model)
        model: dict[str, Any] = {
            "model": args.model,
            "dtype": args.dtype,
            "max_model_len": context + args.steps + SPARE_TOKENS,
        }
        if args.quantization:
            model["quantization"] = args.quantization
        config = EngineConfig(
            model=ModelConfig(**model),
            scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(rows, 64)),
            device=DeviceConfig(device="cpu", num_threads=args.threads),
        )
        settings = worker_config(resolve(config, facts, device, None).config, facts, device)
        torch.set_num_threads(settings.num_threads)
        self._worker = make_worker(settings, parts=(Noise(),))
        loaded = self._worker.load(lambda _: None)
        self.weight_bytes = loaded.weight_bytes
        self.specs: tuple[KVSpec, ...] = loaded.specs

    def kv_bytes(self, rows: int, context: int) -> int:
        """Bytes of KV that one step over these rows reads."""
        return sum(rows * -(-context // s.block_size) * s.page_bytes for s in self.specs)

    def seconds(self, rows: int, context: int, steps: int) -> float:
        """The median decode step."""
        layout = scratch_layout(self.specs, [context + steps] * rows)
        self._worker.allocate(layout)
        self._worker.step(_enter(layout, rows, context, steps), NothingLate())
        took = []
        for step in range(steps - 1):
            plan = _decode(layout, rows, context + step)
            began = time.perf_counter()
            self._worker.step(plan, NothingLate())
            took.append(time.perf_counter() - began)
        return statistics.median(took[2:] or took)

    def stop(self) -> None:
        """Free everything."""
        self._worker.stop()


def _enter(layout: KVLayout, rows: int, context: int, steps: int) -> StepPlan:
    """Rows whose context but the last token counts as computed."""
    greedy = SamplingParams(temperature=0.0)
    new = tuple(
        NewRow(
            slot=i,
            request_id=f"row-{i}",
            tokens=tuple((i * 37 + j) % 1000 for j in range(context)),
            num_prompt_tokens=context,
            sampling=greedy,
        )
        for i in range(rows)
    )
    blocks = first_blocks(layout, [context + steps] * rows)
    return _plan(rows, context - 1, new, blocks)


def _decode(layout: KVLayout, rows: int, computed: int) -> StepPlan:
    none: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in layout.groups]
    return _plan(rows, computed, (), none)


def _plan(rows: int, start: int, new: tuple[NewRow, ...], blocks: list[list[list[int]]]) -> StepPlan:
    batch = BatchPlan(
        new=new,
        slots=as_ints(list(range(rows))),
        num_computed_tokens=as_ints([start] * rows),
        num_scheduled_tokens=as_ints([1] * rows),
        num_sampled_tokens=as_ints([1] * rows),
        num_draft_tokens=as_ints([0] * rows),
        new_blocks=tuple(ragged(group) for group in blocks),
    )
    return StepPlan(seq=0, batch=batch)


def read_rate(num_bytes: int = 512 << 20) -> float:
    """Bytes a second of a streaming read by all threads, the best of five."""
    memory = reserve(num_bytes, "the probe").fill_(1)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        core.probe_read(memory.data_ptr(), num_bytes)
        took.append(time.perf_counter() - began)
    return num_bytes / min(took)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--contexts", default="128,512,2048,8192")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--most-kv", default="4GiB", help="largest KV of one cell")
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    rows, contexts = ([int(n) for n in text.split(",")] for text in (args.rows, args.contexts))
    most = parse_size(args.most_kv, "--most-kv")
    most_context = read_model_facts(args.model).max_position - args.steps - SPARE_TOKENS
    contexts = sorted({min(n, most_context) for n in contexts})  # what a step adds must fit into the model, too
    print(f"{args.model} {args.dtype} {args.quantization or ''}: tokens/s (ms a step, share of the read bandwidth)")
    print(f"{'context':>8}" + "".join(f"{f'{n} rows':>24}" for n in rows))
    decoder = Decoder(args, max(rows), max(contexts))
    try:
        for context in contexts:
            roof = read_rate()
            cells = []
            for n in rows:
                if decoder.kv_bytes(n, context) > most:
                    cells.append("-")
                    continue
                step = decoder.seconds(n, context, args.steps)
                share = (decoder.weight_bytes + decoder.kv_bytes(n, context)) / step / roof
                cells.append(f"{n / step:.0f} ({step * 1e3:.1f} ms, {share:.0%})")
            print(f"{context:>8}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
    finally:
        decoder.stop()


if __name__ == "__main__":
    main()
