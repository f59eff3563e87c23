"""The `octavo` command: finds the command, reads its options, runs it, and ends in one sentence when it fails.

Promises: help and version are instant and print to standard output alone; wrong usage exits with 2, a failure
with 1, and the last line says what to do.
Does not know: what commands do.
"""

import argparse
import io
import itertools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from octavo import __version__
from octavo.base.errors import ClientError, ConfigError, OctavoError, UsageError
from octavo.config.args import Given, given_from_flags, nearest
from octavo.config.env import Env, read_env
from octavo.config.flags import Parser
from octavo.entrypoints.commands.arguments import Call, Command, add_arguments, commands, completed, sections_of
from octavo.plugins import features
from octavo.plugins.registry import Registry

EXIT_USAGE = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    _print_anything(sys.stdout)
    if args and args[0] in ("-V", "--version", "version"):
        _print(f"octavo {__version__}")
        return 0
    return _choose("", "An engine for LLM inference and serving.", commands(), args)


def _choose(prefix: str, about: str, known: Mapping[str, Command], args: list[str]) -> int:
    """Find the command among these, or among its parts, and run it."""
    if not args or args[0] in ("-h", "--help", "--help-all", "help"):
        _print(_help(prefix, about, known))
        return 0 if args else EXIT_USAGE
    name = args[0]
    if name not in known:
        near = nearest(name, known)
        hint = f"; did you mean '{prefix}{near}'?" if near else f"; commands are {', '.join(known)}."
        return _fail(f"unknown command '{prefix}{name}'{hint}", EXIT_USAGE)
    command = known[name]
    if command.parts:
        return _choose(f"{prefix}{name} ", _sentence(command.help), command.parts, args[1:])
    return _run(f"{prefix}{name}", command, args[1:])


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _run(name: str, command: Command, args: list[str]) -> int:
    env = read_env()
    try:
        command = completed(name, command)
    except ConfigError as error:
        return _fail(f"{error}.", EXIT_FAILED, debug=env.debug)
    parser = Parser(prog=f"octavo {name}", description=_sentence(command.help), missing=features.absent)
    everything = _asks_for_all(args)
    add_arguments(parser, command, all_in_help=everything)
    parser.usage = _usage(parser)
    if everything:
        _print(parser.format_help().rstrip())
        return 0
    namespace = parser.parse_args(args)
    try:
        call = Call(arguments=namespace, given=_given(namespace, command, env), env=env)
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    for notice in call.given.notices:
        sys.stderr.write(f"octavo: warning: {notice}\n")
    try:
        registry: Registry[Callable[[Any], int]] = Registry("command")
        registry.register(name, command.run)
        return registry.load(name)(call.given if command.of_feature else call)
    except UsageError as error:
        return _fail(str(error), EXIT_USAGE, debug=env.debug)
    except (OctavoError, ClientError) as error:
        return _fail(str(error), EXIT_FAILED, debug=env.debug)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILED
    except Exception as error:  # the edge of the program: one sentence, the stack on demand
        text = f"unexpected {type(error).__name__}: {str(error)[:300]}; set OCTAVO_DEBUG=1 to see where."
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # numpy's words, torch's words
            text = "out of memory; lower --max-model-len, --max-num-seqs or --max-num-batched-tokens."
        return _fail(text, EXIT_FAILED, debug=env.debug)


def _given(namespace: argparse.Namespace, command: Command, env: Env) -> Given:
    """The options that were set; a variable of another command's option is no mistake."""
    return given_from_flags(namespace, sections_of(command), env, features.all_sections)


def _asks_for_all(args: Sequence[str]) -> bool:
    """True for --help-all and --help all."""
    asked = ("-h", "--help")
    return "--help-all" in args or any(one in asked and two == "all" for one, two in itertools.pairwise(args))


def _usage(parser: Parser) -> str:
    """The words that stand without a flag, and one word for all that have one."""
    formatter = parser.formatter_class(prog="")
    formatter.add_usage(None, parser.positionals, [], prefix="")
    return f"{parser.prog} {formatter.format_help().strip()} [OPTIONS]".replace("  ", " ")


def _help(prefix: str, about: str, known: Mapping[str, Command]) -> str:
    width = max(map(len, known)) + 2
    what = "COMMAND [OPTIONS]" if prefix else "COMMAND [MODEL] [OPTIONS]"
    lines = [f"usage: octavo {prefix}{what}", "", about, "", "Commands:"]
    lines += [f"  {name:<{width}}{command.help}" for name, command in known.items()]
    lines += ["", f"'octavo {prefix}COMMAND --help' shows a command's options; 'octavo --version' the version."]
    return "\n".join(lines)


def _print_anything(out: TextIO) -> None:
    """A path whose bytes are no text comes out as it came in; what the terminal cannot show is written as its number."""
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="surrogateescape" if out.encoding.lower() == "utf-8" else "backslashreplace")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _fail(sentence: str, code: int, *, debug: bool = False) -> int:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"octavo: {' '.join(sentence.split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
