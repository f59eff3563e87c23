"""Options as command-line flags, and the help that shows them.

Promises: an error is one sentence with the nearest name; help fits a terminal of 80 columns, names each value, and
shows what most people need unless all is asked for.
Does not know: commands, or what options do.
"""

import argparse
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from octavo.config.args import Option, hint, options

WIDTH: Final = 80
_INDENT: Final = 28  # of what an option does; a longer flag has a line of its own


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, with the nearest name; exit code 2.

    Owns: what argparse owns, and which features are missing.
    """

    def __init__(self, *, missing: Callable[[], Sequence[str]] = tuple, **settings: Any) -> None:
        """`missing` gives features that are not installed, whose options cannot be known."""
        super().__init__(formatter_class=_Help, **settings)
        self._missing = missing

    @property
    def positionals(self) -> list[argparse.Action]:
        """Arguments without a flag, in their order."""
        return [action for action in self._actions if not action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Print one line and leave."""
        match = re.search(r"unrecognized arguments: (\S+)", message)
        if match:
            bad = match[1].split("=")[0]
            known = [s for a in self._actions for s in a.option_strings]
            message = f"unknown option {bad}{hint(bad, known, self._missing()).removesuffix('.')}"
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message}{end} See '{self.prog} --help'.\n")


class _Help(argparse.HelpFormatter):
    """Help whose words are whole: a flag that is broken at a hyphen cannot be copied.

    Owns: what argparse owns, and which features are missing.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_INDENT, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return "--[no-]" + action.option_strings[0].removeprefix("--")
        return super()._format_action_invocation(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def add_options(
    parser: argparse.ArgumentParser,
    sections: Mapping[str, type],
    *,
    positional_model: bool,
    common: Sequence[str] | None = None,
) -> None:
    """Add one flag for each option of these sections, and --config.

    Help shows those named in `common`, in that order; None: all, grouped by section.
    """
    known = options(sections)
    if common is None:
        for section, kind in sections.items():
            title = (kind.__doc__ or section).splitlines()[0].rstrip(".")
            group = parser.add_argument_group(re.split("[:;] ", title)[0])
            for opt in known.values():
                if opt.section == section:
                    _add_flag(group, opt)
    else:
        group = parser.add_argument_group("Common options")
        for name in common:
            _add_flag(group, known[name])
        for name, opt in known.items():
            if name not in common:
                _add_flag(parser, opt, hidden=True)
    if positional_model:
        text = "a folder, a GGUF file, or a name to pull; the built-in SmolLM2 when not given"
        parser.add_argument("model_positional", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("--config", metavar="FILE", help="YAML file with options by name")


def value_name(opt: Option) -> str:
    """What help calls an option's value."""
    if opt.choices:
        return "{" + ",".join(opt.choices) + "}"
    if opt.value:
        return opt.value
    if opt.kind == "size":
        return "SIZE"
    return {"seconds": "SECONDS", "0..1": "SHARE"}.get(opt.unit) or ("N" if opt.plain_type is int else "X")


def _add_flag(group: Any, opt: Option, *, hidden: bool = False) -> None:
    default = f" (default: {opt.shown_default})" if opt.shown_default else ""
    text = argparse.SUPPRESS if hidden else (opt.help.rstrip(".") + default).replace("%", "%%")
    common: dict[str, Any] = {"dest": f"opt_{opt.name}", "default": argparse.SUPPRESS, "help": text}
    if opt.plain_type is bool:
        group.add_argument(opt.flag, action=argparse.BooleanOptionalAction, **common)
    elif opt.kind == "list":
        # One value a flag, so that what follows it can be the model; names of the model may follow one another.
        many: dict[str, Any] = {"action": "extend", "nargs": "+"} if opt.several else {"action": "append"}
        group.add_argument(opt.flag, metavar=value_name(opt), **many, **common)
    else:
        group.add_argument(opt.flag, metavar=value_name(opt), **common)
