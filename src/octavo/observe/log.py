"""Logging: one logger tree, one line a message, and the id of the request a line belongs to.

Promises: a message is always one line (line breaks in it are escaped, so no client can forge a line);
importing this changes no logging set-up, only `configure_logging` does, and only below the logger `octavo`.
A traceback follows its message on indented lines.
Does not know: levels' origin (flags, environment) or where the stream goes.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

from octavo.base.errors import ConfigError

ROOT = "octavo"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_LINE = "%(asctime)s.%(msecs)03d %(levelname)-7s %(process)d %(name)s%(request)s %(message)s"
_DATE = "%Y-%m-%d %H:%M:%S"
_request_id: ContextVar[str] = ContextVar("octavo_request_id", default="")


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; call it with `__name__`."""
    return logging.getLogger(name if name == ROOT or name.startswith(ROOT + ".") else f"{ROOT}.{name}")


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Lines logged inside carry `request_id`; tasks started inside inherit it. Nesting is fine."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def current_request_id() -> str:
    """The id set by the innermost `request_context`, or the empty string."""
    return _request_id.get()


def parse_level(name: str) -> int:
    """A level's number from its name, in any case; raises `ConfigError` for an unknown name."""
    level = LEVELS.get(name.lower())
    if level is None:
        raise ConfigError(f"log level {name!r} is unknown; use one of {', '.join(LEVELS)}")
    return level


def configure_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Send Octavo's log lines of `level` and above to `stream` (stderr when not given); replaces an earlier call's."""
    number = parse_level(level)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger(ROOT)
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number)
    root.propagate = False


def one_line(text: str) -> str:
    """`text` with everything that would break a line or move the cursor escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class LineFormatter(logging.Formatter):
    """Time, level, process, logger, request id if any, message: one line.

    Owns: nothing.
    """

    def __init__(self) -> None:
        super().__init__(_LINE, _DATE)

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line, and its traceback, if it has one, on indented lines below."""
        request_id = _request_id.get()
        record.request = f" [{one_line(request_id)}]" if request_id else ""
        record.message = one_line(record.getMessage())
        record.asctime = self.formatTime(record, self.datefmt)
        line = self.formatMessage(record)
        if record.exc_info:
            line += "\n" + _indented(self.formatException(record.exc_info))
        if record.stack_info:
            line += "\n" + _indented(self.formatStack(record.stack_info))
        return line


def _indented(text: str) -> str:
    return "\n".join("    " + one_line(line) for line in text.splitlines())
