"""The walk-through in docs/disaggregation.md, done as it stands there."""

import contextlib
import io
import re
import shlex
from pathlib import Path

from octavo.features.transfer.control.consumer import OnFailure
from octavo.features.transfer.control.disagg import DisaggControl
from octavo.features.transfer.options import TransferOptions
from tests.features.transfer.test_disagg import Clock, make_consumer, make_producer
from tests.support import checkpoints
from tests.support.disagg import OPTIONS
from tests.support.live import spawn
from tests.support.ports import free_port

GUIDE = Path(__file__).parents[2] / "docs" / "disaggregation.md"


def block(text, language, heading):
    """The first fenced block of a language after a heading."""
    return re.search(rf"## {heading}\n.*?```{language}\n(.*?)```", text, re.DOTALL)[1]


def test_the_walk_through_works_as_it_stands():
    text = GUIDE.read_text()
    commands = block(text, "sh", "Two processes").strip().splitlines()
    code = block(text, "python", "Two processes")
    listen = free_port()
    with contextlib.ExitStack() as stack:
        for command in commands:
            words = shlex.split(command.replace("7100", str(listen)))
            assert words[:3] == ["octavo", "serve", "MODEL"]
            port = words[words.index("--port") + 1]
            rest = [w for i, w in enumerate(words[3:], 3) if w != "--port" and words[i - 1] != "--port"]
            server = stack.enter_context(spawn(str(checkpoints.tiny_llama()), *rest, *OPTIONS))
            assert f"http://127.0.0.1:{port}" in code
            code = code.replace(f"http://127.0.0.1:{port}", server.url)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(GUIDE), "exec"), {})  # nothing that the page does not say
        answer, details = printed.getvalue().rsplit("\n", 2)[:2]
        assert answer == server.text("Once upon a time there was an engine that", max_tokens=32)
        assert "'remote': " in details


def test_the_guide_names_every_option_and_figure():
    text = GUIDE.read_text()
    clock = Clock()
    figures = DisaggControl(clock, make_producer(clock), make_consumer(OnFailure.FAIL)).stats()
    assert [name for name in figures if f"`{name}`" not in text] == []
    options = [f"--{n.replace('_', '-')}" for n in TransferOptions.__dataclass_fields__ if n != "kv_tier"]
    assert [name for name in options if name not in text] == []
