"""A real engine process: it serves, dies loudly, never outlives its parent, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from octavo.base.errors import ConfigError, EngineDead, LoadError
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.base.types import FinishReason
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from octavo.engine.process import SocketClient
from octavo.engine.spawn import process_ahead, start_process
from octavo.features.transfer.options import TransferOptions
from tests.support import checkpoints
from tests.support.ports import free_port


def config(path, tiers=None, **model):
    return EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=512, **model),
        cache=CacheConfig(num_kv_blocks=64, block_size=16),
        features={"transfer": TransferOptions(kv_tier=tiers)} if tiers else {},
        device=DeviceConfig(num_threads=1),
    )


class Front:
    """Collects deltas of an engine process.

    Owns: the client, tokens by request, finished requests, and the error that ended the engine.
    """

    def __init__(self, path, tiers=None):
        self.tokens, self.finished, self.death = {}, {}, None
        self.changed = threading.Condition()
        self.client = SocketClient(config(path, tiers), lambda line: None)
        self.report = self.client.wait_ready()
        self.client.start(self.take, self.die)

    def take(self, outputs):
        with self.changed:
            for delta in outputs.deltas:
                self.tokens.setdefault(delta.request_id, []).extend(delta.new_token_ids)
                if delta.finish:
                    self.finished[delta.request_id] = delta
            self.changed.notify_all()

    def die(self, error):
        with self.changed:
            self.death = error
            self.changed.notify_all()

    def wait(self, condition, timeout_s=20):
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s)


def request(name, max_tokens=8, prompt=(5, 6, 7)):
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_s=time.monotonic())


def gone(pid):
    """True when the process is no more (a zombie counts as gone)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


def wait_gone(pid, timeout_s=25):
    end = time.monotonic() + timeout_s
    while not gone(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return gone(pid)


@pytest.fixture
def front():
    front = Front(checkpoints.tiny_llama())
    yield front
    front.client.close()


def test_requests_are_served_aborted_and_asked_about(front):
    front.client.submit((request("a"), request("b", max_tokens=400)))
    front.wait(lambda: "a" in front.finished)
    front.client.abort(("b", "unknown"))
    front.wait(lambda: "b" in front.finished)
    assert len(front.tokens["a"]) == 8
    assert front.finished["a"].finish is FinishReason.LENGTH
    assert front.finished["b"].finish is FinishReason.ABORT
    assert front.client.call("ping") == "pong"
    assert front.client.call("reset_prefix_cache") is True
    assert front.client.call("stats")["num_running"] == 0
    assert front.report.num_kv_blocks == 64


def test_what_the_engine_logs_has_a_time_and_a_level(capfd):
    """A tier that fails is told by the engine's process, in lines like those of the server's."""
    front = Front(checkpoints.tiny_llama(), (f"peer://127.0.0.1:{free_port()}",))
    try:
        front.client.submit((request("a", prompt=tuple(range(5, 70))),))
        front.wait(lambda: "a" in front.finished)
    finally:
        front.client.close()
    told = [line for line in capfd.readouterr().err.splitlines() if "KV tier peer://" in line]
    assert told and re.match(r"\d{4}-\d\d-\d\d [\d:.]+ WARNING +\d+ octavo\.", told[0]), told


def test_one_bad_request_harms_nobody(front):
    front.client.submit((request("a", max_tokens=200), request("a"), request("c", prompt=())))
    front.wait(lambda: len(front.tokens.get("a", ())) >= 100)
    front.client.submit((request("d"),))
    front.wait(lambda: "d" in front.finished)
    assert front.finished["d"].finish is FinishReason.LENGTH


def test_a_killed_engine_is_noticed_and_says_how_it_died(front):
    front.client.submit((request("a", max_tokens=400),))
    front.wait(lambda: front.tokens.get("a"))
    os.kill(front.client.pid, signal.SIGKILL)
    start = time.monotonic()
    front.wait(lambda: front.death is not None, 5)
    assert time.monotonic() - start < 3
    assert isinstance(front.death, EngineDead)
    assert "SIGKILL" in str(front.death)
    assert not front.client.alive()
    with pytest.raises(EngineDead):
        front.client.submit((request("z"),))


def test_a_ctrl_c_is_the_parents_from_the_childs_first_moment_on():
    """F54, F71: a terminal sends it to the whole group; a child that was still importing died of it, with a stack."""
    process = start_process()
    for _ in range(40):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    process.stdin.close()
    assert process.wait(60) == 0
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in before, "ours is heard as before"


def test_sigterm_ends_the_engine_process_cleanly(front):
    pid = front.client.pid
    os.kill(pid, signal.SIGTERM)
    assert wait_gone(pid)


def test_closing_leaves_no_process_and_no_socket_folder():
    front = Front(checkpoints.tiny_llama())
    pid, folder = front.client.pid, front.client._folder
    front.client.submit((request("a", max_tokens=400),))
    front.client.close()
    front.client.close()
    assert gone(pid)
    assert not folder.exists()


def test_an_engine_does_not_outlive_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from tests.engine.test_process import Front
            from tests.support import checkpoints
            front = Front(checkpoints.tiny_llama())
            print(front.client.pid, flush=True)
            time.sleep(60)
            """
        )
    )
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_gone(pid)


def too_long(_):
    return EngineConfig(model=ModelConfig(model=str(checkpoints.tiny_llama()), max_model_len=99999))


def absent(folder):
    return EngineConfig(model=ModelConfig(model=str(folder / "absent")))


@pytest.mark.parametrize(
    ("make", "kind", "words"), [(absent, LoadError, "absent"), (too_long, ConfigError, "max-model-len")]
)
def test_a_start_that_fails_gives_the_parent_the_sentence(tmp_path, make, kind, words):
    client = SocketClient(make(tmp_path), lambda line: None)
    pid = client.pid
    with pytest.raises(kind, match=words):
        client.wait_ready()
    assert gone(pid)


def test_a_process_started_ahead_ends_when_it_gets_no_work():
    with pytest.raises(LoadError, match="no such model"), process_ahead(True) as process:
        raise LoadError("no such model")
    assert process.poll() is not None
    with process_ahead(False) as process:
        assert process is None


def test_a_process_whose_parent_goes_before_telling_it_anything_ends_by_itself():
    process = start_process()
    process.stdin.close()
    assert process.wait(60) == 0


def test_a_process_started_ahead_serves():
    with process_ahead(True) as process:
        client = SocketClient(config(checkpoints.tiny_llama()), lambda line: None, process=process)
        try:
            assert client.pid == process.pid
            assert client.wait_ready().num_kv_blocks == 64
        finally:
            client.close()
    assert gone(process.pid)


def test_nobody_waits_for_a_process_that_has_just_ended(front):
    """Between the child's end and its being noticed, nothing is connected: sends must not wait."""
    for _ in range(3):
        front.client.abort(("unknown",))
    os.kill(front.client.pid, signal.SIGKILL)
    assert wait_gone(front.client.pid)
    sends: list[float] = []
    front.client.abort(("a",))
    with pytest.raises(EngineDead):
        for _ in range(6000):  # for as long as a busy neighbour may hold up the one who notices
            start = time.monotonic()
            front.client.submit((request("z"),))
            sends.append(time.monotonic() - start)
            time.sleep(0.005)
    assert max(sends, default=0) < 5


def test_an_interrupted_start_leaves_no_process():
    client = SocketClient(config(checkpoints.tiny_llama()), lambda line: None)
    pid, folder = client.pid, client._folder
    start = time.monotonic()
    client.close()
    assert time.monotonic() - start < 10
    assert gone(pid)
    assert not folder.exists()
