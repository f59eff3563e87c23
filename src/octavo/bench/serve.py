"""A server to measure: one that runs already, or `octavo serve` started here and stopped by its process id.

Promises: what was started is stopped when the block ends, and only that; the moments of its log lines are kept.
Does not know: what is asked of it.
"""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.base.errors import ServerError
from octavo.base.interpreter import module_command
from octavo.bench.answers import message_of
from octavo.bench.connections import HttpAddress
from octavo.bench.load import LoadResult, LoadTarget, in_loop, run
from octavo.bench.workloads import Item, Workload

ASK_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
START_TIMEOUT_S = 1800.0
LOG_LINES_SHOWN = 5
HEALTH_PERIOD_S = 0.005
STARTING_PERIOD_S = 0.2
STARTING = "starting"  # the code of the error of a server that is not ready yet
_READY = re.compile(r"ready at (http://\S+)/v1 \(model (.*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedServer:
    """A server that runs: where, under which name, and what it said when (seconds after its command was run).

    `ended()` is None while it runs, then its exit code and its last words.
    """

    url: str
    model: str
    pid: int
    ready_s: float
    lines: tuple[tuple[float, str], ...]
    ended: Callable[[], str | None]


class _Log:
    """Reads a process's standard error in a thread.

    Owns: all lines up to the one that says the server is ready, and the last few after it.
    """

    def __init__(self, process: "subprocess.Popen[str]", start_s: float, clock: Callable[[], float]) -> None:
        self._process, self._start_s, self._clock = process, start_s, clock
        self.lines: list[tuple[float, str]] = []
        self.latest: deque[tuple[float, str]] = deque(maxlen=LOG_LINES_SHOWN)
        self.ready: re.Match[str] | None = None
        self.decided = threading.Event()
        self._thread = threading.Thread(target=self._read, name="server-log", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the log's end."""
        self._thread.join(5)

    def _read(self) -> None:
        for line in self._process.stderr or ():
            stamped = (self._clock() - self._start_s, line.rstrip("\n"))
            if self.decided.is_set():
                self.latest.append(stamped)
                continue
            self.lines.append(stamped)
            if found := _READY.search(line):
                self.ready = found
                self.decided.set()
        self.decided.set()


@contextlib.contextmanager
def started(
    arguments: Sequence[str], *, timeout_s: float = START_TIMEOUT_S, clock: Callable[[], float] = time.perf_counter
) -> Iterator[StartedServer]:
    """Run `octavo serve ARGUMENTS` on a free port, unless they name one, until the block ends.

    Raises `ServerError` with the end of its log when it does not get ready.
    """
    port = [] if any(a == "--port" or a.startswith("--port=") for a in arguments) else ["--port", "0"]
    command = module_command("octavo.entrypoints.cli", "serve", *arguments, *port)
    start_s = clock()
    # In a session of its own: Ctrl-C reaches the measuring process alone, which then stops the server.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    log = _Log(process, start_s, clock)
    try:
        in_time = log.decided.wait(timeout_s)
        if log.ready is None:
            why = "ended before it was ready" if in_time else f"was not ready within {timeout_s:g} s"
            raise ServerError(f"the server {why}: {_tail(log.lines)}")
        _wait_healthy(log.ready[1], process, start_s + timeout_s, clock)
        ready_s = clock() - start_s
        yield StartedServer(
            url=log.ready[1],
            model=log.ready[2],
            pid=process.pid,
            ready_s=ready_s,
            lines=tuple(log.lines),
            ended=lambda: None if process.poll() is None else f"code {process.returncode}: {_tail(log.latest)}",
        )
    finally:
        _stop(process)
        log.join()
        if process.stderr:
            process.stderr.close()


def _wait_healthy(url: str, process: "subprocess.Popen[str]", until_s: float, clock: Callable[[], float]) -> None:
    """Until the server answers that it is well: its log may say so a moment before."""
    address = HttpAddress(url)
    while process.poll() is None and clock() < until_s:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=ASK_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(HEALTH_PERIOD_S)
    raise ServerError(f"the server at {url} said that it is ready, but does not answer")


def _tail(lines: Sequence[tuple[float, str]]) -> str:
    return " | ".join(text for _, text in list(lines)[-LOG_LINES_SHOWN:]) or "it said nothing"


def _stop(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_started(base_url: str, say: Callable[[str], None], *, timeout_s: float = START_TIMEOUT_S) -> None:
    """Until a server does not say any more that it is starting; at once where it says anything else, or is not there."""
    address, told, end_s = HttpAddress(base_url), False, time.monotonic() + timeout_s
    while words := _starting(address):
        if not told:
            say(f"waiting for {address.url}: {words}")
            told = True
        if time.monotonic() > end_s:
            raise ServerError(f"the server at {address.url} was not ready within {timeout_s:g} s: {words}")
        time.sleep(STARTING_PERIOD_S)


def _starting(address: HttpAddress) -> str | None:
    """What a server that is starting says."""
    kind = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", f"{address.path}/health")
        answer = connection.getresponse()
        if answer.status != http.client.SERVICE_UNAVAILABLE:
            return None
        value = json.loads(answer.read())
        return message_of(value) if value["error"]["code"] == STARTING else None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None  # whoever asks for more will hear what is wrong
    finally:
        connection.close()


def first_model(base_url: str, api_key: str | None = None) -> str:
    """The first model that a server lists. Raises `ServerError` when it does not answer."""
    address = HttpAddress(base_url)
    kind = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=ASK_TIMEOUT_S)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        connection.request("GET", f"{address.path}/v1/models", headers=headers)
        answer = connection.getresponse()
        value = json.loads(answer.read())
        if answer.status != http.client.OK:
            raise ServerError(f"{address.url}/v1/models answers HTTP {answer.status}: {message_of(value)}")
        return str(value["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ServerError(f"no answer from {address.url}: {reason}; is the server running?") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ServerError(f"{address.url}/v1/models does not list a model; name it with --model") from None
    finally:
        connection.close()


def measure(target: LoadTarget, work: Workload, warmups: Sequence[Item] = ()) -> LoadResult:
    """Send the warm-up's items first, one after the other and uncounted, then the workload."""

    async def both() -> LoadResult:
        if warmups:
            await run(target, warmup_of(work, warmups))
        return await run(target, work)

    return in_loop(both())


def warmup_of(work: Workload, items: Sequence[Item]) -> Workload:
    """A workload like this one with other items, one at a time."""
    return Workload(
        name="warm-up", items=tuple(items), concurrency=1, stream=work.stream, ignore_eos=work.ignore_eos,
        temperature=work.temperature, real_history=work.real_history,
    )  # fmt: skip
