"""Help is short, names every value, and fits 80 columns (F67)."""

import pytest

from octavo.config.args import SERVER_SECTIONS, options, parse_size, shown_size
from octavo.config.flags import WIDTH, Parser, add_options, value_name
from octavo.plugins.features import all_sections, server_sections

OPTIONS = options({**SERVER_SECTIONS, **all_sections()})


def help_of(common=None):
    parser = Parser(prog="x", usage="x")
    add_options(parser, server_sections(), positional_model=True, common=common)
    return parser.format_help()


def test_f67_help_shows_values_choices_and_readable_defaults():
    text = help_of()
    for words in ("--kv-cache-memory SIZE", "--port PORT", "--host ADDRESS", "--kv-lease-s SECONDS", "--weight-cache FOLDER",
                  "--gpu-memory-utilization SHARE", "{fcfs,priority}", "(default: 8000)", "(default: 32GiB)", "(default: 30)",
                  "(default: on)"):  # fmt: skip
        assert words in " ".join(text.split()), words
    assert "34359738368" not in text
    assert max(map(len, text.splitlines())) <= WIDTH
    for option in options(server_sections()).values():
        assert option.flag in text.replace("--[no-]", "--")


@pytest.mark.parametrize("name", OPTIONS)
def test_f67_every_value_has_a_name_that_says_what_it_is(name):
    option = OPTIONS[name]
    if option.plain_type is not bool:
        assert value_name(option) != "X", "give it value= in the schema, or a unit"


def test_f67_only_the_common_options_are_shown_in_their_order_and_all_are_understood():
    text = help_of(common=("port", "host"))
    assert text.index("--port") < text.index("--host")
    assert "--seed" not in text
    parser = Parser(prog="x")
    add_options(parser, server_sections(), positional_model=True, common=("port",))
    assert parser.parse_args(["--seed", "3"]).opt_seed == "3"


def test_words_of_the_help_are_not_broken_at_hyphens():
    words = {word.strip("(),;:.") for word in help_of().split()}
    assert not [word for word in words if word.startswith("--") and word.endswith("-")]


@pytest.mark.parametrize(
    ("size", "text"),
    [(8 << 30, "8GiB"), (32 << 20, "32MiB"), (1 << 40, "1TiB"), (1536, "1536"), (3 << 9, "1536"), (2048, "2KiB"), (0, "0"), (7, "7")],
)  # fmt: skip
def test_sizes_are_written_as_they_are_read(size, text):
    assert shown_size(size) == text
    assert parse_size(text, "--x") == size
