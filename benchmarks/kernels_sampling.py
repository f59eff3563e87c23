"""What choosing tokens costs: the native sampler beside its numpy twin and the machine's limit.

    python benchmarks/kernels_sampling.py [--vocab 49152,128256] [--rows 1,32] [--rounds N] [--threads N]

Times are of the whole call, Python included. Every sampler must read the logits once, so the share is that of a
streaming read of as many bytes, measured between rounds from memory that is as warm as the logits are. Peaked rows are
what models give; flat ones, normal noise, are the worst that top-p can meet. All take turns and the best of the rounds
is shown, since a machine's neighbours are part of what is measured.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from octavo.base.params import SamplingParams
from octavo.ops.native import core
from octavo.sampling.choice import make_sampler
from octavo.sampling.state import SamplingRows, SamplingState

LENGTH = 400  # tokens that each row knows, of which PROMPT are its prompt
PROMPT = 100
MODES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-k 1000, top-p 0.9": {"top_k": 1000, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "5 log-probabilities": {"temperature": 0.0, "logprobs": 5},
    "all log-probabilities": {"temperature": 0.0, "logprobs": -1},
}


@dataclass(frozen=True, slots=True)
class Case:
    """The same question for both samplers."""

    name: str
    run: Callable[[], object]
    twin: Callable[[], object]
    logits: torch.Tensor


def rows_of(vocab: int, rows: int, kind: str) -> torch.Tensor:
    """Logits [rows, vocab]: noise, and where `kind` is peaked thirty tokens that hold nearly all mass."""
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, (rows, vocab)).astype(np.float32)
    if kind == "peaked":
        x *= 2.5
        for row in x:
            row[rng.integers(0, vocab, 30)] = np.linspace(18, 9, 30)
    return torch.from_numpy(x)


def asked(logits: torch.Tensor, settings: dict[str, object], native: bool) -> Callable[[], object]:
    rows, vocab = logits.shape
    sampler = make_sampler(vocab_limit=vocab, native=native)
    state = SamplingState(max_num_seqs=rows, vocab_limit=vocab, engine_seed=0, make_counts=sampler.make_counts)
    for i in range(rows):
        params = SamplingParams(seed=i, max_tokens=LENGTH, **settings)  # type: ignore[arg-type]
        state.enter(i, f"r{i}", params, num_prompt_tokens=PROMPT)
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, LENGTH)).astype(np.int32)
    slots, lengths = np.arange(rows, dtype=np.int32), np.full(rows, LENGTH, dtype=np.int64)

    def run() -> object:
        question = SamplingRows(metadata=state.metadata(slots), token_ids=tokens, lengths=lengths)
        return sampler.sample(logits if native else logits.clone(), question)

    return run


def cases(vocabs: tuple[int, ...], counts: tuple[int, ...]) -> "list[Callable[[], Case]]":
    """What to measure, made one at a time."""

    def case(vocab: int, rows: int, kind: str, mode: str) -> Case:
        logits = rows_of(vocab, rows, kind)
        name = f"{rows:3} x {vocab:6} {kind:6} {mode}"
        return Case(name, asked(logits, MODES[mode], True), asked(logits, MODES[mode], False), logits)

    return [
        lambda v=v, r=r, k=k, m=m: case(v, r, k, m)  # type: ignore[misc]
        for v in vocabs
        for r in counts
        for k in ("peaked", "flat")
        for m in MODES
    ]


def best_s(run: Callable[[], object], least_s: float) -> float:
    """The fastest of many runs."""
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < least_s:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def show(case: Case, rounds: int) -> None:
    """Measure in turns and print a line."""
    memory, size = case.logits.data_ptr(), case.logits.numel() * 4
    native = twin = probe = float("inf")
    for _ in range(rounds):
        native = min(native, best_s(case.run, 0.02))
        twin = min(twin, best_s(case.twin, 0.02))
        probe = min(probe, best_s(lambda: core.probe_read(memory, size), 0.01))
    rows = case.logits.shape[0]
    print(
        f"{case.name:44} {native * 1e6:9.1f} us {native / rows * 1e6:8.1f} a row {size / native / 1e9:7.1f} GB/s"
        f" {probe / native:6.0%} of {size / probe / 1e9:6.1f} {twin / native:8.1f}x numpy"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", default="49152,128256")
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="1 where others use the cores: threads wait in turn")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    vocabs, counts = (tuple(map(int, text.split(","))) for text in (args.vocab, args.rows))
    for make in cases(vocabs, counts):
        show(make(), args.rounds)


if __name__ == "__main__":
    main()
