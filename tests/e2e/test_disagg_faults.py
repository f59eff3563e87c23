"""PDX-13: whatever fails at whatever moment, each request ends with the right text or a plain error, and all blocks come
back. Real processes, signals and sockets; the network between the two engines stalls, cuts and flips bits."""

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support import checkpoints
from tests.support.disagg import OPTIONS, figures, prefill_only, signal_all
from tests.support.flaky_network import Wire
from tests.support.live import spawn
from tests.support.ports import free_port

LEASE_S = 2
ANSWER = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
PROMPTS = [[(seed * 37 + i * 31) % 400 + 10 for i in range(20 + seed * 7 % 160)] for seed in range(24)]
ENDS = {"right", "error", "server gone", "left", "nobody asked"}


class Engine:
    """A server that can be killed and started again at the same KV address.

    Owns: the process.
    """

    def __init__(self, *options):
        self.options = options
        self.lock = threading.Lock()
        self.up = threading.Event()
        self.stack = contextlib.ExitStack()
        self.start()

    def start(self):
        self.server = self.stack.enter_context(spawn(str(checkpoints.tiny_llama()), *OPTIONS, *self.options))
        self.up.set()

    def signal(self, sig):
        with self.lock:
            signal_all(self.server, sig)

    def restart(self):
        self.up.clear()
        self.signal(signal.SIGKILL)
        with self.lock:
            self.server.process.wait()
            self.stack.close()
            self.stack = contextlib.ExitStack()
            self.start()


class Faults(threading.Thread):
    """One fault after the other.

    Owns: what is broken at the moment; everything works again when it has ended.
    """

    def __init__(self, prefill, decode, wire, seed, kills):
        super().__init__(daemon=True)
        self.prefill, self.decode, self.wire = prefill, decode, wire
        self.random, self.kills, self.over = random.Random(seed), kills, threading.Event()
        self.done, self.failure = Counter(), None

    def run(self):
        try:
            while not self.over.wait(self.random.uniform(0.02, 0.3)):
                self.one()
            while self.kills:
                self.kill()
        except Exception as error:
            self.failure = error

    def one(self):
        fault = self.random.choice(("stall", "cut", "garble", "freeze", "freeze", "kill"))
        length = self.random.uniform(0.05, 0.8)
        if fault == "kill":
            if self.kills and self.random.random() < 0.3:
                self.kill()
            return
        self.done[fault] += 1
        if fault == "stall":
            self.wire.stall()
            self.over.wait(length * self.random.choice((1, 1, 5)))
            self.wire.flow()
        elif fault == "freeze":
            engine = self.random.choice((self.prefill, self.decode))
            engine.signal(signal.SIGSTOP)
            self.over.wait(length * self.random.choice((1, 1, 4)))
            engine.signal(signal.SIGCONT)
        else:
            setattr(self.wire, fault, 0.1)
            self.over.wait(length)
            setattr(self.wire, fault, 0.0)

    def kill(self):
        self.kills -= 1
        self.done["kill"] += 1
        self.random.choice((self.prefill, self.decode)).restart()


def one_request(number, prefill, decode, want, seed):
    """What a router does for one request, and what a client may do to it; how it ended."""
    chance = random.Random(seed * 100_003 + number)
    place = chance.randrange(len(PROMPTS))
    prompt = PROMPTS[place]
    assert prefill.up.wait(60) and decode.up.wait(60)
    try:
        hint = prefill_only(prefill.server, prompt, temperature=0)
        way = chance.choice(("plain", "plain", "plain", "plain", "stream", "leave", "forget", "twice"))
        if way == "forget":
            return "nobody asked"
        body = {"model": decode.server.model, "prompt": prompt, "kv_transfer_params": hint, **ANSWER}
        url = f"{decode.server.url}/v1/completions"
        if way == "leave":
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=httpx.Timeout(60, read=chance.uniform(0.001, 0.05)))
            return "left"
        for _ in range(2 if way == "twice" else 1):
            answer = httpx.post(url, json=body, timeout=90)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
                return "error"
            if (text := answer.json()["choices"][0]["text"]) != want[place]:
                return f"wrong: {text!r} for {want[place]!r}"
        return "right"
    except (httpx.HTTPError, AssertionError, OSError) as error:  # a server that was killed, seen by its client
        return "server gone" if not isinstance(error, AssertionError) or "status_code" not in str(error) else "error"


def play(count, kills, seed):
    port = free_port()
    wire = Wire(port, seed)
    lease = ("--kv-lease-s", str(LEASE_S))
    listen = ("--kv-listen", f"127.0.0.1:{port}")
    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        with spawn(str(checkpoints.tiny_llama()), *OPTIONS) as plain:
            want = [plain.text(prompt, **ANSWER) for prompt in PROMPTS]
        prefill = Engine(
            "--kv-role",
            "producer",
            *listen,
            "--kv-transport",
            "tcp",
            *lease,
            "--kv-advertise",
            f"127.0.0.1:{wire.port}",
        )
        stack.callback(lambda: prefill.stack.close())
        decode = Engine("--kv-role", "consumer", *lease)
        stack.callback(lambda: decode.stack.close())
        faults = Faults(prefill, decode, wire, seed, kills)
        faults.start()
        with ThreadPoolExecutor(8) as pool:
            ends = Counter(pool.map(lambda i: one_request(i, prefill, decode, want, seed), range(count)))
        faults.over.set()
        faults.join(120)
        assert not faults.is_alive() and faults.failure is None
        assert set(ends) <= ENDS, ends
        assert ends["right"] > count / 2, ends
        print(ends, faults.done, figures(decode.server))
        # Everything works again, and all blocks come back within a lease.
        assert (
            decode.server.text(PROMPTS[0], kv_transfer_params=prefill_only(prefill.server, PROMPTS[0]), **ANSWER)
            == want[0]
        )
        end = time.monotonic() + 70
        while True:
            used = [each.server.metrics()["octavo_kv_blocks_used"] for each in (prefill, decode)]
            if used == [0, 0] and figures(prefill.server)["leases"] == 0 and figures(decode.server)["watched"] == 0:
                return ends
            assert time.monotonic() < end, (used, figures(prefill.server), figures(decode.server))
            time.sleep(0.1)


def test_requests_end_well_while_everything_fails():
    play(150, kills=1, seed=1)


@pytest.mark.slow
def test_a_thousand_requests_end_well_while_everything_fails():
    assert sum(play(1000, kills=12, seed=2).values()) == 1000
