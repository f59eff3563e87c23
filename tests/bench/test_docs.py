"""Every command on the page about measuring has options that exist (OPS-12)."""

import re
import shlex
from pathlib import Path

import pytest

from octavo.config.flags import Parser
from octavo.entrypoints.commands.arguments import BENCH, add_arguments

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measuring.md"
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
]  # fmt: skip


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page_is_understood(line):
    program, bench, part, *args = shlex.split(line)
    assert (program, bench) == ("octavo", "bench")
    parser = Parser(prog=f"octavo bench {part}")
    add_arguments(parser, BENCH[part])
    parser.parse_args(args)


def test_the_page_shows_every_part():
    assert {shlex.split(line)[2] for line in COMMANDS} == BENCH.keys() - {"compare"}
