"""`octavo chat`: a conversation in the terminal, streamed as it is made.

Promises: Ctrl-C ends the answer under way and keeps what was said; Ctrl-C at the prompt, Ctrl-D or /quit leaves;
/reset forgets. A message that cannot be answered is said to be so, and the conversation goes on without it.
Does not know: HTTP, or where the engine runs.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Any

from octavo.base.errors import ClientError
from octavo.base.params import SamplingParams
from octavo.base.types import OutputKind, UsageContext
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.console import progress
from octavo.serving.front import Front
from octavo.serving.startup import open_online

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  gives `input` line editing and a history

Write = Callable[[str], None]


def run(call: Call) -> int:
    """Talk until the user leaves, or answer one message."""
    args = call.arguments
    online = open_online(call.given, progress(), call.env, usage=UsageContext.COMMAND_LINE)
    try:
        with asyncio.Runner() as runner:
            return _talk(runner, online.front, args.message, args.system, sampling(args, online.front))
    finally:
        online.close()


def sampling(args: Any, front: Front) -> SamplingParams:
    """The model's defaults under what the command line says."""
    chosen = {"temperature": args.temperature, "top_p": args.top_p}
    values = {**front.info.default_sampling, **{k: v for k, v in chosen.items() if v is not None}}
    values["max_tokens"] = min(args.max_tokens, front.info.max_model_len - 1)
    return SamplingParams(**values, output_kind=OutputKind.DELTA)


def _talk(runner: asyncio.Runner, front: Front, message: str | None, system: str | None, params: SamplingParams) -> int:
    runner.run(front.engine.start())
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    try:
        if message is not None:
            runner.run(_answer(front, [*start, {"role": "user", "content": message}], params, _write))
        else:
            _converse(runner, front, start, params)
        return 0
    finally:
        runner.run(front.engine.stop())


def _converse(runner: asyncio.Runner, front: Front, start: list[dict[str, Any]], params: SamplingParams) -> None:
    """Questions are read outside the event loop, which runs for one answer at a time: each Ctrl-C ends one thing."""
    _write(f"Talking to {front.info.model}. /reset forgets, /quit or Ctrl-D leaves, Ctrl-C ends an answer.\n")
    messages = list(start)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _write("\n")
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/reset":
            messages = list(start)
            continue
        if not text:
            continue
        question = {"role": "user", "content": text}
        try:
            answer = runner.run(_answer(front, [*messages, question], params, _write))
        except ClientError as error:
            sys.stderr.write(f"octavo: {error}; /reset forgets what was said before\n")
            continue
        messages += [question, {"role": "assistant", "content": answer}]


async def _answer(front: Front, messages: list[dict[str, Any]], params: SamplingParams, write: Write) -> str:
    """Stream one answer; an interrupt keeps what has come so far."""
    pieces: list[str] = []
    with contextlib.suppress(asyncio.CancelledError):
        prompt = await front.renderer.achat(messages)
        room = front.info.max_model_len - len(prompt.prompt_token_ids)
        if params.max_tokens is not None and room > 0:
            params = params.replace(max_tokens=min(params.max_tokens, room))
        stream = front.engine.generate(prompt, params)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                text = output.outputs[0].text
                pieces.append(text)
                write(text)
    write("\n")
    return "".join(pieces)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
