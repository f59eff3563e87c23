"""`octavo run`: fetch a model unless it is here, then talk to it as `octavo chat` does.

Promises: with a prompt, one answer on standard output and the end; without, a conversation.
Does not know: how to talk (see `chat`).
"""

import sys

from octavo.base.errors import UsageError
from octavo.config.names import EMBEDDED_NAME
from octavo.config.pull import pull_model
from octavo.entrypoints.commands import chat
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.console import progress


def run(call: Call) -> int:
    """Pull, then chat."""
    args = call.arguments
    prompt = " ".join(args.prompt)
    if prompt and args.message is not None:
        raise UsageError("the prompt is given twice: after the model, and with --message; keep one.")
    pull_model(call.given.values.get("model") or EMBEDDED_NAME, call.env, progress())
    if prompt:
        args.message = sys.stdin.read() if prompt == "-" else prompt
    return chat.run(call)
