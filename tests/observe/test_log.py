"""One line a message, with the request it belongs to."""

import io
import logging
from collections.abc import Iterator

import pytest

from octavo.base.errors import ConfigError
from octavo.observe import log


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The root logger writes here, and is put back afterwards."""
    root = logging.getLogger(log.ROOT)
    kept, level, propagate = list(root.handlers), root.level, root.propagate
    out = io.StringIO()
    log.configure_logging("info", out)
    yield out
    root.handlers[:], root.propagate = kept, propagate
    root.setLevel(level)


def test_a_message_is_one_line_whatever_a_client_put_into_it(stream: io.StringIO) -> None:
    log.get_logger("octavo.serving").info("prompt: %s", "a\n2026-01-01 INFO forged\r\x1b[31m")
    (line,) = stream.getvalue().splitlines()
    assert r"a\n2026-01-01 INFO forged\r\x1b[31m" in line and "octavo.serving" in line


def test_lines_carry_the_request_id_inside_its_context(stream: io.StringIO) -> None:
    logger = log.get_logger("front")
    with log.request_context("req-1"):
        with log.request_context("inner"):
            assert log.current_request_id() == "inner"
        logger.warning("inside")
    logger.warning("outside")
    inside, outside = stream.getvalue().splitlines()
    assert "[req-1] inside" in inside and "WARNING" in inside and "octavo.front" in inside
    assert "[" not in outside and log.current_request_id() == ""


def test_a_traceback_follows_on_indented_lines(stream: io.StringIO) -> None:
    try:
        raise ValueError("broken\nnews")
    except ValueError:
        log.get_logger("x").exception("it failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("it failed") and rest and all(line.startswith("    ") for line in rest)


def test_the_level_is_obeyed_and_a_second_call_replaces_the_first(stream: io.StringIO) -> None:
    second = io.StringIO()
    log.configure_logging("error", second)
    log.get_logger("x").warning("no")
    log.get_logger("x").error("yes")
    assert stream.getvalue() == "" and "yes" in second.getvalue() and "no" not in second.getvalue()


def test_an_unknown_level_names_the_known_ones() -> None:
    assert log.parse_level("DEBUG") == logging.DEBUG
    with pytest.raises(ConfigError, match="debug, info, warning, error"):
        log.parse_level("loud")


def test_asking_for_a_logger_configures_nothing() -> None:
    before = list(logging.getLogger().handlers)
    assert log.get_logger("octavo.x").handlers == [] and logging.getLogger().handlers == before
