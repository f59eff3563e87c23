"""`octavo chat`: a conversation in a terminal or over a pipe (F59, F71).

Real processes on real pseudo-terminals; nothing here is timed but by limits that only a fault reaches.
"""

import os
import pty
import select
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from octavo.base.params import SamplingParams
from octavo.entrypoints.commands.chat import CAREFUL, sampling, shown
from octavo.entrypoints.commands.chat_session import SETTABLE, Session, described
from octavo.entrypoints.commands.line_reader import read_entry
from tests.support import checkpoints
from tests.support.smollm2 import smollm2_gguf

COMMAND = [sys.executable, "-m", "octavo.entrypoints.cli", "chat"]
READY = b"\x1b[0m>"  # how the editor draws its prompt
SMALL = ("--max-tokens", "4", "--max-model-len", "64", "--num-threads", "1")


class Terminal:
    """`octavo chat` on a terminal of its own."""

    def __init__(self, *args):
        self.unread = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [*COMMAND, *args])

    def until(self, words, timeout_s=120):
        """Read up to these words and give what came before; what follows them is kept for the next time."""
        end = time.monotonic() + timeout_s
        while words not in self.unread:
            assert select.select([self.fd], [], [], max(0.0, end - time.monotonic()))[0], self.unread
            self.unread += os.read(self.fd, 4096)
        before, _, self.unread = self.unread.partition(words)
        return before

    def type(self, keys):
        os.write(self.fd, keys)

    def ask(self, keys, words=b""):
        """Type keys and Enter; what came until the next prompt, with `words` in it."""
        self.type(keys + b"\r")
        before = self.until(words)
        return before + words + self.until(READY)

    def leave(self, keys, timeout_s=60):
        """Type these keys once; the exit code."""
        self.type(keys)
        end = time.monotonic() + timeout_s
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(self.pid, 9)
                os.waitpid(self.pid, 0)
                pytest.fail("chat did not leave")
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.unread += os.read(self.fd, 4096)
                except OSError:  # the other end is closed
                    time.sleep(0.05)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(done[1])


@pytest.mark.parametrize("leave", [b"\x03", b"\x04", b"/quit\r", b"half a messa\x03"])
def test_chat_leaves_from_its_prompt_and_a_message_too_long_is_not_the_end(leave):
    """F71: at the first press."""
    chat = Terminal(str(checkpoints.tiny_llama()), *SMALL, "--temperature", "0")
    chat.until(READY)
    chat.ask(b"word " * 100, b"/clear forgets what was said")
    chat.ask(b"hello", b"\r\n")
    assert chat.leave(leave) == 0
    assert b"Traceback" not in chat.unread


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05, 0.2, 1.0])
def test_f71_chat_leaves_beside_a_busy_neighbour(delay_s):
    """F71: five of five, however soon after the prompt the key is pressed."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        chat = Terminal(str(checkpoints.tiny_llama()), *SMALL)
        chat.until(READY)
        time.sleep(delay_s)
        assert chat.leave(b"\x03") == 0
        assert b"Traceback" not in chat.unread
    finally:
        for one in busy:
            one.kill()
            one.wait()


def test_f59_a_terminal_conversation_from_its_quiet_start_to_its_end():
    """F59: the start leaves one line; words with / are obeyed; Ctrl-C ends an answer and no more."""
    chat = Terminal(str(smollm2_gguf()), "--num-threads", "2", "--max-model-len", "4096")
    start = chat.until(READY).decode()
    kept = [line.rpartition("\x1b[K")[2] for line in start.split("\r\n")]
    assert len([line for line in kept if line.strip()]) == 2, kept  # the greeting, and the editor's own codes
    assert "temperature 0.2, top_p 0.9 (its author's). /help lists commands." in kept[0]
    assert b"/system TEXT" in chat.ask(b"/help", b"/bye")
    chat.ask(b"/hlep", b"did you mean /help?")
    chat.ask(b"/set temperature hot", b"temperature must be a number")
    chat.ask(b"/set ignore_eos true", b"ignore_eos is on")
    chat.ask(b"/set max_tokens 4000", b"max_tokens is 4000")
    chat.type(b'"""\r')
    chat.type(b"Count from one\x1b\rto a thousand.\r")  # Alt-Enter stays in the message
    chat.type(b'"""\r')
    chat.until(b"\x1b[?2004l")
    chat.until(b"\x1b[?2004l")
    chat.until(b"\x1b[?2004l")
    while not chat.unread.strip():
        chat.unread += os.read(chat.fd, 4096)
    chat.type(b"\x03")
    answer = chat.until(READY, timeout_s=30).decode(errors="replace")  # 4,000 tokens take a minute and more
    assert len(answer) < 8000
    chat.ask(b"/set temperature", b"temperature is 0.2")
    assert chat.leave(b"/bye\r") == 0


def piped(text, *args):
    """What chat prints when these lines are piped in."""
    done = subprocess.run(
        [*COMMAND, str(checkpoints.tiny_llama()), *SMALL, *args],
        input=text, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_f59_lines_from_a_pipe_are_messages_and_words():
    lines, errors = piped(
        '/set\n/set seed 5\n\n hello\n"""one\ntwo"""\n/nothing\n/exit\nnever asked\n', "--temperature", "0"
    )
    assert lines[:2] == ["temperature 0.0, top_p 0.95, max_tokens 4", "seed is 5"]
    assert lines[-1] == "unknown command /nothing; /help lists them"
    assert len(lines) == 5, "two answers"
    assert errors == "", "a quiet start"


def test_f59_one_message_is_answered_and_a_start_is_told_when_asked():
    lines, errors = piped("", "-m", "hello", "-v")
    assert len(lines) == 1
    assert "octavo: [" in errors and "KV cache" in errors


def test_bytes_that_are_no_text_do_not_end_a_conversation():
    done = subprocess.run(
        [*COMMAND, str(checkpoints.tiny_llama()), *SMALL],
        input=b"caf\xe9\n/set seed\n",
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"seed is none; /set seed VALUE changes it\n")


def test_a_model_cannot_steer_the_terminal():
    assert shown("a\x1b[2Jb\x07\x9bc\td\n\u00e9") == "a\ufffd[2Jb\ufffd\ufffdc\td\n\u00e9"


def args(**changes):
    return SimpleNamespace(**{"temperature": None, "top_p": None, "max_tokens": 512, **changes})


@pytest.mark.parametrize(
    ("author", "given", "expected", "whose"),
    [
        ({}, {}, CAREFUL, "careful"),
        ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": CAREFUL["top_p"]}, "you"),
        ({"temperature": 0.3}, {}, {"temperature": 0.3, "top_p": 1.0}, "author"),
        ({"top_k": 20}, {}, {"temperature": 1.0, "top_k": 20}, "author"),
        ({"repetition_penalty": 1.1}, {}, {**CAREFUL, "repetition_penalty": 1.1}, "careful"),
    ],
)
def test_f59_careful_sampling_where_the_author_says_nothing(author, given, expected, whose):
    frontend = SimpleNamespace(info=SimpleNamespace(default_sampling=author, max_model_len=100))
    params, said = sampling(args(**given), frontend)
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.max_tokens == 99
    assert whose in said


@pytest.fixture
def session():
    return Session(SamplingParams(temperature=0.5, max_tokens=10), "be kind")


def test_clear_forgets_what_was_said_and_keeps_the_system_message(session):
    session.said("a", "b")
    assert [m["content"] for m in session.asked("c")] == ["be kind", "a", "b", "c"]
    session.command("/clear")
    assert [m["content"] for m in session.asked("c")] == ["be kind", "c"]
    session.command("/system speak French")
    assert session.asked("c")[0] == {"role": "system", "content": "speak French"}
    session.command('/system """"""')
    assert [m["role"] for m in session.asked("c")] == ["user"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/sett x", "did you mean /set"),
        ("/xyzzy", "/help lists them"),
        ("/set n 3", "n cannot be set"),
        ("/set temperatur 1", "did you mean temperature"),
        ("/set top_p 7", "top_p must be"),
        ("/set max_tokens 0", "max_tokens must be at least 1"),
        ("/set min_tokens 11", "min_tokens (11) must not exceed max_tokens (10)"),
        ("/set seed x", "seed must be an integer, got 'x'"),
        ("/set temperature [[", "temperature must be a number"),
        ("/set stop [1]", "stop[0] must be a non-empty string"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(session, line, told):
    before = session.params
    assert told in session.command(line)
    assert session.params == before
    assert not session.left


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 1.5", "temperature", 1.5),
        ("/set top_k 40", "top_k", 40),
        ("/set stop END", "stop", ("END",)),
        ("/set stop 12", "stop", ("12",)),
        ('/set stop ["a", "b"]', "stop", ("a", "b")),
        ("/set stop none", "stop", ()),
        ("/set seed 3", "seed", 3),
        ("/set seed none", "seed", None),
        ("/set ignore_eos on", "ignore_eos", True),
    ],
)
def test_parameters_are_set(session, line, name, value):
    assert name in session.command(line)
    assert getattr(session.params, name) == value


def test_a_value_is_told_as_it_may_be_typed(session):
    """Not as Python writes it: `('END',)`, `None` and `True` are nothing that /set would have been given."""
    told = [session.command(f"/set {line}") for line in ("stop END", 'stop ["a", "b"]', "seed none", "ignore_eos on")]
    assert told == ["stop is END\n", 'stop is ["a", "b"]\n', "seed is none\n", "ignore_eos is on\n"]
    assert 'stop ["a", "b"], ignore_eos on' in session.command("/set")


def test_every_parameter_that_can_be_set_is_one_and_is_in_the_help(session):
    for name in SETTABLE:
        assert hasattr(session.params, name)
        assert name in session.command("/help")
    assert described(session.params, SETTABLE) == "temperature 0.5, top_p 1.0, max_tokens 10"


@pytest.mark.parametrize("word", ["/bye", "/exit", "/quit"])
def test_words_that_leave(session, word):
    assert session.command(word) == ""
    assert session.left


class Typed:
    """A reader of these lines."""

    terminal = False

    def __init__(self, *lines):
        self.lines = list(lines)

    def line(self, prompt):
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


@pytest.mark.parametrize(
    ("lines", "entry"),
    [
        (["hello"], "hello"),
        (['"""a', "b", 'c"""'], "a\nb\nc"),
        (['"""', "a", "", '"""'], "a"),
        (['"""one line"""'], "one line"),
        (['/system """be', 'kind"""'], "/system be\nkind"),
        (['say """ to me'], 'say """ to me'),
    ],
)
def test_a_block_is_one_entry(lines, entry):
    reader = Typed(*lines)
    assert read_entry(reader) == entry
    assert reader.lines == []


def test_a_block_that_never_ends_is_the_end_of_the_input():
    with pytest.raises(EOFError):
        read_entry(Typed('"""a', "b"))
