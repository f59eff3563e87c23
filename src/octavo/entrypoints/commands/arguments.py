"""The commands and their arguments: light enough that `--help` is instant.

Promises: nothing here imports a command's own module; options come from `config.schema`.
Does not know: what a command does.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from octavo.config.args import ENGINE_SECTIONS, SERVER_SECTIONS, Given, options
from octavo.config.env import Env
from octavo.config.flags import add_options
from octavo.entrypoints.commands import bench_arguments
from octavo.plugins import features


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One invocation: parsed arguments, the options that were given, and the environment."""

    arguments: argparse.Namespace
    given: Given
    env: Env


_SERVE = (
    "host", "port", "served_model_name", "api_key", "max_model_len", "max_num_seqs", "kv_cache_memory", "dtype",
    "quantization", "log_level",
)  # fmt: skip
_TALK = ("max_model_len", "dtype", "quantization", "num_threads")
_SIZE = ("max_model_len", "max_num_seqs", "kv_cache_memory", "kv_cache_dtype", "dtype", "quantization")
_OFFLINE = (*_SIZE, "num_threads")


def _nothing(_: argparse.ArgumentParser) -> None:
    """A command without arguments of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: its help line, where it runs, the option sections it takes, and its own arguments.

    Of the options its help shows those in `common`, and all when all is asked for.
    A command with `parts` is only a name for them: `octavo NAME PART ...` runs one. One `of_feature` is run with the
    options that were given, which are all that a feature knows of.
    """

    help: str
    run: str = ""  # "module:function", imported when needed
    sections: Mapping[str, type] = field(default_factory=dict)
    common: tuple[str, ...] = ()
    extra: Callable[[argparse.ArgumentParser], None] = _nothing
    positional_model: bool = True
    parts: Mapping[str, "Command"] = field(default_factory=dict)
    of_feature: bool = False


def _sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Answer")
    group.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: 512)")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="chance in the choice of words; 0: always the likeliest; what suits the model when not given",
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="choose among the likeliest words that together have this share of the probability (0..1); "
        "what suits the model when not given",
    )
    group.add_argument("--verbose", "-v", action="store_true", help="show what happens while the model is loaded")


def _chat(parser: argparse.ArgumentParser) -> None:
    _sampling(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--message", "-m", metavar="TEXT", help="send one message, print the answer, and leave")


def _complete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads standard input")
    _sampling(parser)


def _pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="owner/name[@revision][:TAG] on the hub, TAG naming one GGUF file (Q4_K_M); the built-in SmolLM2 when not given",
    )


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_positional",
        nargs="?",
        metavar="MODEL",
        help="a folder, a GGUF file, or a name, pulled when it is not here",
    )
    parser.add_argument(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="one message to answer; - reads standard input; none: a conversation",
    )
    _chat(parser)


def _list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="model to remove, whole or half fetched")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory", metavar="SIZE", help="device memory to plan for, such as 16GiB; this machine's when not given"
    )
    parser.add_argument("--lengths", metavar="N,N,...", help="context lengths to show concurrency for")
    parser.add_argument("--json", action="store_true", help="print JSON")


BENCH: dict[str, Command] = {
    "serve": Command(
        help="send requests to a running server, or to one started here, and time the answers",
        run="octavo.entrypoints.commands.bench:run_serve",
        extra=bench_arguments.serve,
        positional_model=False,
    ),
    "latency": Command(
        help="time one batch at a time, offline",
        run="octavo.entrypoints.commands.bench:run_latency",
        sections=ENGINE_SECTIONS,
        common=_OFFLINE,
        extra=bench_arguments.latency,
    ),
    "throughput": Command(
        help="time many requests at once, offline",
        run="octavo.entrypoints.commands.bench:run_throughput",
        sections=ENGINE_SECTIONS,
        common=_OFFLINE,
        extra=bench_arguments.throughput,
    ),
    "startup": Command(
        help="time 'octavo serve' from its command to ready and to the first token",
        run="octavo.entrypoints.commands.bench:run_startup",
        sections=SERVER_SECTIONS,
        common=_SERVE,
        extra=bench_arguments.startup,
    ),
    "compare": Command(
        help="run the same work on every engine that is installed here, and print ratios",
        run="octavo.entrypoints.commands.bench_compare:run",
        extra=bench_arguments.compare,
        positional_model=False,
    ),
}

COMMANDS: dict[str, Command] = {
    "serve": Command(
        help="serve a model over an OpenAI-compatible HTTP API",
        run="octavo.entrypoints.commands.serve:run",
        sections=SERVER_SECTIONS,
        common=_SERVE,
    ),
    "chat": Command(
        help="talk to a model in the terminal",
        run="octavo.entrypoints.commands.chat:run",
        sections=ENGINE_SECTIONS,
        common=_TALK,
        extra=_chat,
    ),
    "complete": Command(
        help="continue a text",
        run="octavo.entrypoints.commands.complete:run",
        sections=ENGINE_SECTIONS,
        common=("model", *_TALK),
        extra=_complete,
        positional_model=False,
    ),
    "pull": Command(
        help="fetch a model into the cache folder",
        run="octavo.entrypoints.commands.pull:run",
        extra=_pull,
        positional_model=False,
    ),
    "run": Command(
        help="fetch a model unless it is here, and talk to it",
        run="octavo.entrypoints.commands.run_model:run",
        sections=ENGINE_SECTIONS,
        common=_TALK,
        extra=_run,
        positional_model=False,
    ),
    "list": Command(
        help="show the models in the cache folder",
        run="octavo.entrypoints.commands.list_models:run",
        extra=_list,
        positional_model=False,
    ),
    "rm": Command(
        help="remove models from the cache folder",
        run="octavo.entrypoints.commands.remove:run",
        extra=_rm,
        positional_model=False,
    ),
    "plan": Command(
        help="show weights, KV cache and concurrency of a model without reading its weights",
        run="octavo.entrypoints.commands.plan:run",
        sections=ENGINE_SECTIONS,
        common=_SIZE,
        extra=_plan,
    ),
    "explain-config": Command(
        help="show every setting with its source and reason",
        run="octavo.entrypoints.commands.explain_config:run",
        sections=SERVER_SECTIONS,
        common=_SERVE,
    ),
    "bench": Command(
        help="measure a server, the engine, or its start",
        parts=BENCH,
    ),
    "plugins": Command(
        help="list every plugin that is installed, with its state and error",
        run="octavo.entrypoints.commands.plugins:run",
        positional_model=False,
    ),
    "collect-env": Command(
        help="print what a bug report needs to know of this machine",
        run="octavo.entrypoints.commands.collect_env:run",
        positional_model=False,
    ),
}


def commands() -> dict[str, Command]:
    """All commands; those that features bring stand behind the first, and have only their help until `completed`."""
    first, *others = COMMANDS
    brought = {
        name: Command(help=text, positional_model=False, of_feature=True)
        for name, (_, text) in features.COMMANDS.items()
    }
    return {first: COMMANDS[first], **brought, **{name: COMMANDS[name] for name in others}}


def completed(name: str, command: Command) -> Command:
    """The command with all that its feature brings. Raises `ConfigError` where that is not here."""
    if not command.of_feature:
        return command
    own = features.command(name)
    return replace(command, run=own.run, sections=own.sections, common=own.common)


def sections_of(command: Command) -> Mapping[str, type]:
    """Option sections of a command; where it starts an engine, those of features too."""
    return {**command.sections, **features.sections()} if "model" in command.sections else command.sections


def add_arguments(parser: argparse.ArgumentParser, command: Command, *, all_in_help: bool = False) -> None:
    """Everything a command takes; help shows what most people need, or all."""
    command.extra(parser)
    if not command.sections:
        return
    common = None if all_in_help else command.common
    sections = sections_of(command)
    add_options(parser, sections, positional_model=command.positional_model, common=common)
    if common is not None:
        hidden = len(options(sections)) - len(common)
        parser.epilog = f"{hidden} more options: '{parser.prog} --help all' and docs/options.md"
