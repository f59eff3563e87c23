"""Every part frozen and killed, at every moment: what is noticed, what clients see, what is left (EXE-3, OPS-10, OPS-11,
TIR-10, TIR-13, F25, F30, F31).

`python -m tests.e2e.test_frozen_and_killed` prints the whole grid as a table.
"""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_engine_guards import folders
from tests.features.router.test_command import routing
from tests.support import checkpoints
from tests.support.disagg import children, signal_all
from tests.support.http_server import wait_until
from tests.support.live import live, spawn
from tests.support.odd_connector import FOLDER, PATH
from tests.support.ports import free_port
from tests.support.redis_server import SERVER, redis_server
from tests.support.witness import REFUSED, RIGHT, Probe, Witness

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [
    "--dtype", "float32", "--num-threads", "1", "--num-kv-blocks", "4096", "--block-size", "16",
    "--max-num-batched-tokens", "256",
]  # fmt: skip
HANG_S = 5  # --hang-timeout-s
RED_S = 10.0  # in which health must be red, beside busy neighbours; alone it takes 2
ROUTER_RED_S = 20.0  # the same of a router: two checks that fail, each of up to 2 s; alone 6
END_S = 60.0  # in which everybody has an answer
MOMENTS = ("idle", "prompt", "decode")
STOP, STOP_CONT, KILL = "SIGSTOP", "SIGSTOP, SIGCONT", "SIGKILL"
HANG, HANG_CONT, RAISE = "hangs", "hangs, goes on", "raises"


def ids(start, count):
    """A prompt that shares nothing with those of another start."""
    return [5 + (start * 37 + i * 7 + i * i % 11) % 90 for i in range(count)]


LONG = {"prompt": ids(1, 9000), "max_tokens": 4}  # seconds of prefill
TALK = {"prompt": [5, 6, 7], "max_tokens": 9000}  # seconds of decode
SHORT = {"prompt": ids(2, 40), "max_tokens": 8}
KEPT = {"prompt": ids(3, 2000), "max_tokens": 8}  # what tiers hold


@dataclass(frozen=True)
class Row:
    """One case, as the table has it."""

    part: str
    how: str
    moment: str
    red: str  # seconds until health said so
    during: str  # what those who were there saw
    after: str  # what those who came then saw
    left: str


HEAD = Row("part", "how", "when", "/health red after", "clients there", "clients after", "left")


def count(witnesses):
    """What several saw, in a few words."""
    seen = Counter(one.saw for one in witnesses)
    return ", ".join(f"{n} × {saw}" for saw, n in sorted(seen.items())) or "-"


def model():
    return checkpoints.tiny_llama(max_position_embeddings=32768)


class Crowd:
    """Asks a server, and knows what it must say.

    Owns: the right texts and how many prompts were asked.
    """

    def __init__(self):
        self.texts, self.asked = {}, 0
        with live(model(), num_threads=1, num_kv_blocks=4096, max_num_batched_tokens=256) as server:
            for body in (LONG, TALK, SHORT, KEPT):
                self.texts[id(body)] = server.text(ignore_eos=True, **body)

    def ask(self, url, body, *, stream, salt=None):
        """One client; nobody has its prompt in a cache unless the salt says so."""
        self.asked += 1
        salt = salt or f"{os.getpid()}-{self.asked}"
        return Witness(url, {**body, "stream": stream, "cache_salt": salt}, self.texts[id(body)], END_S)

    def gather(self, url, moment, servers=1):
        """Those who are there at this moment: one with a stream and one without for each server."""
        if moment == "idle":
            return []
        body = LONG if moment == "prompt" else TALK
        there = [self.ask(url, body, stream=stream) for stream in (True, False) for _ in range(servers)]
        if moment == "decode":
            assert all(one.first.wait(END_S) for one in there[:servers])
        else:
            time.sleep(0.5)
        assert not any(one.whole or one.error for one in there), "the moment has passed"
        assert moment == "decode" or not any(one.text for one in there)
        return there


@pytest.fixture(scope="module")
def crowd():
    return Crowd()


@pytest.fixture(scope="module")
def rows():
    """The table, printed at the end."""
    made = []
    yield made
    sys.stdout.write(table(made))


def table(rows):
    head, *body = ["| " + " | ".join(astuple(row)) + " |\n" for row in (HEAD, *rows)]
    return f"\n{head}{'|---' * len(astuple(HEAD))}|\n{''.join(body)}"


# ---- the engine's process, and threads in it ----


@contextlib.contextmanager
def serving(folder, *options):
    env = {"PYTHONPATH": str(ROOT), FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
    with spawn(str(model()), *OPTIONS, *options, env=env) as server:
        yield server, children(server.process.pid)[0]


def file_of(how, moment):
    """The file that makes a thread misbehave: between steps it is the loop's, in a step the worker's."""
    return ("raise" if how == RAISE else "hang") + ("-loop" if moment == "idle" else "")


def engine_case(crowd, part, how, moment, folder):
    """The engine's process, or a thread of it."""
    with serving(folder, "--kv-connector", PATH, "--hang-timeout-s", str(HANG_S)) as (server, engine):
        sockets, probe = folders(server.process.pid), Probe(server.url)
        there = crowd.gather(server.url, moment)
        began_s = time.monotonic()
        trouble = folder / file_of(how, moment)
        if part == "worker thread":
            trouble.touch()
            if moment == "idle":  # a word that the loop wakes up for
                threading.Thread(target=nudge, args=(server.url,), daemon=True).start()
        else:
            os.kill(engine, signal.SIGKILL if how == KILL else signal.SIGSTOP)
        red_s = probe.since(began_s, RED_S)
        late = [crowd.ask(server.url, SHORT, stream=stream) for stream in (True, False)]
        if how in (STOP_CONT, HANG_CONT):
            trouble.unlink(missing_ok=True)
            os.kill(engine, signal.SIGCONT)
            left = goes_on(server, probe, there + late)
        else:
            left = is_gone(server, engine, sockets, there + late)
        told = probe.end()
        assert told <= {200, 503, 0}, told
        return Row(part, how, moment, f"{red_s:.1f} s", count(there), count(late), left)


def nudge(url):
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/reset_prefix_cache", timeout=END_S)


def goes_on(server, probe, clients):
    """Health is green again, everybody has the whole text and nothing is parked."""
    green_s = probe.since(time.monotonic(), RED_S, green=True)
    assert {one.end().saw for one in clients} <= {RIGHT}, count(clients)
    server.wait_metrics(20.0, requests_running=0.0, requests_waiting=0.0, kv_blocks_used=0.0)
    return f"nothing parked, green after {green_s:.1f} s"


def is_gone(server, engine, sockets, clients):
    """Everybody was told, and the server has ended with 1 and left nothing."""
    began_s = time.monotonic()
    for one in clients:
        one.end()
    assert {one.saw for one in clients} <= {"engine_dead", REFUSED}, count(clients)
    assert server.process.wait(END_S) == 1
    assert not Path(f"/proc/{engine}").exists() and not any(folder.exists() for folder in sockets)
    return f"nothing; exit 1 after {time.monotonic() - began_s:.1f} s"


ENGINE = [
    (part, how, moment)
    for part, hows in (("engine process", (STOP_CONT, STOP, KILL)), ("worker thread", (HANG_CONT, HANG, RAISE)))
    for how in hows
    for moment in MOMENTS
]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "how", "moment"), ENGINE)
def test_an_engine_that_is_frozen_or_killed(crowd, rows, part, how, moment, tmp_path):
    """F30, F31, EXE-3: red within seconds; whoever waits gets the whole text or an error, and nothing is left."""
    rows.append(engine_case(crowd, part, how, moment, tmp_path))


# ---- what stands behind a tier ----


class Peer:
    """Another engine, whose host tier is read.

    Owns: the server, which may be started again.
    """

    def __init__(self):
        self.port = free_port()
        self.stack = contextlib.ExitStack()
        self.start()

    @property
    def address(self):
        return f"peer://127.0.0.1:{self.port}"

    def start(self):
        options = ["--kv-listen", f"127.0.0.1:{self.port}", "--kv-tier", "host?size=64MiB"]
        self.server = self.stack.enter_context(spawn(str(model()), *OPTIONS, *options, env={"OMP_NUM_THREADS": "1"}))

        (self.pid,) = children(self.server.process.pid)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        assert self.server.process.wait(30) == 1

    def fill(self, crowd, server, salt):
        """Have the tier hold this."""
        assert crowd.ask(self.server.url, KEPT, stream=False, salt=salt).end().saw == RIGHT

    @property
    def there(self):
        return self.server.process.poll() is None

    def close(self):
        self.stack.close()


class Redis:
    """A Redis server.

    Owns: the server, which may be started again.
    """

    def __init__(self):
        self.stack = contextlib.ExitStack()
        self.server = self.stack.enter_context(redis_server())
        self.address, self.start, self.kill = self.server.address, self.server.start, self.server.kill

    @property
    def pid(self):
        return self.server.process.pid

    @property
    def there(self):
        return self.server.process.poll() is None

    def fill(self, crowd, server, salt):
        """Have the tier hold this."""
        assert crowd.ask(server.url, KEPT, stream=False, salt=salt).end().saw == RIGHT
        wait_until(lambda: settled(server), 20)
        forget(server)

    def close(self):
        self.stack.close()


UNDER_WAY = ("lookup_jobs", "promotion_jobs", "cascade_jobs", "overdue_jobs", "pinned_blocks", "detached_blocks")


def under_way(server):
    """What the tiers' figures say is not over."""
    now = server.metrics()
    found = {name: now.get(f"octavo_kv_tier_{name}", 0.0) for name in UNDER_WAY}
    found |= {name: now[f"octavo_{name}"] for name in ("requests_running", "requests_waiting")}
    return {name: int(value) for name, value in found.items() if value}


def settled(server):
    return not under_way(server)


def forget(server):
    """Nothing is in the cache or in host memory any more."""
    assert server.http.post("/reset_prefix_cache").status_code == 200


def comes_back(crowd, tier, server):
    """Seconds until the tier gives again."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + END_S:
        crowd.asked += 1
        salt = f"again-{crowd.asked}"
        tier.fill(crowd, server, salt)
        again = crowd.ask(server.url, KEPT, stream=False, salt=salt).end()
        assert again.saw == RIGHT
        if set(again.source) & {"redis", "peer"}:
            return time.monotonic() - began_s
        time.sleep(0.5)
    raise AssertionError("the tier does not come back")


@contextlib.contextmanager
def tiered(kind):
    """An engine over such a tier: one for all its cases, since it must outlive them."""
    with contextlib.ExitStack() as stack:
        tier = Redis() if kind == "redis" else Peer()
        stack.callback(tier.close)
        options = ["--kv-tier", "host?size=64MiB", "--kv-tier", tier.address]
        server, _ = stack.enter_context(serving("/nonexistent", *options))
        yield kind, tier, server


def tier_case(crowd, rig, how, moment):
    """What stands behind a tier: the engine stays well, and texts right."""
    kind, tier, server = rig
    salt = f"{how}-{moment}"
    comes_back(crowd, tier, server)
    tier.fill(crowd, server, salt)
    probe = Probe(server.url)
    there = crowd.gather(server.url, moment)
    there += [crowd.ask(server.url, KEPT, stream=True, salt=salt)] if moment != "idle" else []
    try:
        tier.kill() if how == KILL else os.kill(tier.pid, signal.SIGSTOP)
        late = [
            crowd.ask(server.url, body, stream=stream, salt=of)
            for stream in (True, False)
            for body, of in ((KEPT, salt), (SHORT, None))
        ]
        assert {one.end().saw for one in there + late} == {RIGHT}, count(there + late)
        assert wait_until(lambda: settled(server), 30), under_way(server)
        assert probe.end() == {200}
    finally:
        if tier.there:
            os.kill(tier.pid, signal.SIGCONT)
        else:
            tier.start()
    back_s = comes_back(crowd, tier, server)
    slowest_s = max(one.took_s for one in late)
    left = f"nothing parked or pinned; gives again after {back_s:.1f} s"
    return Row(f"{kind} tier", how, moment, "green", count(there), f"{count(late)}, {slowest_s:.1f} s", left)


OTHERS = [(how, moment) for how in (STOP, KILL) for moment in MOMENTS]


@pytest.fixture(scope="module", params=["redis", "peer"])
def rig(request):
    if request.param == "redis":
        pytest.importorskip("redis", reason="the package redis is not installed")
        if SERVER is None:
            pytest.skip("neither redis-server nor valkey-server is installed")
    with tiered(request.param) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(("how", "moment"), OTHERS)
def test_what_stands_behind_a_tier_is_frozen_or_killed(crowd, rows, rig, how, moment):
    """TIR-10, TIR-13: nobody but the tier is ill, every text is right, nothing stays pinned, and it comes back."""
    rows.append(tier_case(crowd, rig, how, moment))


# ---- a server behind a router ----


class Routed:
    """Two servers, whose ports stay theirs, and a router before them.

    Owns: the servers, each of which may be started again.
    """

    def __init__(self, stack):
        self.stack, self.servers = stack, {}
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.start, (free_port(), free_port())))
        urls = [server.url for server in self.servers.values()]
        self.url = stack.enter_context(routing("--plain", *urls, "--port", "0")).url

    def start(self, port):
        server, _ = self.stack.enter_context(serving("/nonexistent", "--port", str(port)))
        self.servers[server.url.removeprefix("http://")] = server

    def figure(self, name):
        """One of the router's figures, by server."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if line.startswith(f"octavo_router_{name}{{"):
                found[line.split('instance="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
        return found

    def wait_up(self, name, up, limit_s=30.0):
        assert wait_until(lambda: self.figure("instance_up")[name] == up, limit_s), self.figure("instance_up")

    def mend(self, name):
        """Have it there again."""
        if self.servers[name].process.poll() is None:
            signal_all(self.servers[name], signal.SIGCONT)
        else:
            self.start(name.rpartition(":")[2])
        self.wait_up(name, 1.0)


@contextlib.contextmanager
def two_routed():
    with contextlib.ExitStack() as stack:
        yield Routed(stack)


def router_case(crowd, fleet, how, moment):
    """One of two servers behind a router: the other one takes over."""
    probe, there = Probe(fleet.url), crowd.gather(fleet.url, moment, servers=2)
    name = there[0].instance if moment == "decode" else next(iter(fleet.servers))  # where a stream has begun
    first = fleet.servers[name]
    (engine,) = children(first.process.pid)
    began_s = time.monotonic()
    try:
        first.process.kill() if how == KILL else signal_all(first, signal.SIGSTOP)
        late = [crowd.ask(fleet.url, SHORT, stream=stream) for stream in (True, False) for _ in range(2)]
        fleet.wait_up(name, 0.0, ROUTER_RED_S)
        red_s = time.monotonic() - began_s
        for one in there + late:
            one.end()
        check_routed(there, late, name)
        assert wait_until(lambda: not any(fleet.figure("instance_in_flight").values()), 20)
        assert how != KILL or wait_until(lambda: not Path(f"/proc/{engine}").exists(), 30), "its engine is left"
    finally:
        began_s = time.monotonic()
        fleet.mend(name)
        back_s = time.monotonic() - began_s
    for server in fleet.servers.values():
        server.wait_metrics(20.0, requests_running=0.0, requests_waiting=0.0, kv_blocks_used=0.0)
    assert probe.end() == {200}, "the other server is there all the time"
    slowest_s = max(one.took_s for one in late)
    left = f"nothing under way; {'restarted' if how == KILL else 'taken back'} in {back_s:.1f} s"
    return Row("router's upstream", how, moment, f"green; the router knows after {red_s:.1f} s", count(there),
               f"{count(late)}, {slowest_s:.1f} s", left)  # fmt: skip


def check_routed(there, late, name):
    """Only a stream that had begun there is told of it."""
    assert {one.saw for one in late} == {RIGHT}, count(late)
    broken = [one for one in there if one.body["stream"] and one.instance == name and one.text]
    assert {one.saw for one in broken} <= {"request_failed"}, count(broken)
    assert {one.saw for one in there if one not in broken} <= {RIGHT}, count(there)
    if there and there[0].body["max_tokens"] == TALK["max_tokens"]:
        assert broken  # one, or both where the router sent both to the server that had their prompt


@pytest.fixture(scope="module")
def fleet():
    with two_routed() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(("how", "moment"), OTHERS)
def test_a_server_behind_a_router_is_frozen_or_killed(crowd, rows, fleet, how, moment):
    """F25, F30: those whose answer had not begun get it from the other one; a stream that had ends with an error."""
    rows.append(router_case(crowd, fleet, how, moment))


def _report():
    """Run the grid and print it; a case that fails has its error in its row."""
    crowd, made = Crowd(), []

    def note(run, *case):
        try:
            made.append(run(crowd, *case))
        except AssertionError as error:
            words = [str(each) for each in case if isinstance(each, str)]
            where = traceback.extract_tb(error.__traceback__)[-1]
            made.append(Row(run.__name__, *words[-2:], "FAILED", f"{where.lineno}: {where.line} {error}"[:200], "", ""))
        sys.stderr.write(f"{made[-1]}\n")

    for case in ENGINE:
        with tempfile.TemporaryDirectory() as folder:
            note(engine_case, *case, Path(folder))
    for kind in ("redis", "peer"):
        with tiered(kind) as rig:
            for case in OTHERS:
                note(tier_case, rig, *case)
    with two_routed() as fleet:
        for case in OTHERS:
            note(router_case, fleet, *case)
    sys.stdout.write(table(made))


if __name__ == "__main__":
    _report()
