"""What a conversation in the terminal holds, and the words that change it.

Promises: a line that begins with / never reaches the model; a word that does not exist is said to be so, with the
nearest one; a sampling parameter is checked when it is set, not when the next answer fails.
Does not know: the terminal, or how answers are made.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from octavo.base.errors import ClientError
from octavo.base.params import SamplingParams
from octavo.config.args import nearest

SETTABLE: Final = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop", "bad_words",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
)  # fmt: skip
BLOCK: Final = '"""'  # begins and ends a message of several lines
HELP: Final = f"""\
/help                this list
/set                 the sampling parameters in force
/set NAME VALUE      change one: {", ".join(SETTABLE[:7])},
                     {", ".join(SETTABLE[7:])}
/system              the system message
/system TEXT         another one, from the next answer on; /system {BLOCK}{BLOCK} for none
/clear               forget the conversation
/bye                 leave; so do Ctrl-D and Ctrl-C
{BLOCK}                  begins and ends a message of several lines; Alt-Enter starts a new line in a terminal
Ctrl-C               ends the answer under way
A message that is to begin with / needs a space before it.
"""

Message = dict[str, Any]


class Session:
    """One conversation.

    Owns: the messages so far, the system message, the sampling parameters, and whether the user has left.
    """

    def __init__(self, params: SamplingParams, system: str | None = None) -> None:
        self.params = params
        self.left = False
        self._system = system
        self._messages: list[Message] = []
        self._words: Mapping[str, Callable[[str], str]] = {
            "/help": self._help, "/?": self._help, "/set": self._set, "/system": self._set_system,
            "/clear": self._clear, "/reset": self._clear,
            "/bye": self._leave, "/exit": self._leave, "/quit": self._leave,
        }  # fmt: skip

    def asked(self, text: str) -> list[Message]:
        """The messages that a model is to answer when the user says `text`."""
        start = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*start, *self._messages, {"role": "user", "content": text}]

    def said(self, text: str, answer: str) -> None:
        """Keep a question and what was answered."""
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str:
        """Do what a line that begins with / asks for; what to tell the user, one or more whole lines or nothing."""
        word, _, rest = line.partition(" ")
        known = self._words.get(word)
        if known is None:
            near = nearest(word, self._words)
            return f"unknown command {word}" + (f"; did you mean {near}?" if near else "; /help lists them") + "\n"
        return known(rest.strip())

    def _help(self, _: str) -> str:
        return HELP

    def _leave(self, _: str) -> str:
        self.left = True
        return ""

    def _clear(self, _: str) -> str:
        self._messages = []
        return "the conversation is forgotten\n"

    def _set_system(self, text: str) -> str:
        if not text:
            return f"system message: {self._system or 'none'}\n"
        inner = text[3:-3] if len(text) >= 6 and text.startswith(BLOCK) and text.endswith(BLOCK) else text
        self._system = inner.strip() or None
        return "system message set\n" if self._system else "no system message\n"

    def _set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        if not name:
            return f"{described(self.params, SETTABLE)}\n"
        if name not in SETTABLE:
            near = nearest(name, SETTABLE)
            return f"{name} cannot be set" + (f"; did you mean {near}?" if near else "; /help lists what can") + "\n"
        if not value.strip():
            return f"{name} is {_text(getattr(self.params, name))}; /set {name} VALUE changes it\n"
        try:
            self.params = self.params.replace(**{name: _value(name, value.strip())})
        except ClientError as error:
            return f"{error.message}\n"
        return f"{name} is {_text(getattr(self.params, name))}\n"


def _value(name: str, text: str) -> Any:
    """A number, a flag or a list as JSON writes it; other text as it stands."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = {"none": None, "on": True, "off": False}.get(text.lower(), text)
    if name in ("stop", "bad_words") and not isinstance(value, list):
        return () if value is None else (str(value) if isinstance(value, str) else text,)
    return value


def _text(value: Any) -> str:
    """A value as somebody would type it after /set."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        alone = len(value) == 1 and isinstance(value[0], str)
        return str(value[0]) if alone else json.dumps(list(value), ensure_ascii=False) if value else "none"
    return "none" if value is None else str(value)


def described(params: SamplingParams, names: Iterable[str]) -> str:
    """`name value, ...` of these parameters where they are not the neutral ones, and of those that everybody asks for."""
    neutral = SamplingParams()
    always = ("temperature", "top_p")
    shown = [n for n in names if n in always or getattr(params, n) != getattr(neutral, n)]
    return ", ".join(f"{n} {_text(getattr(params, n))}" for n in shown)
