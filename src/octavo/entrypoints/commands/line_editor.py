"""A line editor for a terminal: arrows, history, messages of several lines.

Promises: Ctrl-C is `KeyboardInterrupt` whenever it is pressed and Ctrl-D on an empty line is `EOFError`; Enter sends
and Alt-Enter starts a new line; text that is pasted stays one message. The history lives as long as the conversation:
nothing is written to disk.
Does not know: what is said.
"""

import sys

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from octavo.entrypoints.commands.line_reader import MORE


class Editor:
    """A person at a terminal.

    Owns: the history.
    """

    terminal = True

    def __init__(self) -> None:
        output = create_output(stdout=sys.stdout)
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # the terminal is not asked where its cursor stands: no answer would be a warning
        with create_app_session(output=output):
            self._session: PromptSession[str] = PromptSession(
                history=InMemoryHistory(), multiline=True, key_bindings=_keys(), prompt_continuation=MORE
            )

    def line(self, prompt: str) -> str:
        """What was typed, up to Enter."""
        return self._session.prompt(prompt)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
