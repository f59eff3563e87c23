"""What a returning conversation costs: its prefix computed again, or loaded from where it went.

    python benchmarks/kv_tiers.py MODEL [--tokens 4000] [--rounds 5] [--folder DIR]

Time to the first token of a prompt of `--tokens` tokens, medians over rounds: computed; found in the cache of the
device; from host memory after its blocks were evicted; from files after the engine was started anew. The text is
compared each time. Evicting is what prompts of other conversations do meanwhile; the cache holds little more than one.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from octavo import LLM, SamplingParams

FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def conversation(number: int, tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(number * 7919 + i * 31) % 40_000 + 500 for i in range(tokens)]}


class Bench:
    """One engine.

    Owns: the engine, and what each prompt's first token was.
    """

    def __init__(self, call: argparse.Namespace, first: dict[int, int], **options: object) -> None:
        blocks = call.tokens // call.block_size + 8
        self._llm = LLM(
            call.model, dtype=call.dtype, block_size=call.block_size, num_kv_blocks=blocks,
            max_model_len=call.tokens + 64, **options,
        )  # fmt: skip
        self._tokens, self._first = call.tokens, first

    def ask(self, number: int) -> tuple[float, str]:
        """Seconds to the first token, and where most of the prefix came from."""
        began = time.perf_counter()
        (out,) = self._llm.generate(conversation(number, self._tokens), FIRST, use_tqdm=False)
        seconds = time.perf_counter() - began
        token = out.outputs[0].token_ids[0]
        if self._first.setdefault(number, token) != token:
            raise SystemExit(f"conversation {number} was answered otherwise before: the tiers changed the text")
        sources = out.cached_by_source or {"computed": 0}
        return seconds, max(sources, key=lambda name: sources[name])

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exc: object) -> None:
        self._llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--folder", default=None, help="where files go; a temporary folder when not given")
    call = parser.parse_args()
    seen: dict[str, list[float]] = {}
    first: dict[int, int] = {}

    def note(answer: tuple[float, str]) -> None:
        seen.setdefault(answer[1], []).append(answer[0])

    with tempfile.TemporaryDirectory() as temporary:
        tiers = ("host?size=4GiB", f"file://{Path(call.folder or temporary).absolute()}")
        with Bench(call, first) as bench:
            bench.ask(99)  # warm
            for number in range(call.rounds):
                note(bench.ask(number))
                note(bench.ask(number))
        with Bench(call, first, kv_tier=tiers) as bench:
            for number in range(call.rounds):
                bench.ask(number)
            for number in range(call.rounds):
                note(bench.ask(number))
        with Bench(call, first, kv_tier=tiers) as bench:
            bench.ask(99)
            for number in range(call.rounds):
                note(bench.ask(number))
    computed = statistics.median(seen["computed"])
    print(f"{call.tokens} tokens, {call.rounds} rounds: time to the first token")
    for name, times in seen.items():
        middle = statistics.median(times)
        print(
            f"{name:10} {middle * 1e3:8.1f} ms  ({min(times) * 1e3:.1f}..{max(times) * 1e3:.1f})  {computed / middle:6.1f}x"
        )


if __name__ == "__main__":
    main()
