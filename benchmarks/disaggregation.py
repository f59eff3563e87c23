"""What it costs to get a prompt from another engine instead of computing it.

    python benchmarks/disaggregation.py MODEL [--tokens 4000] [--rounds 5] [--transports tcp,nixl,file,by-layer] [--dtype bfloat16]

Starts a producer and a consumer for each transport, both on this machine. Time to the first token of a prompt of
`--tokens` tokens at the consumer, medians over rounds: computed there, and fetched from the producer that has it. The
first token is compared each time. `with the prompt` counts from the request to the producer, so it contains computing
the prompt there, once. `by-layer` is `file` with --kv-by-layer. Both engines share this machine's processors, but only one works at a time.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import httpx2


def conversation(number: int, tokens: int) -> list[int]:
    return [(number * 7919 + i * 31) % 40_000 + 500 for i in range(tokens)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(call: argparse.Namespace, *options: str) -> Iterator[str]:
    """An engine; its URL."""
    blocks = str(call.tokens // 64 + 8)
    command = [
        sys.executable, "-P", "-m", "octavo.entrypoints.cli", "serve", call.model, "--port", "0", "--dtype", call.dtype,
        "--num-kv-blocks", blocks, "--block-size", "64", "--max-model-len", str(call.tokens + 64), *options,
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    lines = []
    for line in process.stderr or ():
        lines.append(line)
        if found := re.search(r"ready at (http://\S+)/v1", line):
            break
    else:
        raise SystemExit("".join(lines))
    threading.Thread(target=lambda: list(process.stderr or ()), daemon=True).start()
    try:
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def first_token(url: str, prompt: list[int], **more: object) -> tuple[float, dict[str, object]]:
    """Seconds to an answer of one token."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    began = time.perf_counter()
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=600)
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    return seconds, answer.json()


def measure(call: argparse.Namespace, transport: str) -> dict[str, list[float]]:
    seen: dict[str, list[float]] = {"computed": [], transport: [], "with the prompt": []}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        in_folder = transport in ("file", "by-layer")
        way = ("--kv-transport", f"file://{folder}" if in_folder else transport)
        way += ("--kv-by-layer",) if transport == "by-layer" else ()
        listen = ("--kv-listen", f"127.0.0.1:{free_port()}")
        producer = stack.enter_context(serve(call, "--kv-role", "producer", *listen, *way))
        consumer = stack.enter_context(serve(call, "--kv-role", "consumer", *way))
        for number in range(-1, call.rounds):
            prompt = conversation(number, call.tokens)
            began = time.perf_counter()
            _, kept = first_token(producer, prompt, kv_transfer_params={"do_remote_decode": True})
            fetched, one = first_token(consumer, prompt, kv_transfer_params=kept["kv_transfer_params"])
            whole = time.perf_counter() - began
            for engine in (producer, consumer):
                httpx2.post(f"{engine}/reset_prefix_cache").raise_for_status()
            computed, two = first_token(consumer, prompt)
            httpx2.post(f"{consumer}/reset_prefix_cache").raise_for_status()
            if one["choices"][0]["token_ids"] != two["choices"][0]["token_ids"]:  # type: ignore[index]
                raise SystemExit("the first token is another one: the hand-over changed the text")
            details = one["usage"]["prompt_tokens_details"]  # type: ignore[index]
            if details["cached_tokens"] < call.tokens - 1:
                raise SystemExit(f"not everything was fetched: {details}")
            if number >= 0:
                seen["computed"].append(computed)
                seen[transport].append(fetched)
                seen["with the prompt"].append(whole)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--transports", default="tcp,nixl,file,by-layer")
    call = parser.parse_args()
    print(f"{call.tokens} tokens, {call.rounds} rounds: time to the first token at the consumer")
    for transport in call.transports.split(","):
        try:
            seen = measure(call, transport)
        except SystemExit as error:  # a transport whose package is not installed
            print(f"{transport:16} not measured: {str(error).strip().splitlines()[-1]}", flush=True)
            continue
        computed = statistics.median(seen["computed"])
        for name, times in seen.items():
            middle = statistics.median(times)
            spread = f"({min(times) * 1e3:.0f}..{max(times) * 1e3:.0f})"
            print(f"{name:16} {middle * 1e3:8.1f} ms  {spread:14} {computed / middle:6.1f}x", flush=True)


if __name__ == "__main__":
    main()
