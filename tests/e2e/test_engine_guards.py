"""What goes wrong beside the steps ends what it concerns, is said once, and never dies in silence (EXE-3, OPS-10, OPS-11)."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import checkpoints
from tests.support.disagg import children
from tests.support.http_server import wait_until
from tests.support.live import spawn
from tests.support.odd_connector import FOLDER, PATH, STRANGE, UNSENDABLE

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [
    "--dtype",
    "float32",
    "--num-threads",
    "1",
    "--num-kv-blocks",
    "512",
    "--block-size",
    "16",
    "--kv-connector",
    PATH,
]


@pytest.fixture
def server(tmp_path):
    env = {"PYTHONPATH": str(ROOT), FOLDER: str(tmp_path)}
    with spawn(str(checkpoints.tiny_llama()), *OPTIONS, "--drain-timeout-s", "2", env=env) as server:
        yield server


@pytest.mark.parametrize(("first", "said"), [(STRANGE, "StrangePart"), (UNSENDABLE, "cannot be sent")])
def test_an_answer_that_cannot_be_brought_over_ends_its_request_and_no_other(server, first, said):
    """F31: the receiving thread died, every request hung, and two SIGTERMs did not end the server."""
    odd = server.post("/v1/completions", prompt=[first, 6, 7], max_tokens=3)
    assert odd.status_code == 500 and said in odd.json()["error"]["message"]
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": [first, 6, 7], "max_tokens": 3, "stream": True}
    ) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert said in json.loads(events[-1])["error"]["message"], events
    assert server.text([5, 6, 7], max_tokens=3), "others go on"
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
    began_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert time.monotonic() - began_s < 10


def test_a_request_that_cannot_be_sent_is_refused(server):
    """F31, the other way: a number that no message holds."""
    params = {"x": 10**30}
    answer = server.post("/v1/completions", prompt=[5, 6], max_tokens=3, kv_transfer_params=params)
    assert answer.status_code == 400, answer.text
    assert server.text([5, 6, 7], max_tokens=3)


def test_a_thread_that_fails_in_the_engine_ends_it_by_name(server, tmp_path):
    """F31: no thread dies in silence."""
    (tmp_path / "fail").touch()
    assert server.process.wait(20) == 1
    wait_until(lambda: any("octavo-odd" in line for line in server.lines))
    log = "".join(server.lines)
    assert "octavo-odd" in log and "ZeroDivisionError" in log
    assert log.count("Traceback") == 1


def sigterm_time(server):
    """Exit code of a server that is told to stop, and the seconds that it took."""
    began_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(60), time.monotonic() - began_s


def folders(pid):
    """The folders of the named sockets that a process has open."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return {Path(line[7]).parent for line in lines if len(line) > 7 and line[6] in inodes}


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with a stream open"])
def test_sigterm_ends_a_server_whose_engine_is_frozen(server, busy):
    """F30: it took 23 s."""
    (engine,) = children(server.process.pid)
    if busy:
        body = {"prompt": [5, 6], "max_tokens": 1900, "ignore_eos": True, "stream": True, "temperature": 0}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGSTOP)
            code, seconds = sigterm_time(server)
            events = [line for line in lines if line.startswith("data: ")]
        assert "error" in json.loads(events[-1][6:])
    else:
        os.kill(engine, signal.SIGSTOP)
        code, seconds = sigterm_time(server)
    assert code == 0
    assert seconds < 2 + 2 + 8, "its limit, the time for errors to be read, and the child's end"
    assert not Path(f"/proc/{engine}").exists()


def test_a_killed_server_leaves_no_process_and_no_sockets(server):
    """F30: nothing is left behind."""
    (engine,) = children(server.process.pid)
    mine = folders(server.process.pid)
    assert mine and all(folder.exists() for folder in mine)
    server.process.kill()
    assert wait_until(lambda: not Path(f"/proc/{engine}").exists(), 30)
    assert not any(folder.exists() for folder in mine)
