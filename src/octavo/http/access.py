"""One line in the log for each request: who asked for what, how it ended, and what it cost (OPS-3).

Promises: one line a request, whatever a client sends; no key, query, header or content in it; probes are told at level
debug only.
Does not know: routes, or what an answer says.
"""

import logging
import re
import time
from collections.abc import Callable
from typing import Final

from starlette.types import Message, Scope

from octavo.base.outputs import RequestOutput

logger = logging.getLogger(__name__)

PROBES: Final = frozenset({"/health", "/ping", "/ready", "/metrics"})
CLIENT_GONE: Final = 499  # what proxies log when nobody is left to answer
MAX_PATH_CHARS: Final = 200
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:@/+=-]+\Z")


class Access:
    """What becomes known of one request while it is served. Generating routes find it in the request's state.

    Owns: its fields.
    """

    __slots__ = ("_begun_s", "_clock", "_first_body_s", "_tokens", "_where", "first_token_s", "name", "status")

    def __init__(self, scope: Scope, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._first_body_s: float | None = None
        self._tokens: dict[int, tuple[int, int]] = {}
        path = scope.get("raw_path") or scope["path"].encode()  # still percent-encoded, and without the query
        host, port = scope.get("client") or ("-", 0)
        self._where = (
            f'{host}:{port} "{scope["method"]} {path[:MAX_PATH_CHARS].decode("latin-1").replace(chr(34), "%22")}"'
        )
        self.name = name
        self.status = CLIENT_GONE
        self.first_token_s: float | None = None  # after the request came, by the engine's clock

    def note(self, index: int, out: RequestOutput) -> None:
        """Take what `out` says of prompt `index`."""
        self._tokens[index] = (len(out.prompt_token_ids), out.num_output_tokens)
        times = out.times
        if self.first_token_s is None and times is not None and times.first_token_s:
            self.first_token_s = times.first_token_s - times.arrived_s

    def sent(self, message: Message) -> None:
        """Something leaves for the client."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self._first_body_s is None and message.get("body"):
            self._first_body_s = self._clock() - self._begun_s

    def line(self) -> str:
        """All of it."""
        now_s = self._clock() - self._begun_s
        tokens, first = "", self.first_token_s
        if self._tokens:
            prompt, answer = (sum(column) for column in zip(*self._tokens.values(), strict=True))
            tokens = f" prompt {prompt}, completion {answer},"
        if first is None:
            first = self._first_body_s
        begins = (
            "" if first is None else f" first {'token' if self.first_token_s is not None else 'byte'} {first:.3f} s,"
        )
        name = self.name if _PLAIN.match(self.name) else repr(self.name)
        return f"{name} {self._where} {self.status}{tokens}{begins} {now_s:.3f} s"


def tell(access: Access, scope: Scope) -> None:
    """Log the line; of a probe only for those who debug."""
    level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "%s", access.line())
