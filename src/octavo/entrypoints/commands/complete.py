"""`octavo complete`: continue a text and print what comes.

Promises: only the continuation goes to standard output.
Does not know: chat templates.
"""

import asyncio
import contextlib
import sys

from octavo.base.params import SamplingParams
from octavo.base.types import UsageContext
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.chat import sampling
from octavo.entrypoints.commands.console import quiet_progress
from octavo.serving.frontend import Frontend
from octavo.serving.startup import open_online


def run(call: Call) -> int:
    """Print the continuation as it is made."""
    prompt = sys.stdin.read() if call.arguments.prompt == "-" else call.arguments.prompt
    with quiet_progress(verbose=call.arguments.verbose) as show:
        online = open_online(call.given, show, call.env, usage=UsageContext.COMMAND_LINE)
    try:
        asyncio.run(_complete(online.frontend, prompt, sampling(call.arguments, online.frontend)[0]))
        return 0
    finally:
        online.close()


async def _complete(frontend: Frontend, prompt: str, params: SamplingParams) -> None:
    await frontend.engine.start()
    try:
        stream = frontend.engine.generate(await frontend.renderer.atext(prompt), params)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                sys.stdout.write(output.outputs[0].text)
                sys.stdout.flush()
        sys.stdout.write("\n")
    finally:
        await frontend.engine.stop()
