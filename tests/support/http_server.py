"""A real uvicorn server in a thread, for tests that talk HTTP.

Promises: `serve_app` yields the base URL of a server on 127.0.0.1 with a free port, and the server and its
thread are gone when the block ends.
Does not know: what the application does.
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from octavo.http.connection import BoundedProtocol

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
Step = Callable[[], Awaitable[Any]]


@contextmanager
def serve_app(
    app: Any, *, before: Step | None = None, after: Step | None = None, grace_s: int = 2, loop: str = "auto"
) -> Iterator[str]:
    """Serve an ASGI application; yields `http://127.0.0.1:PORT`.

    `before` and `after` run on the server's event loop, around serving (start and stop an engine there).
    At the end, requests that still run get `grace_s` seconds.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=grace_s,
        lifespan="on",
        loop=loop,
    )
    server = uvicorn.Server(config)
    failures: list[BaseException] = []

    async def run() -> None:
        if before is not None:
            await before()
        try:
            await server.serve(sockets=[listener])
        finally:
            if after is not None:
                await after()

    def main() -> None:
        try:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(run())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=main, name="http-server", daemon=True)
    thread.start()
    try:
        _wait_until(lambda: server.started or not thread.is_alive(), START_TIMEOUT_S)
        if failures:
            raise RuntimeError("the test server did not start") from failures[0]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(STOP_TIMEOUT_S)
        listener.close()
    if thread.is_alive():
        raise RuntimeError("the test server did not stop")
    if failures:
        raise RuntimeError("the test server failed") from failures[0]


def _wait_until(done: Callable[[], bool], timeout_s: float) -> None:
    pause = threading.Event()
    waited = 0.0
    while not done():
        if waited > timeout_s:
            raise TimeoutError("the test server did not start in time")
        pause.wait(0.01)
        waited += 0.01


def wait_until(done: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Poll a condition; False when it did not become true in time."""
    try:
        _wait_until(done, timeout_s)
    except TimeoutError:
        return False
    return True
