"""Lines from wherever a conversation comes: a pipe, a file, or a terminal through the editor.

Promises: one entry at a time, without its line end; the end of the input is `EOFError`; a block in triple quotes is one
entry of several lines.
Does not know: what entries mean, or how a terminal is edited (see `line_editor`).
"""

import io
from collections.abc import Callable
from typing import Final, Protocol, TextIO

from octavo.entrypoints.commands.chat_session import BLOCK
from octavo.plugins.registry import load_target

EDITOR: Final = "octavo.entrypoints.commands.line_editor:Editor"  # slow to import, and of use on a terminal only
PROMPT: Final = "> "
MORE: Final = ". "  # the prompt inside a block


class Reader(Protocol):
    """Where lines come from."""

    @property
    def terminal(self) -> bool:
        """True when a person sits there."""

    def line(self, prompt: str) -> str:
        """The next line; raises `EOFError` at the end and `KeyboardInterrupt` for Ctrl-C."""


class Lines:
    """Lines of a stream that nobody sees being typed.

    Owns: nothing.
    """

    terminal = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, prompt: str) -> str:
        """The next line; nothing is shown."""
        text = self._stream.readline()
        if not text:
            raise EOFError
        return text.rstrip("\r\n")


def open_reader(stdin: TextIO, stdout: TextIO) -> Reader:
    """An editor where both ends are a terminal, plain lines elsewhere."""
    if stdin.isatty() and stdout.isatty():
        make: Callable[[], Reader] = load_target(EDITOR)
        return make()
    if isinstance(stdin, io.TextIOWrapper):
        stdin.reconfigure(errors="replace")  # bytes that are no text must not end the conversation
    return Lines(stdin)


def read_entry(reader: Reader) -> str:
    """The next entry: a line, or a block between triple quotes, which may begin after a word such as /system."""
    text = reader.line(PROMPT)
    before, quotes, rest = text.partition(BLOCK)
    opens = quotes and (not before.strip() or before.startswith("/")) and BLOCK not in rest
    if not opens:
        inner = text.strip()
        if len(inner) >= 2 * len(BLOCK) and inner.startswith(BLOCK) and inner.endswith(BLOCK):
            return inner[len(BLOCK) : -len(BLOCK)]
        return text
    lines = [rest]
    while BLOCK not in lines[-1]:
        lines.append(reader.line(MORE))
    lines[-1] = lines[-1].partition(BLOCK)[0]
    return before + "\n".join(lines).strip("\n")
