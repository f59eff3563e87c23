"""The options of `octavo bench` that are not options of the engine.

Promises: light enough that help is instant; each option says its unit; a bad value is one sentence and exit code 2.
Does not know: what is measured.
"""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from octavo.plugins.registry import load_target

DATASETS = ("random", "shared-prefix", "multi-turn", "file")
OFFLINE_DATASETS = ("random", "shared-prefix", "file")
ARRIVALS = ("poisson", "burst", "even")


def serve(parser: argparse.ArgumentParser) -> None:
    """Options of `bench serve`."""
    group = parser.add_argument_group("Server")
    group.add_argument(
        "--base-url", metavar="URL", help="an OpenAI-compatible server that runs (default: http://127.0.0.1:8000)"
    )
    group.add_argument("--model", metavar="NAME", help="model to ask for; the first that the server lists if not given")
    group.add_argument("--api", choices=("completions", "chat"), default="completions", help="(default: completions)")
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    group.add_argument(
        "--start",
        nargs=argparse.REMAINDER,
        metavar="ARG",
        help="start 'octavo serve ARG...' for the run and stop it after; takes all that follows, so it comes last",
    )
    data_set(parser, DATASETS, 100)
    _sending(parser)
    group = parser.add_argument_group("Results")
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        default=(),
        help="targets a request must meet to count as good, in milliseconds: ttft:500 tpot:50 itl:200 e2e:5000",
    )
    group.add_argument("--output-json", metavar="FILE", help="write the figures; - writes to standard output")
    group.add_argument("--details", action="store_true", help="in the JSON, also every request with its token times")
    group.add_argument("--plot", metavar="FILE", help="draw the run as an SVG")
    group.add_argument("--ceiling", action="store_true", help="also measure what this client could take (a second)")
    group.add_argument(
        "--self-test",
        action="store_true",
        help="only measure the client: its ceiling in streamed events per second on one core",
    )


def _sending(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Sending (all at once when neither --concurrency nor --rate is given)")
    group.add_argument(
        "--concurrency", type=whole(1), metavar="N", help="closed loop: at most so many requests at once"
    )
    group.add_argument("--rate", type=number(0), metavar="PER_S", help="open loop: requests per second on average")
    group.add_argument("--arrivals", choices=ARRIVALS, default="poisson", help="of an open loop (default: poisson)")
    group.add_argument("--burst-size", type=whole(1), default=8, metavar="N", help="requests in a burst (default: 8)")
    group.add_argument("--ramp-to", type=number(0), metavar="PER_S", help="the rate goes from --rate to this one")
    group.add_argument("--num-warmups", type=whole(0), default=1, metavar="N", help="uncounted requests before the run (default: 1)")  # fmt: skip
    group.add_argument("--no-stream", action="store_true", help="ask for whole answers; then only E2E is known")
    group.add_argument("--no-ignore-eos", action="store_true", help="let the model end its answers")
    group.add_argument("--temperature", type=number(0, low_too=True), default=0.0, metavar="T", help="(default: 0)")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="fields for every request")
    group.add_argument("--timeout-s", type=number(0), default=3600.0, metavar="SECONDS", help="for one answer (default: 3600)")  # fmt: skip


def data_set(parser: argparse.ArgumentParser, names: tuple[str, ...], num_requests: int) -> None:
    """Which prompts, and how long."""
    group = parser.add_argument_group("Data set")
    group.add_argument("--dataset", choices=names, default="random", help="(default: random)")
    group.add_argument(
        "--num-requests", type=whole(1), metavar="N",
        help=f"requests, or conversations; {num_requests}, or the whole file, when not given",
    )  # fmt: skip
    group.add_argument("--input-len", type=whole(1), default=256, metavar="TOKENS", help="of a prompt or turn, without a shared prefix (default: 256)")  # fmt: skip
    group.add_argument("--output-len", type=whole(1), metavar="TOKENS", help="of an answer; 128, or as the file says, when not given")  # fmt: skip
    group.add_argument("--length-spread", type=share, default=0.0, metavar="0..1", help="lengths vary evenly by this share both ways (default: 0)")  # fmt: skip
    group.add_argument("--prefix-len", type=whole(1), metavar="TOKENS", help="of the shared prefix; 1024 for shared-prefix, none for multi-turn, when not given")  # fmt: skip
    group.add_argument("--num-prefixes", type=whole(1), default=1, metavar="N", help="distinct shared prefixes (default: 1)")  # fmt: skip
    group.add_argument("--file", metavar="FILE", help="JSON lines or a JSON list of prompts, ShareGPT conversations or messages")  # fmt: skip
    if "multi-turn" in names:
        group.add_argument("--turns", type=whole(1), default=4, metavar="N", help="of a conversation (default: 4)")
        group.add_argument("--all-turns", action="store_true", help="of each conversation in --file send every turn, with the server's answers")  # fmt: skip
        group.add_argument("--text", action="store_true", help="random words, about a token each, not token ids; the chat API needs it")  # fmt: skip
    ids_and_seed(group)


def ids_and_seed(group: Any) -> None:
    """How random prompts are drawn."""
    group.add_argument("--token-ids", type=id_range, default=(1000, 10_000), metavar="LOW:HIGH", help="range of random token ids, HIGH left out (default: 1000:10000)")  # fmt: skip
    group.add_argument("--data-seed", type=whole(0), default=0, metavar="N", help="of random prompts and arrivals (default: 0)")  # fmt: skip


def latency(parser: argparse.ArgumentParser) -> None:
    """Options of `bench latency`."""
    group = parser.add_argument_group("Work")
    group.add_argument("--input-len", type=whole(1), default=128, metavar="TOKENS", help="of a prompt (default: 128)")
    group.add_argument("--output-len", type=whole(1), default=128, metavar="TOKENS", help="of an answer (default: 128)")
    group.add_argument("--batch-size", type=whole(1), default=1, metavar="N", help="requests at once (default: 1)")
    group.add_argument("--iterations", type=whole(1), default=10, metavar="N", help="batches that count (default: 10)")
    group.add_argument("--num-warmups", type=whole(0), default=2, metavar="N", help="batches before that (default: 2)")
    ids_and_seed(group)
    _json(group)


def throughput(parser: argparse.ArgumentParser) -> None:
    """Options of `bench throughput`."""
    data_set(parser, OFFLINE_DATASETS, 100)
    group = parser.add_argument_group("Work")
    group.add_argument("--num-warmups", type=whole(0), default=1, metavar="N", help="uncounted requests before the run (default: 1)")  # fmt: skip
    group.add_argument("--no-ignore-eos", action="store_true", help="let the model end its answers")
    _json(group)


def startup(parser: argparse.ArgumentParser) -> None:
    """Options of `bench startup`."""
    group = parser.add_argument_group("Work")
    group.add_argument("--runs", type=whole(1), default=3, metavar="N", help="starts, one after the other (default: 3)")
    group.add_argument("--cold", action="store_true", help="put the model's files out of the file cache before each")
    group.add_argument("--input-len", type=whole(1), default=16, metavar="TOKENS", help="of the first prompt (default: 16)")  # fmt: skip
    ids_and_seed(group)
    _json(group)


def compare(parser: argparse.ArgumentParser) -> None:
    """Options of `bench compare`, which its own module knows; it is loaded when they are asked for."""
    load_target("octavo.bench.compare:add_compare_arguments")(parser)


def _json(group: Any) -> None:
    group.add_argument("--output-json", metavar="FILE", help="write the figures; - writes to standard output")


# ---- values ---------------------------------------------------------------------------------


def whole(low: int) -> Callable[[str], int]:
    """Whole numbers from `low`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}, got {text!r:.60}")
        return value

    return convert


def number(low: float, *, low_too: bool = False) -> Callable[[str], float]:
    """Finite numbers above `low`, or from it."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value if low_too else low < value) or math.isinf(value):
            raise argparse.ArgumentTypeError(
                f"must be a number {'from' if low_too else 'above'} {low:g}, got {text!r:.60}"
            )
        return value

    return convert


def share(text: str) -> float:
    """A number in [0, 1)."""
    value = number(0, low_too=True)(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text!r:.60}")
    return value


def id_range(text: str) -> tuple[int, int]:
    """LOW:HIGH."""
    low, _, high = text.partition(":")
    try:
        found = (int(low), int(high))
    except ValueError:
        found = (1, 0)
    if not 0 <= found[0] < found[1]:
        raise argparse.ArgumentTypeError(f"must be LOW:HIGH with 0 <= LOW < HIGH, such as 1000:10000, got {text!r:.60}")
    return found


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r:.60}")
    return value
