"""HTTP connections with bounds: how large and how slow the head of a request may be.

Promises: a head that is too large is answered 431, one that does not end in time 408, what is no HTTP 400, and the
connection is closed; an offer to speak another protocol (Upgrade) is ignored, and its request answered; what is kept of it is bounded; who connects and says nothing, or goes on sending after the answer, is closed too.
Does not know: bodies that are read (see `body`), or applications.
"""

import asyncio
import re
from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.http.errors import HttpError, answer
from octavo.http.json import encode

MAX_HEAD_BYTES: Final = 64 << 10  # request line and headers together
MAX_HEADERS: Final = 256
HEAD_S: Final = 10.0  # how long a head may take, from the connection or from its first byte on
UNREAD_BODY_S: Final = 5.0  # how long a body that nobody wants may go on after the answer
_REASONS: Final = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
# An offer to speak another protocol, as Java's HTTP client makes with every request to a http:// address (h2c). It may be
# ignored, but the parser would take all behind the head for that protocol, and drop the body.
_OFFER: Final = re.compile(rb"(?<=\n)upgrade(?=:)", re.IGNORECASE)
_NO_OFFER: Final = b"x-offer"  # as long, so that nothing moves


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on the head of a request.

    Owns: where in a request it stands, how much of the head came, and the timer that ends what is too slow.
    """

    _in_head = True  # from the connection's start, or the end of a request, to the end of the next head
    _head_bytes = 0
    _num_heads = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; it has so long to send a request."""
        super().connection_made(transport)
        self._arm(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came: of a head, of a body, or of several requests."""
        while data and not self.transport.is_closing():
            if not self._in_head:
                super().data_received(data)
                return
            if self._timer is None:
                self._arm(HEAD_S)
            # What is parsed at once may hold the head's end and more; the bound holds if it ends within.
            piece, data = data[: MAX_HEAD_BYTES - self._head_bytes], data[MAX_HEAD_BYTES - self._head_bytes :]
            num_heads = self._num_heads
            self._head_bytes += len(piece)
            super().data_received(_without_offer(piece))
            if self._num_heads != num_heads:
                self._head_bytes = 0
            elif self._head_bytes >= MAX_HEAD_BYTES:
                self._refuse(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes", "head_too_large")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One more header."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(431, f"the request has more than {MAX_HEADERS} headers", "head_too_large")
            raise httptools.HttpParserError("too many headers")

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._in_head = False
        self._num_heads += 1
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body has ended: what comes now is the head of the next request."""
        self._in_head = True
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is out. If the body is still coming, nobody reads it, and it must end soon."""
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._arm(UNREAD_BODY_S)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP; nothing more is said where an answer was given already."""
        self._refuse(
            400, "what came is not a valid HTTP/1.1 request (this port speaks http, not https)", "invalid_http"
        )

    def _arm(self, after_s: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(after_s, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm(HEAD_S)  # an answer is under way: what comes behind the request waits
        elif self._in_head and self._head_bytes:
            self._refuse(408, f"the request's head did not end within {HEAD_S:g} s", "request_timeout")
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer in the shape of all errors, unless an answer is under way, and close."""
        self._disarm()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = encode(answer(HttpError(status, message, code=code)).body)
            head = (
                f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def _without_offer(piece: bytes) -> bytes:
    """A head's bytes, and what came with them, without the offer to speak another protocol."""
    end = piece.find(b"\r\n\r\n")
    head = piece if end == -1 else piece[:end]
    return _OFFER.sub(_NO_OFFER, head) + piece[len(head) :]
