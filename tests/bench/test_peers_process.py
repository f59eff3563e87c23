"""A peer's process tree: started, waited for, weighed and stopped, and nothing else ever touched."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.bench.peers.api import Launch
from octavo.bench.peers.process import (
    MemoryWatch,
    PeerFailed,
    ProcessHandle,
    Server,
    free_port,
    memory,
    process_tree,
    running,
)

FAKE = Path(__file__).parents[1] / "support" / "fake_engine.py"


def launch(*options: str, env: dict[str, str] | None = None) -> Launch:
    port = free_port()
    return Launch(
        command=(sys.executable, str(FAKE), "--port", str(port), *options), port=port, model="fake", env=env or {}
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_is_ready_when_it_says_so(tmp_path: Path):
    with running(launch("--start-s", "0.3"), tmp_path / "log") as server:
        assert server.wait_ready(30) >= 0.3
        assert server.age_s() >= 0.3
        assert alive(server.pid)
    assert not alive(server.pid)


def test_stopping_ends_the_whole_tree(tmp_path: Path):
    with running(launch("--child"), tmp_path / "log") as server:
        server.wait_ready(30)
        tree = server.processes()
        child = int((tmp_path / "log").read_text().split()[1])
        assert [p.pid for p in tree] == [server.pid, child]
        assert server.memory().num_processes == 2
    assert not alive(server.pid) and not alive(child)


def test_stopping_ends_it_when_the_block_fails(tmp_path: Path):
    with pytest.raises(KeyError), running(launch(), tmp_path / "log") as server:
        raise KeyError
    assert not alive(server.pid)


def test_a_server_that_ends_too_early_says_its_last_words(tmp_path: Path):
    bad = Launch(
        command=(sys.executable, "-c", "import sys; print('no such model'); sys.exit(4)"), port=free_port(), model="x"
    )
    with running(bad, tmp_path / "log") as server, pytest.raises(PeerFailed, match=r"code 4 .*no such model"):
        server.wait_ready(30)


def test_a_server_that_is_never_ready_times_out(tmp_path: Path):
    with running(launch("--start-s", "60"), tmp_path / "log") as server, pytest.raises(PeerFailed, match="not ready"):
        server.wait_ready(0.2)


def test_a_command_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(PeerFailed, match="cannot run /nowhere/engine"):
        Server(Launch(command=("/nowhere/engine",), port=1, model="x"), tmp_path / "log")


def test_the_environment_is_ours_and_what_the_launch_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEPT", "1")
    code = "import os; print(os.environ['KEPT'], os.environ['ADDED'], 'EMPTY' in os.environ)"
    shown = Launch(command=(sys.executable, "-c", code), port=free_port(), model="x", env={"ADDED": "two", "EMPTY": ""})
    with running(shown, tmp_path / "log") as server, pytest.raises(PeerFailed, match="1 two False"):
        server.wait_ready(30)


def test_a_process_with_another_start_time_is_left_alone(tmp_path: Path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        server = Server(launch(), tmp_path / "log")
        server._seen.add(ProcessHandle(pid=bystander.pid, started=1))  # the id was once another's
        server.stop()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_tree_of_an_ended_process_is_empty():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert process_tree(ended.pid) == ()
    assert memory([ProcessHandle(pid=ended.pid, started=1)]).num_processes == 0


def test_memory_sums_what_proc_says(tmp_path: Path):
    for pid, (pss, rss, high) in {11: (100, 300, 400), 12: (50, 60, 70)}.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "smaps_rollup").write_text(f"5-6 ---p 0 [rollup]\nRss: {rss} kB\nPss:   {pss} kB\n")
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx y\nVmHWM:\t  {high} kB\n")
    found = memory([ProcessHandle(pid=pid, started=0) for pid in (11, 12, 13)], tmp_path)
    assert (found.pss_bytes, found.rss_bytes, found.high_water_bytes) == (150 * 1024, 360 * 1024, 470 * 1024)


def test_a_name_with_spaces_and_parentheses_does_not_hide_a_process(tmp_path: Path):
    stat = "{pid} (a) b) S {parent} " + "0 " * 17 + "{start} 0"
    for pid, parent, start in ((5, 1, 90), (6, 5, 91), (7, 6, 92), (8, 1, 93)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(stat.format(pid=pid, parent=parent, start=start))
    assert process_tree(5, tmp_path) == tuple(ProcessHandle(pid=p, started=s) for p, s in ((5, 90), (6, 91), (7, 92)))


def test_the_watch_keeps_the_peak(tmp_path: Path):
    with running(launch(), tmp_path / "log") as server:
        server.wait_ready(30)
        with MemoryWatch(server, interval_s=0.02) as watch:
            time.sleep(0.2)
        assert len(watch.samples) >= 2
        assert watch.peak_bytes == max(s.pss_bytes for s in watch.samples) > 2**20
        rss = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert watch.peak_bytes <= 1.5 * rss
