"""`octavo chat`: a conversation in the terminal, streamed as it is made.

Promises: Ctrl-C ends the answer under way and keeps what was said; Ctrl-D or /quit leaves; /reset forgets.
Does not know: HTTP; the engine runs in this process.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Any

from octavo.base.params import SamplingParams
from octavo.base.types import OutputKind, UsageContext
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.console import progress
from octavo.serving.front import Front
from octavo.serving.startup import open_online

Write = Callable[[str], None]


def run(call: Call) -> int:
    """Talk until the user leaves, or answer one message."""
    args = call.arguments
    show = progress()
    online = open_online(call.given, show, call.env, usage=UsageContext.COMMAND_LINE)
    try:
        return asyncio.run(_talk(online.front, args.message, args.system, sampling(args, online.front)))
    finally:
        online.close()


def sampling(args: Any, front: Front) -> SamplingParams:
    """The model's defaults under what the command line says."""
    chosen = {"temperature": args.temperature, "top_p": args.top_p}
    values = {**front.info.default_sampling, **{k: v for k, v in chosen.items() if v is not None}}
    values["max_tokens"] = min(args.max_tokens, front.info.max_model_len - 1)
    return SamplingParams(**values, output_kind=OutputKind.DELTA)


async def _talk(front: Front, message: str | None, system: str | None, params: SamplingParams) -> int:
    await front.engine.start()
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    try:
        if message is not None:
            await _answer(front, [*start, {"role": "user", "content": message}], params, _write)
            return 0
        await _converse(front, start, params)
        return 0
    finally:
        await front.engine.stop()


async def _converse(front: Front, start: list[dict[str, Any]], params: SamplingParams) -> None:
    _write(f"Talking to {front.info.model}. /reset forgets, /quit or Ctrl-D leaves, Ctrl-C ends an answer.\n")
    messages = list(start)
    while True:
        try:
            text = (await asyncio.to_thread(input, "> ")).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/reset":
            messages = list(start)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        answer = await _answer(front, messages, params, _write)
        messages.append({"role": "assistant", "content": answer})


async def _answer(front: Front, messages: list[dict[str, Any]], params: SamplingParams, write: Write) -> str:
    """Stream one answer; an interrupt keeps what has come so far."""
    prompt = await front.renderer.achat(messages)
    room = front.info.max_model_len - len(prompt.prompt_token_ids)
    if params.max_tokens is not None and room > 0:
        params = params.replace(max_tokens=min(params.max_tokens, room))
    pieces: list[str] = []
    stream = front.engine.generate(prompt, params)
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
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
