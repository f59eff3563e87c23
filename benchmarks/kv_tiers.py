"""What a returning conversation costs: its prefix computed again, or loaded from where it went.

    python benchmarks/kv_tiers.py MODEL [--tokens 4000] [--rounds 5] [--folder DIR] [--only computed,host,...]
        [--s3 ADDRESS]

Time to the first token of a prompt of `--tokens` tokens, medians over rounds: computed; found in the cache of the
device; from host memory after its blocks were evicted; and, each after the engine was started anew, from files, from a
Redis or Valkey server (started here when one is installed), from the host memory of another engine, and from an S3
bucket (`--s3`; without it, from moto's server where that is installed: it is written in Python and slow, so the figure
says that it works and no more). The text is compared each time. Evicting is what prompts of other conversations do
meanwhile; the cache holds little more than one.
"""

import argparse
import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo import LLM, SamplingParams

FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
WARM = 99  # a conversation that is not measured
START_S = 120.0
BUCKET = "octavo-bench"


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

    def settle(self) -> None:
        """Wait until the tiers have what is on its way to them."""
        end = time.monotonic() + START_S
        while any(v for k, v in self._llm.stats().parts["transfer"].items() if "_jobs{" in k and "overdue" not in k):
            if time.monotonic() > end:
                raise SystemExit(f"a tier is still busy after {START_S:g} s")
            time.sleep(0.05)

    def notes(self) -> tuple[str, ...]:
        frontend = self._llm._frontend
        return () if frontend is None else tuple(note for note in frontend.report.notes if note.startswith("KV tiers"))

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exc: object) -> None:
        self._llm.close()


# ---- where KV goes ------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{process.args} did not begin to listen")


@contextmanager
def server(*command: str, port: int) -> Iterator[None]:
    """A program that listens, ended afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def redis_tier() -> Iterator[str | None]:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None or importlib.util.find_spec("redis") is None:
        print("redis      left out: no redis-server or valkey-server, or the package redis is not installed")
        yield None
        return
    port = free_port()
    options = ("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no")
    with server(binary, *options, port=port):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def s3_tier(address: str | None) -> Iterator[str | None]:
    if address is not None or importlib.util.find_spec("boto3") is None or importlib.util.find_spec("moto") is None:
        if address is None:
            print(
                "s3         left out: give --s3 s3://bucket/prefix?endpoint=URL, or install boto3, moto[s3], flask and flask-cors"
            )
        yield address
        return
    import boto3  # noqa: PLC0415 - an extra

    os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
    port = free_port()
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with server(sys.executable, "-c", code, port=port):
        url = f"http://127.0.0.1:{port}"
        boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}?endpoint={url}"


@contextmanager
def peer_tier(call: argparse.Namespace) -> Iterator[str]:
    """Another engine that has had all conversations."""
    port = free_port()
    command = [sys.executable, __file__, call.model, "--tokens", str(call.tokens), "--rounds", str(call.rounds),
               "--dtype", call.dtype, "--block-size", str(call.block_size), "--be-peer", str(port)]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise SystemExit("the other engine did not start")
        yield f"peer://127.0.0.1:{port}"
    finally:
        process.communicate("")


def be_peer(call: argparse.Namespace) -> None:
    with Bench(call, {}, kv_tier=("host?size=4GiB",), kv_listen=f"127.0.0.1:{call.be_peer}") as bench:
        for number in (*range(call.rounds), WARM):
            bench.ask(number)
        bench.settle()
        print("ready", flush=True)
        sys.stdin.read()


# ---- measurements -------------------------------------------------------------------------------


class Table:
    """Owns: what was measured, by where the prefix came from."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}
        self.first: dict[int, int] = {}

    def note(self, answer: tuple[float, str]) -> None:
        self.seen.setdefault(answer[1], []).append(answer[0])

    def show(self) -> None:
        computed = statistics.median(self.seen["computed"])
        for name, times in self.seen.items():
            middle, least, most = statistics.median(times) * 1e3, min(times) * 1e3, max(times) * 1e3
            print(
                f"{name:10} {middle:8.1f} ms  ({least:.1f}..{most:.1f})  {computed / middle * 1e3:6.1f}x  n={len(times)}"
            )


def on_the_device(call: argparse.Namespace, table: Table) -> None:
    with Bench(call, table.first) as bench:
        bench.ask(WARM)
        for number in range(call.rounds):
            table.note(bench.ask(number))
            table.note(bench.ask(number))


def from_the_host(call: argparse.Namespace, table: Table) -> None:
    with Bench(call, table.first, kv_tier=("host?size=4GiB",)) as bench:
        print(*bench.notes(), sep="\n")
        for number in (*range(call.rounds), WARM):  # the last one takes the blocks of the first
            bench.ask(number)
        for number in range(call.rounds):
            table.note(bench.ask(number))


def from_a_tier(call: argparse.Namespace, table: Table, address: str, *, fill: bool = True) -> None:
    """Left there by one engine, found by the next."""
    tiers = ("host?size=4GiB", address)
    if fill:
        with Bench(call, table.first, kv_tier=tiers) as bench:
            for number in range(call.rounds):
                bench.ask(number)
                bench.settle()
    with Bench(call, table.first, kv_tier=tiers) as bench:
        bench.ask(WARM)
        for number in range(call.rounds):
            table.note(bench.ask(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--folder", default=None, help="where files go; a temporary folder when not given")
    parser.add_argument("--only", default="host,file,redis,peer,s3", help="which tiers, apart by commas")
    parser.add_argument("--s3", default=None, help="the address of a bucket that may be written to")
    parser.add_argument("--be-peer", type=int, default=None, help=argparse.SUPPRESS)
    call = parser.parse_args()
    if call.be_peer is not None:
        be_peer(call)
        return
    table, only = Table(), set(call.only.split(","))
    print(f"{call.tokens} tokens, {call.rounds} rounds: time to the first token")
    on_the_device(call, table)
    if "host" in only:
        from_the_host(call, table)
    if "file" in only:
        with tempfile.TemporaryDirectory() as temporary:
            from_a_tier(call, table, f"file://{Path(call.folder or temporary).absolute()}")
    if "redis" in only:
        with redis_tier() as address:
            if address is not None:
                from_a_tier(call, table, address)
    if "peer" in only:
        with peer_tier(call) as address:
            from_a_tier(call, table, address, fill=False)
    if "s3" in only:
        with s3_tier(call.s3) as address:
            if address is not None:
                from_a_tier(call, table, address)
    table.show()


if __name__ == "__main__":
    main()
