"""What tiers cost those that do not need them: time between tokens under a mixed load, with tiers and without.

    python benchmarks/kv_tier_cost.py MODEL [--rounds 6] [--streams 4] [--tokens 128] [--prompt 512] [--every 8]
        [--tier ADDRESS ...]

`--streams` requests decode `--tokens` tokens each, while a new prompt of `--prompt` tokens that nobody has seen arrives
whenever the streams have made `--every` tokens; each is computed, and with tiers stored. Two engines of the same model
are up at the same time, one with tiers and one without; rounds go to them in turn, so that whatever else the machine
does hits both. Shown: median, 99th percentile and mean of the time between two tokens of a stream over all rounds, and
the ratio of the two engines, also as the median over rounds.
"""

import argparse
import itertools
import queue
import statistics
import tempfile
import time
from dataclasses import dataclass, field

from octavo import SamplingParams
from octavo.base.outputs import EngineOutputs
from octavo.base.requests import EngineRequest
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.client import InprocClient
from octavo.engine.startup import build_core
from octavo.features.transfer.options import TransferOptions

PATIENCE_S = 300.0


@dataclass
class Round:
    """Seconds between tokens of the streams, and of the whole round."""

    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.gaps)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Engine:
    """One engine.

    Owns: the client, what it said, and its rounds.
    """

    def __init__(self, call: argparse.Namespace, tiers: tuple[str, ...]) -> None:
        config = EngineConfig(
            model=ModelConfig(model=call.model, dtype=call.dtype, max_model_len=2048, weight_cache="off"),
            cache=CacheConfig(num_kv_blocks=call.num_kv_blocks),
            features={"transfer": TransferOptions(kv_tier=tiers)} if tiers else {},
            scheduler=SchedulerConfig(max_num_seqs=call.streams + 8, max_num_batched_tokens=call.batched),
            device=DeviceConfig(num_threads=call.num_threads),
        )
        self._client = InprocClient(build_core(config, [].append).core)
        self._inbox: queue.SimpleQueue[EngineOutputs | Exception] = queue.SimpleQueue()
        self._client.start(self._inbox.put, self._inbox.put)
        self._numbers = itertools.count()
        self.rounds: list[Round] = []

    def _request(self, kind: str, length: int, tokens: int) -> EngineRequest:
        number = next(self._numbers)
        prompt = tuple((number * 7919 + i * 31) % 40_000 + 500 for i in range(length))
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return EngineRequest(
            request_id=f"{kind}{number}", prompt_token_ids=prompt, sampling=sampling, arrival_s=time.monotonic()
        )

    def run(self, call: argparse.Namespace) -> None:
        streams = [self._request("stream", 64, call.tokens) for _ in range(call.streams)]
        last: dict[str, float] = {}
        alive = {request.request_id for request in streams}
        arrived = made = 0
        waiting: set[str] = set()
        done = Round()
        self._client.submit(tuple(streams))
        began = time.perf_counter()
        while alive or waiting:
            outputs = self._inbox.get(timeout=PATIENCE_S)
            now = time.perf_counter()
            if not isinstance(outputs, EngineOutputs):
                raise outputs
            for delta in outputs.deltas:
                if delta.request_id in alive and delta.new_token_ids:
                    if delta.request_id in last:
                        done.gaps.append(now - last[delta.request_id])
                    last[delta.request_id] = now
                    made += len(delta.new_token_ids)
                if delta.finish is not None:
                    alive.discard(delta.request_id)
                    waiting.discard(delta.request_id)
            while alive and made // call.every > arrived:
                arrived += 1
                newcomer = self._request("new", call.prompt, 1)
                waiting.add(newcomer.request_id)
                self._client.submit((newcomer,))
        done.seconds = time.perf_counter() - began
        self.rounds.append(done)

    def figures(self) -> dict[str, float]:
        figures = self._client.call("stats").parts.get("transfer", {})
        return {name: value for name, value in figures.items() if value}

    def close(self) -> None:
        self._client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="that each stream makes")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each newcomer")
    parser.add_argument("--every", type=int, default=64, help="tokens of streams between two newcomers")
    parser.add_argument("--batched", type=int, default=256, help="most tokens in a step")
    parser.add_argument("--num-kv-blocks", type=int, default=128)
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tier", action="append", default=None, help="in place of host memory and files")
    call = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiers = tuple(call.tier or ("host?size=2GiB", f"file://{folder}?size=4GiB"))
        engines = {"without tiers": Engine(call, ()), "with tiers": Engine(call, tiers)}
        try:
            for engine in engines.values():
                engine.run(call)
                engine.rounds.clear()  # the first is warm-up
            for number in range(call.rounds):
                for engine in list(engines.values())[:: -1 if number % 2 else 1]:
                    engine.run(call)
            show(engines, tiers)
        finally:
            for engine in engines.values():
                engine.close()


def show(engines: dict[str, Engine], tiers: tuple[str, ...]) -> None:
    print(f"time between tokens in ms; tiers: {', '.join(tiers)}")
    print(f"{'':16} {'p50':>9} {'p99':>9} {'mean':>9} {'round':>9}")
    figures: dict[str, tuple[float, float, float, float]] = {}
    for name, engine in engines.items():
        every = Round([gap for each in engine.rounds for gap in each.gaps])
        figures[name] = (
            every.percentile(0.5),
            every.percentile(0.99),
            statistics.fmean(every.gaps),
            statistics.median(each.seconds for each in engine.rounds),
        )
        p50, p99, mean, whole = figures[name]
        print(f"{name:16} {p50 * 1e3:9.2f} {p99 * 1e3:9.2f} {mean * 1e3:9.2f} {whole:8.2f}s  n={len(every.gaps)}")
    ratios = [theirs / ours for ours, theirs in zip(*figures.values(), strict=True)]
    print(f"{'ratio':16} " + " ".join(f"{ratio:9.3f}" for ratio in ratios))
    off, on = (engine.rounds for engine in engines.values())
    for share in (0.5, 0.99):
        by_round = [b.percentile(share) / a.percentile(share) for a, b in zip(off, on, strict=True)]
        print(f"ratio of p{share * 100:.0f}, median over rounds: {statistics.median(by_round):.3f} "
              f"({min(by_round):.3f}..{max(by_round):.3f})")  # fmt: skip
    print("tiers:", ", ".join(f"{name} {value:g}" for name, value in sorted(engines["with tiers"].figures().items())))


if __name__ == "__main__":
    main()
