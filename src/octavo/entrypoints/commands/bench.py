"""`octavo bench`: what a server, the engine or a start of it costs (OPS-8).

Promises: figures go to standard output, what is under way to standard error; every failed request is shown, and a
run whose requests all fail exits with 1; options that do not go together are one sentence and exit code 2.
Does not know: how requests are sent or timed (see `bench`).
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from octavo import __version__
from octavo.base.errors import ConfigError, OctavoError, UsageError
from octavo.bench import offline, workloads
from octavo.bench.connections import HttpAddress
from octavo.bench.load import DEFAULT_TIMEOUT_S, LoadTarget, ceilings, own_ceiling
from octavo.bench.plot import as_svg
from octavo.bench.report import as_json, as_table, parse_goal, summarize
from octavo.bench.serve import first_model, measure, started, wait_started
from octavo.bench.startup import measure_starts, model_files, startup_table
from octavo.bench.workloads import Item, Length, Workload
from octavo.config.args import Given, options
from octavo.config.names import EMBEDDED_NAME
from octavo.config.pull import pull_model
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.console import progress
from octavo.entrypoints.llm import LLM
from octavo.plugins.features import server_sections
from octavo.serving.startup import open_offline

DEFAULT_URL = "http://127.0.0.1:8000"
NUM_REQUESTS, OUTPUT_LEN, PREFIX_LEN = 100, 128, 1024
EXIT_FAILED = 1
Show = Callable[[str], None]


def run_serve(call: Call) -> int:
    """Measure a server, or this client."""
    args = call.arguments
    if args.self_test:
        return _self_test(args.output_json)
    with _usage():
        goal = parse_goal(args.goodput) if args.goodput else None
        work, warmups = served_workload(args)
        if args.start is not None and args.base_url is not None:
            raise ConfigError("--start starts a server of its own; give it or --base-url, not both.")
        if args.start == []:
            raise ConfigError("--start needs the arguments of 'octavo serve', the model at least.")
        if args.base_url is not None:
            HttpAddress(args.base_url)
        _check_writable(args.output_json, args.plot)
    ceiling = own_ceiling() if args.ceiling else None
    show = progress()
    with _server(args, show) as (url, model, ended):
        target = LoadTarget(
            base_url=url, model=model, api=args.api, extra=args.extra_body, api_key=args.api_key,
            timeout_s=args.timeout_s or DEFAULT_TIMEOUT_S,
        )  # fmt: skip
        show(f"{work.name}: {len(work.items)} requests to {url}, model {model}")
        result = measure(target, work, warmups)
        if died := ended():
            show(f"the server ended while it was measured, with {died}")
    summary = summarize(result, goal, ceiling_chunks_s=ceiling)
    about = _about("serve", url=url, model=model, api=args.api, options=_shown(args))
    _write(as_table(summary), args.output_json, as_json(summary, result if args.details else None, **about))
    if args.plot:
        _save(args.plot, as_svg(result))
    return 0 if summary.num_ok else EXIT_FAILED


@contextlib.contextmanager
def _server(args: Any, show: Show) -> Iterator[tuple[str, str, Callable[[], str | None]]]:
    """Where to send requests, the model's name there, and what tells whether a server started here has ended."""
    if args.start is None:
        url = args.base_url or DEFAULT_URL
        wait_started(url, show)
        yield url, args.model or first_model(url, args.api_key), lambda: None
        return
    show(f"starting octavo serve {' '.join(args.start)}")
    with started(args.start) as server:
        show(f"ready after {server.ready_s:.2f} s")
        yield server.url, args.model or server.model, server.ended


def _self_test(output_json: str | None) -> int:
    alone, together = ceilings()
    text = (
        f"client ceiling: {alone:,.0f} streamed events per second on one core, each read alone; "
        f"{together:,.0f} when many come together"
    )
    figures = {"ceiling_chunks_s": alone, "ceiling_together_chunks_s": together}
    _write(text, output_json, _about("client ceiling") | figures)
    return 0


def served_workload(args: Any) -> tuple[Workload, tuple[Item, ...]]:
    """The workload that the options describe, and items of the same kind to warm up with."""
    text = args.text or args.api == "chat"
    items, warmups = _items(args, text=text)
    conversations = any(item.conversation is not None for item in items)
    real_history = conversations and isinstance(items[0].prompt, str)
    items = _arrivals(args, items)
    work = Workload(
        name=args.dataset, items=items, concurrency=_concurrency(args, len(items)), stream=not args.no_stream,
        ignore_eos=not args.no_ignore_eos, temperature=args.temperature, real_history=real_history,
    )  # fmt: skip
    if args.api == "chat" and not isinstance(items[0].prompt, str):
        raise ConfigError("the chat API takes no token ids; this file has some, so use --api completions.")
    return work, warmups


def _concurrency(args: Any, num_items: int) -> int | None:
    """All at once is a closed loop as wide as the workload: nothing is due later."""
    if args.concurrency is None and args.rate is None:
        return num_items
    found: int | None = args.concurrency
    return found


def _arrivals(args: Any, items: tuple[Item, ...]) -> tuple[Item, ...]:
    if args.rate is None:
        if args.ramp_to is not None:
            raise ConfigError("--ramp-to needs --rate, the rate it starts from.")
        if args.arrivals != "poisson":
            raise ConfigError(f"--arrivals {args.arrivals} needs --rate.")
        return items
    if args.ramp_to is not None:
        if args.arrivals != "poisson":
            raise ConfigError("--ramp-to goes with Poisson arrivals only.")
        return workloads.ramp(items, args.rate, args.ramp_to, args.data_seed)
    if args.arrivals == "burst":
        return workloads.burst(items, args.rate, args.burst_size, args.data_seed)
    if args.arrivals == "even":
        return workloads.evenly(items, args.rate)
    return workloads.poisson(items, args.rate, args.data_seed)


def _items(args: Any, *, text: bool) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """The data set, and some more of it for the warm-up."""
    if (args.dataset == "file") != (args.file is not None):
        raise ConfigError("--dataset file and --file FILE go together.")
    if args.dataset == "file":
        items = workloads.from_jsonl(
            args.file, num=args.num_requests, output_len=args.output_len, turns=getattr(args, "all_turns", False)
        )
        # A file has no prompts to spare: its warm-up is random, and its prompts stay new to the server.
        warm = workloads.random_prompts(
            max(args.num_warmups, 1), input_len=32, output_len=16, seed=args.data_seed, ids=args.token_ids,
            text=isinstance(items[0].prompt, str),
        )  # fmt: skip
        return items, warm[: args.num_warmups]
    num = args.num_requests or NUM_REQUESTS
    spread = args.length_spread
    common: dict[str, Any] = {
        "input_len": _length(args.input_len, spread),
        "output_len": _length(args.output_len or OUTPUT_LEN, spread),
        "seed": args.data_seed,
        "ids": args.token_ids,
        "text": text,
    }
    total = num + args.num_warmups
    if args.dataset == "multi-turn":
        every = workloads.multi_turn(total, turns=args.turns, prefix_len=args.prefix_len or 0, **common)
        split = num * args.turns
        return every[:split], every[split :: args.turns]
    if args.dataset == "shared-prefix":
        prefix_len = args.prefix_len or PREFIX_LEN
        every = workloads.shared_prefix(num, prefix_len=prefix_len, num_prefixes=args.num_prefixes, **common)
        # The warm-up must not bring the prefix into the cache.
        common["seed"] += 1
        return every, workloads.random_prompts(max(args.num_warmups, 1), **common)[: args.num_warmups]
    every = workloads.random_prompts(total, **common)
    return every[:num], every[num:]


def _length(mean: int, spread: float) -> Length:
    """Exactly `mean`, or evenly spread around it."""
    return mean if not spread else (max(round(mean * (1 - spread)), 1), round(mean * (1 + spread)))


def run_latency(call: Call) -> int:
    """Measure one batch at a time."""
    args = call.arguments
    with _usage():
        _check_writable(args.output_json)
    work = offline.Batches(
        input_len=args.input_len,
        output_len=args.output_len,
        batch_size=args.batch_size,
        iterations=args.iterations,
        warmups=args.num_warmups,
        ids=args.token_ids,
        seed=args.data_seed,
    )
    with _llm(call) as llm:
        found = offline.latency(llm, work)
    about = _about("latency", options=_shown(args), engine=dict(call.given.values))
    _write(offline.latency_table(found), args.output_json, about | {"latency": msgspec.to_builtins(found)})
    return 0


def _llm(call: Call) -> LLM:
    """An engine with the call's options, which hold already what environment and file say."""
    env = dataclasses.replace(call.env, options={}, config_file=None)
    return LLM(opener=partial(open_offline, env=env), **call.given.values)


def run_throughput(call: Call) -> int:
    """Measure many requests at once."""
    args = call.arguments
    with _usage():
        items, warmups = _items(args, text=False)
        _check_writable(args.output_json)
    with _llm(call) as llm:
        if warmups:
            offline.throughput(llm, warmups)
        found = offline.throughput(llm, items, ignore_eos=not args.no_ignore_eos)
    about = _about("throughput", options=_shown(args), engine=dict(call.given.values))
    _write(offline.throughput_table(found), args.output_json, about | {"throughput": msgspec.to_builtins(found)})
    return 0 if found.num_ok else EXIT_FAILED


def run_startup(call: Call) -> int:
    """Measure starts of `octavo serve` with the same options."""
    args = call.arguments
    show = progress()
    with _usage():
        _check_writable(args.output_json)
    path = pull_model(call.given.values.get("model") or EMBEDDED_NAME, call.env, show)
    prompt = workloads.random_prompts(
        1, input_len=args.input_len, output_len=1, seed=args.data_seed, ids=args.token_ids
    )
    arguments = serve_arguments(call.given, args.config)
    show(f"octavo serve {' '.join(arguments)}")
    drop = model_files(path) if args.cold else []
    found = measure_starts(arguments, runs=args.runs, drop=drop, prompt=prompt[0])
    about = _about("startup", options=_shown(args), serve=list(arguments))
    _write(startup_table(found), args.output_json, about | {"startup": msgspec.to_builtins(found)})
    return 0


def serve_arguments(given: Given, config: str | None) -> list[str]:
    """The command line that gives `octavo serve` what was given here; the environment is passed on as it is."""
    known = options(server_sections())
    found = [] if config is None else ["--config", config]
    for name, value in given.values.items():
        flag = known[name].flag
        if given.sources[name] != "flag":
            continue
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag[2:]}")
        else:
            for each in value if isinstance(value, tuple) else (value,):
                found.append(f"{flag}={each}")
    return found


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """What is wrong here is wrong with the options."""
    try:
        yield
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _check_writable(*paths: str | None) -> None:
    """Said before the run, not after it."""
    for path in paths:
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: its folder does not exist.")


def _about(what: str, **more: Any) -> dict[str, Any]:
    return {
        "bench": what,
        "octavo": __version__,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **more,
    }


def _shown(args: Any) -> dict[str, Any]:
    """The options of the run, without the key."""
    hidden = ("api_key", "output_json", "plot", "model_positional", "config")
    return {k: v for k, v in vars(args).items() if k not in hidden and not k.startswith("opt_") and v is not None}


def _write(table: str, output_json: str | None, value: dict[str, Any]) -> None:
    """The table, unless JSON takes its place on standard output."""
    if output_json != "-":
        print(table)
    if output_json is not None:
        _save(output_json, json.dumps(value, indent=1) + "\n")


def _save(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OctavoError(f"{path} cannot be written: {error.strerror}.") from None
