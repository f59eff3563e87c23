"""`octavo chat`: a conversation in the terminal, streamed as it is made.

Promises: Ctrl-C ends the answer under way and keeps what was said; Ctrl-C at the prompt, Ctrl-D or /bye leaves; /help
lists what else there is. A message that cannot be answered is said to be so, and the conversation goes on without it.
Where lines are piped in, each is a message, and nothing is printed but what is said.
Does not know: HTTP, or where the engine runs.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Any, Final

from octavo.base.errors import ClientError
from octavo.base.params import SamplingParams
from octavo.base.types import OutputKind, UsageContext
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.chat_session import Message, Session, described
from octavo.entrypoints.commands.console import quiet_progress
from octavo.entrypoints.commands.line_reader import Reader, open_reader, read_entry
from octavo.serving.frontend import Frontend
from octavo.serving.startup import open_online

Write = Callable[[str], None]
# Where a model's author says nothing of sampling. Neutral sampling takes a token of the long tail every few dozen, which
# a small or a quantized model does not recover from; these keep variety and cut that tail.
CAREFUL: Final = {"temperature": 0.7, "top_p": 0.95}
_CONTROL: Final = {c: "\N{REPLACEMENT CHARACTER}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}
SAID: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # at the start
_CHOOSING: Final = frozenset({"temperature", "top_p", "top_k", "min_p"})


def run(call: Call) -> int:
    """Talk until the user leaves, or answer one message."""
    args = call.arguments
    with quiet_progress(verbose=args.verbose) as show:
        online = open_online(call.given, show, call.env, usage=UsageContext.COMMAND_LINE)
    try:
        with asyncio.Runner() as runner:
            return _talk(runner, online.frontend, args.message, args.system, args)
    finally:
        online.close()


def sampling(args: Any, frontend: Frontend) -> tuple[SamplingParams, str]:
    """What answers are sampled with, and whose choice it is: what the command line says over the model's defaults."""
    author = dict(frontend.info.default_sampling)
    given = {k: v for k, v in (("temperature", args.temperature), ("top_p", args.top_p)) if v is not None}
    careful = not _CHOOSING & author.keys()
    values = {**(CAREFUL if careful else {}), **author, **given}
    values["max_tokens"] = min(args.max_tokens, frontend.info.max_model_len - 1)
    whose = "careful defaults, the model names none" if careful else "its author's"
    return SamplingParams(**values, output_kind=OutputKind.DELTA), "as you said" if given else whose


def _talk(runner: asyncio.Runner, frontend: Frontend, message: str | None, system: str | None, args: Any) -> int:
    params, whose = sampling(args, frontend)
    session = Session(params, system)
    runner.run(frontend.engine.start())
    try:
        if message is not None:
            runner.run(_answer(frontend, session.asked(message), params, _write))
            return 0
        with contextlib.suppress(KeyboardInterrupt):  # whenever it comes but in an answer: the user leaves
            reader = open_reader(sys.stdin, sys.stdout)
            if reader.terminal:
                _write(
                    f"{frontend.info.served_names[0]} with {described(params, SAID)} ({whose}). /help lists commands.\n"
                )
            _converse(runner, frontend, session, reader)
        return 0
    finally:
        runner.run(frontend.engine.stop())


def _converse(runner: asyncio.Runner, frontend: Frontend, session: Session, reader: Reader) -> None:
    """Questions are read outside the event loop, which runs for one answer at a time: each Ctrl-C ends one thing."""
    while not session.left:
        try:
            text = read_entry(reader)
        except EOFError:
            return
        if text.startswith("/"):
            _write(session.command(text.strip()))
            continue
        if not (text := text.strip()):
            continue
        try:
            answer = runner.run(_answer(frontend, session.asked(text), session.params, _write))
        except ClientError as error:
            sys.stderr.write(f"octavo: {error}; /clear forgets what was said before\n")
            continue
        session.said(text, answer)


async def _answer(frontend: Frontend, messages: list[Message], params: SamplingParams, write: Write) -> str:
    """Stream one answer; an interrupt keeps what has come so far."""
    pieces: list[str] = []
    with contextlib.suppress(asyncio.CancelledError):
        prompt = await frontend.renderer.achat(messages)
        room = frontend.info.max_model_len - len(prompt.prompt_token_ids)
        if params.max_tokens is not None and room > 0:
            most = min(params.max_tokens, room)
            params = params.replace(max_tokens=most, min_tokens=min(params.min_tokens, most))
        stream = frontend.engine.generate(prompt, params)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                text = output.outputs[0].text
                pieces.append(text)
                write(shown(text) if sys.stdout.isatty() else text)
    write("\n")
    return "".join(pieces)


def shown(text: str) -> str:
    """Text for a terminal: a model's control characters must not move the cursor, rename the window, or worse."""
    return text.translate(_CONTROL)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
