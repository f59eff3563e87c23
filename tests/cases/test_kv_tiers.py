"""Store and load races never corrupt answers, and no hit crosses a salt: OFF-01."""

import queue
import random
import re
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from octavo.features.transfer.control import search
from octavo.features.transfer.data import agent, tier_threads, worker_thread
from tests.support import checkpoints
from tests.support.clients import together
from tests.support.live import live

BLOCK = 16
DELAY_S = 0.02
AT_ONCE = 8


DELAYED: set[str] = set()  # names of threads that had something to do, late


class SlowLane(worker_thread.WorkerThread):
    """A lane whose jobs begin up to 20 ms late. Owns: its chance."""

    def __init__(self, name):
        self._name = name
        self._chance = random.Random(name)
        super().__init__(name)

    def put(self, job):
        DELAYED.add(self._name)
        delay_s = self._chance.uniform(0, DELAY_S)
        super().put(lambda: (time.sleep(delay_s), job()))


class SlowTeam(tier_threads.Team):
    """A tier's threads whose work begins up to 20 ms late. Owns: its chance."""

    def __init__(self, name, tiers):
        self._chance = random.Random(name)
        super().__init__(name, tiers)

    def put(self, work):
        DELAYED.add(self._name)
        delay_s = self._chance.uniform(0, DELAY_S)
        return super().put(lambda tier: (time.sleep(delay_s), work(tier)))


TIERS = frozenset({"octavo-kv-file-find", "octavo-kv-file-write"})  # not every test needs to read files


@contextmanager
def slow_transfers(of=frozenset({"octavo-kv-loads"}) | TIERS):
    """Loads and all that tiers do take their time, which every thread of `of` shows; tiers are asked also where
    computing would be faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "WorkerThread", SlowLane)
        patch.setattr(tier_threads, "Team", SlowTeam)
        patch.setattr(search, "TRY_AGAIN", 1)
        DELAYED.clear()
        yield
        assert of <= DELAYED


def words(seed, count, low=10, high=400):
    return np.random.default_rng(seed).integers(low, high, count).tolist()


def ask(server, prompt, **body):
    """Token ids, and tokens by where they came from."""
    more = {"return_token_ids": True, "ignore_eos": True, **body}
    answer = server.complete(prompt, **more)
    details = answer["usage"]["prompt_tokens_details"]
    sources = details.get("cached_tokens_by_source") or {}
    return answer["choices"][0]["token_ids"], {**sources, "any": details["cached_tokens"]}


def converse(server, conversations, turns, first, later, max_tokens, high):
    """What each turn of each conversation was answered, eight at once; all begin before any goes on."""
    prompts = [words(number, first, high=high) for number in range(conversations)]
    answers = [[] for _ in prompts]
    for turn in range(turns):
        waiting = queue.SimpleQueue()
        for number in range(conversations):
            waiting.put(number)

        def work(waiting=waiting, turn=turn):
            while True:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                ids, _ = ask(server, prompts[number], max_tokens=max_tokens)
                answers[number].append(ids)
                prompts[number] = [*prompts[number], *ids, *words(1000 * turn + number, later, high=high)]

        together([work] * AT_ONCE, timeout_s=1200)
    return answers


def hits(server):
    """Hits by tier, from the metrics."""
    text = server.http.get("/metrics").text
    found = re.findall(r'^octavo_kv_tier_hits_total\{.*tier="([^"]*)".*\} (\S+)$', text, re.MULTILINE)
    return {tier: float(value) for tier, value in found}


def races(path, folder, block_bytes, *, high, max_tokens, **options):
    """With tiers and without, forty conversations of four turns are answered alike."""
    options = {"block_size": BLOCK, "num_threads": 1, "max_model_len": 512, "max_num_seqs": AT_ONCE, **options}
    talk = {"conversations": 40, "turns": 4, "first": 90, "later": 30, "max_tokens": max_tokens, "high": high}
    with live(path, num_kv_blocks=2000, **options) as server:
        plain = converse(server, **talk)
    tiers = (f"host?size={200 * block_bytes}", f"file://{folder}")
    with slow_transfers(), live(path, num_kv_blocks=40, kv_tier=tiers, **options) as server:
        found = converse(server, **talk)
        by_tier = hits(server)
        sample = server.metrics()
    wrong = [(n, turn) for n in range(40) for turn in range(4) if found[n][turn] != plain[n][turn]]
    assert wrong == []
    assert by_tier["host"] > 100 and by_tier[f"file://{folder}"] > 100
    assert sample["octavo_kv_tier_evicted_blocks_total"] > 100 and sample["octavo_kv_tier_failed_reads_total"] == 0
    assert sample["octavo_kv_tier_capacity_blocks"] == 200


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["one step", "two steps in flight"])
def test_off01_forty_conversations_are_answered_as_without_tiers(tmp_path, options):
    layers, heads, width = 2, 2, 16
    block_bytes = layers * 2 * heads * width * BLOCK * 4
    races(checkpoints.tiny_llama(), tmp_path, block_bytes, high=400, max_tokens=8, **options)


@pytest.mark.slow
def test_off01_forty_conversations_with_a_real_model(chat_path, tmp_path):
    layers, heads, width = 30, 3, 64
    block_bytes = layers * 2 * heads * width * BLOCK * 4
    races(chat_path, tmp_path, block_bytes, high=40_000, max_tokens=16, num_threads=2)


# ---- salts ------------------------------------------------------------------------------------

SALTS = (None, "one", "two")
RUNS = {
    "no prefix cache": (False, {"enable_prefix_caching": False}),
    "tiers": (True, {}),
    "tiers, chunks of 24": (True, {"max_num_batched_tokens": 24}),
    "tiers, two steps in flight": (True, {"async_scheduling": True}),
    "tiers, chunks and two steps": (True, {"max_num_batched_tokens": 24, "async_scheduling": True}),
}
MODELS = {
    "llama": checkpoints.tiny_llama,
    "sliding": checkpoints.tiny_swa,
    "sliding and full": lambda: checkpoints.tiny_swa(mixed=True),
}


@pytest.fixture(scope="module", params=MODELS)
def truth(request):
    """A model, and its answers without any of it."""
    path = MODELS[request.param]()
    with live(path, num_threads=1, block_size=BLOCK, num_kv_blocks=500, enable_prefix_caching=False) as server:
        yield path, [ask(server, words(number, 200), max_tokens=8)[0] for number in range(3)]


ALONE = ("tiers, chunks of 24", "tiers, two steps in flight")  # beside the run that has both


@pytest.mark.parametrize("run", [pytest.param(run, marks=[pytest.mark.slow] * (run in ALONE)) for run in RUNS])
def test_off01_a_salt_s_blocks_are_its_own_in_every_tier(truth, run, tmp_path):
    """The same prompts under two salts and none, asked again after they were evicted, and after a restart."""
    path, answers = truth
    has_tiers, options = RUNS[run]
    if has_tiers:
        options = {**options, "kv_tier": ("host?size=4MiB", f"file://{tmp_path}")}
    options = {"block_size": BLOCK, "num_threads": 1, "max_model_len": 256, "num_kv_blocks": 60, **options}

    def round_of(server, salt):
        body = {} if salt is None else {"cache_salt": salt}
        out = []
        for number in range(3):
            ids, sources = ask(server, words(number, 200), max_tokens=8, **body)
            assert ids == answers[number]
            out.append(sources)
        return out

    with slow_transfers(*[] if has_tiers else [frozenset()]):
        with live(path, **options) as server:
            for salt in SALTS:  # each evicts what the one before had on the device
                assert all(sources == {"any": 0} for sources in round_of(server, salt)), "nothing of another salt"
            again = [sources for salt in SALTS for sources in round_of(server, salt)]
        if not has_tiers:
            assert all(sources == {"any": 0} for sources in again)
            return
        assert sum("host" in sources for sources in again) >= 6
        with live(path, **options) as server:
            assert all(sources == {"any": 0} for sources in round_of(server, "three"))
            assert any("file" in sources for salt in SALTS for sources in round_of(server, salt))


@pytest.mark.parametrize(
    "more", [{}, {"async_scheduling": True, "max_num_batched_tokens": 48}], ids=["one step", "chunks and two steps"]
)
def test_off01_stores_and_loads_of_one_prefix_by_many_at_once(tmp_path, more):
    """Eight clients ask for prompts that begin alike, while blocks come and go."""
    path = checkpoints.tiny_llama()
    options = {"block_size": BLOCK, "num_threads": 1, "max_model_len": 256, "max_num_seqs": AT_ONCE, **more}
    shared = words(1, 100)
    prompts = [[*shared, *words(50 + number, 20 + 16 * (number % 5))] for number in range(24)]
    with live(path, num_kv_blocks=1000, **options) as server:
        plain = [ask(server, prompt, max_tokens=6)[0] for prompt in prompts]
    tiers = ("host?size=160KiB", f"file://{tmp_path}?policy=request")
    found, lock = {}, threading.Lock()
    with slow_transfers(), live(path, num_kv_blocks=40, kv_tier=tiers, **options) as server:

        def work(seed):
            order = list(range(len(prompts)))
            random.Random(seed).shuffle(order)
            for number in order:
                ids, _ = ask(server, prompts[number], max_tokens=6)
                with lock:
                    found.setdefault(number, []).append(ids)

        together([lambda seed=seed: work(seed) for seed in range(AT_ONCE)])
        assert hits(server)["host"] > 0
    assert all(ids == plain[number] for number, answers in found.items() for ids in answers)
