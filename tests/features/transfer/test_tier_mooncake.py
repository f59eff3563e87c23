"""A Mooncake store, real and by shape: well, gone, frozen, restarted, full, and a client that hangs or dies (PDX-11)."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM
from octavo.base.errors import ConfigError
from octavo.features.transfer.address import parse_tier
from octavo.features.transfer.control import search
from octavo.features.transfer.data import agent, tier_mooncake
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.options import TransferOptions
from tests.features.transfer.test_offload import BASE, GREEDY, TURNS, run
from tests.support import checkpoints
from tests.support.fake_mooncake import lay
from tests.support.mooncake_store import WHY_NOT, mooncake_store

needs_store = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
LENGTH = 40_000
IDENTITY = {"model": "ours"}
ANYWHERE = "mooncake://127.0.0.1:1"
ROOT = Path(__file__).resolve().parents[3]


def key(number, group=0):
    return bytes([number]) * 32 + group.to_bytes(4, "big")


def chunk(number):
    row = np.zeros(LENGTH + 64, dtype=np.uint8)
    row[:LENGTH] = np.random.default_rng(number).integers(0, 256, LENGTH, dtype=np.uint8)
    return row


class Rig:
    """A tier and its clock."""

    def __init__(self, address=ANYWHERE, identity=IDENTITY):
        self.now = 0.0
        self.tier = tier_mooncake.make(
            parse_tier(address), Seal(identity, [LENGTH]), TierHealth("mooncake", clock=lambda: self.now)
        )

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        self.tier.close()

    def write(self, *numbers):
        return self.tier.write([key(n) for n in numbers], [chunk(n) for n in numbers])

    def read(self, *numbers):
        rows = [np.zeros(LENGTH + 64, dtype=np.uint8) for _ in numbers]
        good = self.tier.read([key(n) for n in numbers], rows)
        for number, row, fine in zip(numbers, rows, good, strict=True):
            assert (row == (chunk(number) if fine else 0)).all()
        return good

    def find(self, *numbers):
        return self.tier.find([key(n) for n in numbers])

    def until(self, what):
        """Ask again and again, as if time passed quickly, since a store takes a while to begin."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if what():
                return
            self.now += 10
            time.sleep(0.05)
        raise AssertionError("the store did not begin in a minute")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    folder = lay(tmp_path / "fake")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def running(folder):
    """Clients that have been started there and have not ended."""
    pids = [int(file.stem) for file in folder.glob("*.pid")]
    states = []
    for pid in pids:
        try:
            states.append((pid, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]))
        except OSError:
            continue
    return [pid for pid, state in states if state != "Z"]


def soon(what):
    end = time.monotonic() + 20
    while time.monotonic() < end and not what():
        time.sleep(0.05)
    return what()


# ---- by shape ----------------------------------------------------------------------------------


def test_pdx_11_what_was_written_is_found_and_models_are_apart(fake):
    with Rig() as one, Rig() as two, Rig(identity={"model": "theirs"}) as other:
        one.until(lambda: one.write(1, 2, 3) == [True] * 3)
        two.until(lambda: two.find(1, 9, 3) == [True, False, True])
        assert two.read(3, 9, 1) == [True, False, True]
        other.until(lambda: other.write(9) == [True])
        assert other.find(1) == [False] and other.read(1) == [False]
    assert soon(lambda: running(fake) == [])


@pytest.mark.parametrize(
    "damage", [lambda v: v[:-1], lambda v: v + b"x", lambda v: b"", lambda v: v[:-9] + bytes([v[-9] ^ 1]) + v[-8:], lambda v: b"\0" * len(v)]
)  # fmt: skip
def test_pdx_11_what_is_not_as_it_was_written_is_a_miss_and_is_removed(fake, damage):
    with Rig() as rig:
        rig.until(lambda: rig.write(1, 2) == [True] * 2)
        (file,) = fake.glob(f"octavo-*-{key(1).hex()}")
        file.write_bytes(damage(file.read_bytes()))
        assert rig.read(1, 2) == [False, True] and not file.exists()
        assert rig.write(1) == [True] and rig.read(1) == [True]


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_pdx_11_a_client_that_hangs_or_dies_is_a_miss_in_time_and_another_is_started(fake, how, monkeypatch, caplog):
    with Rig() as rig:
        rig.until(lambda: rig.write(1) == [True])
        first = running(fake)
        monkeypatch.setattr(tier_mooncake, "TIMEOUT_S", 0.3)
        (fake / f"get.{how}").touch()
        began = time.monotonic()
        assert rig.read(1, 2, 3) == [False] * 3 and rig.find(1) == [False]
        assert time.monotonic() - began < 3
        assert soon(lambda: not set(first) & set(running(fake)))
        (line,) = [record.getMessage() for record in caplog.records]
        assert "it is left alone" in line
        (fake / f"get.{how}").unlink()
        rig.until(lambda: rig.read(1) == [True])


def test_pdx_11_a_master_that_is_not_there_is_said_once_with_its_address(fake, caplog):
    (fake / "setup.code").write_text("-1")
    with Rig("mooncake://10.9.8.7:65") as rig:
        rig.until(lambda: not rig.find(1)[0] and caplog.records)
        for _ in range(3):
            rig.now += 10
            assert rig.read(1) == [False] and rig.write(1) == [False]
        assert "its master 10.9.8.7:65 does not answer" in caplog.records[0].getMessage()
        (fake / "setup.code").unlink()
        rig.now += 10
        rig.until(lambda: rig.write(1) == [True])


def test_pdx_11_a_machine_that_does_not_answer_makes_a_rest_and_keeps_the_client(fake, caplog):
    with Rig() as rig:
        rig.until(lambda: rig.write(1) == [True])
        first = running(fake)
        (fake / "get.code").write_text("-800")
        assert rig.read(1) == [False]
        (fake / "get.code").unlink()
        assert rig.read(1) == [False]  # left alone for a while
        rig.now += 10
        assert rig.read(1) == [True] and running(fake) == first
        assert "a machine of it does not answer; see whether mooncake_client runs" in caplog.records[0].getMessage()


def test_pdx_11_a_store_without_room_is_read_from_and_the_log_says_once_what_to_do(fake, caplog):
    with Rig() as rig:
        rig.until(lambda: rig.write(1) == [True])
        (fake / "put.code").write_text("-200")
        assert rig.write(2, 3) == [False] * 2 and rig.read(1) == [True]
        (line,) = [record.getMessage() for record in caplog.records]
        assert "no room" in line and "mooncake_client --global_segment_size" in line


def test_pdx_11_threads_share_a_client_that_is_killed_again_and_again(fake):
    seal, problems, done = Seal(IDENTITY, [LENGTH]), [], threading.Event()
    store = tier_mooncake.open_shared(parse_tier(ANYWHERE), seal)
    counts = [0] * 4

    def work(number):
        tier = tier_mooncake.make(parse_tier(ANYWHERE), seal, TierHealth("mooncake", rest_s=0.01), store)
        try:
            while not done.is_set():
                tier.write([key(number)], [chunk(number)])
                row = np.zeros(LENGTH + 64, dtype=np.uint8)
                if tier.read([key(number)], [row]) == [True]:
                    counts[number] += 1
                    assert (row == chunk(number)).all()
        except BaseException as problem:
            problems.append(problem)
        tier.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        before = list(counts)
        assert soon(lambda before=before: all(new > old for new, old in zip(counts, before, strict=True))) or problems
        for pid in running(fake):
            os.kill(pid, signal.SIGKILL)
    done.set()
    for thread in threads:
        thread.join(60)
    assert problems == [] and soon(lambda: running(fake) == [])


def test_pdx_11_the_client_ends_with_an_engine_that_is_killed(fake):
    code = (
        "import os, signal, time\n"
        "from tests.features.transfer.test_tier_mooncake import Rig\n"
        "rig = Rig()\n"
        "rig.until(lambda: rig.write(1) == [True])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{fake}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert list(fake.glob("*.pid")) and soon(lambda: running(fake) == [])


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("raise ModuleNotFoundError(\"No module named 'mooncake'\")", "needs the package mooncake-transfer-engine-non-cuda: .* install"),
        ("raise ImportError('libibverbs.so.1: cannot open shared object file')", "libibverbs.so.1: cannot open.*; install the system's package libibverbs1"),
        ("import os; os._exit(3)", "cannot be loaded here .exit code 3."),
    ],
)  # fmt: skip
def test_pdx_11_without_a_package_that_works_nothing_starts_and_it_says_what_to_install(store, said, fake):
    """PDX-11: said when the parts of a worker are made, before any weights are read."""
    lay(fake, store)
    with pytest.raises(ConfigError, match=said):
        agent.make(TransferOptions(kv_tier=(ANYWHERE,)), {})


@pytest.mark.parametrize("address", ["mooncake://host", "mooncake://", "mooncake://host:1/x", "mooncake://host:70000"])
def test_pdx_11_an_address_is_a_host_and_a_port(address):
    with pytest.raises(ConfigError, match=f"--kv-tier {address}"):
        parse_tier(address)


# ---- a real store ------------------------------------------------------------------------------


@needs_store
def test_pdx_11_a_store_that_is_killed_frozen_and_restarted():
    with mooncake_store() as store, Rig(store.address) as one, Rig(store.address) as two:
        one.until(lambda: one.write(1, 2) == [True] * 2)
        two.until(lambda: two.find(2, 9) == [True, False])
        assert two.read(2, 9, 1) == [True, False, True]
        store.master.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert one.read(1, 2) == [False] * 2 and one.write(3) == [False]
        assert time.monotonic() - began < 10
        store.master.send_signal(signal.SIGCONT)
        one.until(lambda: one.read(1) == [True])
        store.master.kill()
        store.master.wait()
        began = time.monotonic()
        assert two.read(1, 2) == [False] * 2 and two.find(1) == [False]
        assert time.monotonic() - began < 10
        store.start_master()
        two.until(lambda: two.write(4) == [True] and two.read(4) == [True])


@needs_store
def test_pdx_11_an_engine_finds_what_another_left_and_its_text_is_the_same():
    plain = run(TURNS[:3])[0]
    with mooncake_store() as store:
        with Rig(store.address) as rig:
            rig.until(lambda: rig.write(1) == [True])
        tiers = ("host?size=4MiB", store.address)
        assert run(TURNS[:3], kv_tier=tiers)[0] == plain
        texts, sources, stats = run(TURNS[:3], kv_tier=tiers)
        assert texts == plain and all(source.get("mooncake", 0) >= 128 for source in sources)
        assert stats[f"{store.address}.failed_reads"] == 0
        texts, sources = [], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "TRY_AGAIN", 1)
            with LLM(model=str(checkpoints.tiny_llama()), **{**BASE, "kv_tier": tiers}) as llm:
                for number, turn in enumerate(TURNS[:3]):
                    if number == 1:
                        store.master.kill()
                    (out,) = llm.generate([turn], GREEDY, use_tqdm=False)
                    texts.append(out.outputs[0].token_ids)
                    sources.append(out.cached_by_source or {})
        assert texts == plain
        assert "mooncake" in sources[0] and not any("mooncake" in source for source in sources[1:])
