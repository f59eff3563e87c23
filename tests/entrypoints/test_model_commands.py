"""Getting and keeping models as people type it: pull, list, run, rm, in processes of their own (F01, F54)."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.gguf_files import write_gguf
from tests.support.hub import Hub, Repo, running_hub
from tests.support.live import spawn

OCTAVO = [sys.executable, "-P", "-m", "octavo.entrypoints.cli"]
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder, gguf = tiny_llama(), write_gguf(tiny_llama(), tmp_path_factory.mktemp("gguf") / "m.gguf")
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    slow = {"m-Q8_0.gguf": os.urandom(4 << 20)}
    with running_hub(
        {"me/tiny": Repo(files), "me/gguf": Repo({"m-F32.gguf": gguf.read_bytes()}), "me/slow": Repo(slow)}
    ) as found:
        yield found


@pytest.fixture
def home(tmp_path: Path, hub: Hub) -> dict[str, str]:
    """An environment with a home of its own."""
    hub.faults.__init__()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OCTAVO_", "HF_"))}
    return {**kept, "HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "OCTAVO_NUM_KV_BLOCKS": "64"}


def octavo(home: dict[str, str], *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OCTAVO, *args], env=home, capture_output=True, text=True, timeout=LIMIT_S, input=stdin or ""
    )


def last(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    assert "OCTAVO_DEBUG" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def cache(home: dict[str, str]) -> Path:
    return Path(home["HOME"]) / ".cache" / "octavo"


def test_f54_a_model_is_pulled_listed_run_and_removed(home: dict[str, str]) -> None:
    """F54."""
    assert octavo(home, "list").stdout == ""
    done = octavo(home, "pull", "me/gguf:F32")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes()[:4] == b"GGUF"
    answer = octavo(home, "run", "me/tiny", "hello", "there", "--max-tokens", "4", "--temperature", "0")
    assert answer.returncode == 0, answer.stderr
    assert "fetching me/tiny" in answer.stderr
    listed = octavo(home, "list").stdout.splitlines()
    assert listed[0].split() == ["NAME", "REVISION", "SIZE", "FORMAT", "LAST", "USED", "PATH"]
    assert listed[1].startswith("me/gguf:F32 ") and " GGUF F32 " in listed[1] and " just now " in listed[1]
    assert listed[2].startswith("me/tiny ") and " safetensors float32 " in listed[2]
    entry = json.loads(octavo(home, "list", "--json").stdout)[0]
    assert entry["name"] == "me/gguf:F32" and len(entry["revision"]) == 40 and not entry["partial"]
    refused = octavo(home, "rm", "me/gguf:F32")
    assert refused.returncode == 2
    assert "nobody can be asked" in last(refused) and "give -y" in last(refused)
    gone = octavo(home, "rm", "-y", "me/gguf:F32", "me/tiny")
    assert gone.returncode == 0
    assert [line.split(",")[0] for line in gone.stdout.splitlines()] == ["removed me/gguf:F32", "removed me/tiny"]
    assert list((cache(home) / "hub").iterdir()) == []
    missing = octavo(home, "rm", "-y", "me/gguf:F32")
    assert missing.returncode == 1 and "is not in the cache folder" in last(missing)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_f54_a_pull_hears_a_signal_at_once_and_the_next_goes_on(
    home: dict[str, str], hub: Hub, number: signal.Signals, code: int
) -> None:
    """F54: the file would take an hour at this speed."""
    hub.faults.bytes_per_s = 20_000
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored, and inherited, where tests run in the background
    process = subprocess.Popen(
        [*OCTAVO, "pull", "me/slow"], env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + LIMIT_S
    while not any(p.stat().st_size for p in cache(home).rglob("*.part")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == code
    assert "kept, and the same command goes on from there" in said.strip().splitlines()[-1]
    listed = json.loads(octavo(home, "list", "--json").stdout)
    assert [(e["name"], e["partial"]) for e in listed] == [("me/slow", True)]
    assert 0 < listed[0]["size_bytes"] < listed[0]["wanted_bytes"] == 4 << 20
    hub.faults.bytes_per_s = None
    hub.seen.clear()
    done = octavo(home, "pull", "me/slow")
    assert done.returncode == 0, done.stderr
    assert "of it here already" in done.stderr
    assert all(s.range for s in hub.asked("m-Q8_0.gguf"))
    assert Path(done.stdout.strip()).read_bytes() == hub.repos["me/slow"].files["m-Q8_0.gguf"]
    assert not (cache(home) / ".partial").exists()


def test_f54_two_processes_pull_one_model_and_both_have_it(home: dict[str, str], hub: Hub) -> None:
    """F54."""
    hub.seen.clear()
    hub.faults.bytes_per_s = 2_000_000
    both = [
        subprocess.Popen(
            [*OCTAVO, "pull", "me/slow"], env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    places = {process.communicate(timeout=LIMIT_S)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(places) == 1
    assert len(hub.asked("m-Q8_0.gguf")) == 1


def test_f54_a_terminal_shows_one_line_that_moves(home: dict[str, str], hub: Hub) -> None:
    """F54."""
    hub.faults.bytes_per_s = 4_000_000
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(OCTAVO[0], [*OCTAVO, "pull", "me/slow"], home)
    seen, deadline = b"", time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and select.select([terminal], [], [], LIMIT_S)[0]:
        try:
            piece = os.read(terminal, 4096)
        except OSError:
            break
        seen += piece
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    assert seen.count(b"\r\x1b[K") >= 2
    assert b"MB/s" in seen
    assert len(seen.decode().strip().split("\r\n")) == 4  # fetching, how it went, where it is, the path


def test_f54_a_model_is_served_by_the_name_it_was_asked_for_and_not_removed_meanwhile(home: dict[str, str]) -> None:
    """F01, F54: pulled by the server itself; answers name it; rm waits for its end."""
    with spawn("me/tiny", "--max-model-len", "64", env=home) as server:
        assert server.model == "me/tiny"
        assert server.complete([5, 6], max_tokens=1)["model"] == "me/tiny"
        refused = octavo(home, "rm", "-y", "me/tiny")
        assert refused.returncode == 1
        assert "me/tiny is in use by a running engine" in last(refused)
    assert octavo(home, "rm", "-y", "me/tiny").returncode == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["pull", "my-org/smollm2"], "has no such model as my-org/smollm2, or it needs HF_TOKEN"),
        (["serve", "my-org/SmolLM2-135M-Instruct", "--port", "0"], "has no such model as my-org/SmolLM2-135M-Instruct"),
        (["plan", "me/tiny@nothing"], "me/tiny has no revision nothing"),
        (["complete", "hello", "--model", "me/gguf:Q2_K"], "no GGUF file with the tag Q2_K; it has F32"),
        (["pull", "me"], "nor a name such as owner/name, owner/name@revision or owner/name:Q4_K_M"),
        (["rm", "-y", "me"], "nor a name such as owner/name"),
    ],
)
def test_f01_names_that_mean_nothing_end_in_one_sentence(home: dict[str, str], args: list[str], words: str) -> None:
    """F01, F54."""
    done = octavo(home, *args)
    assert done.returncode == 1
    assert words in last(done)


@pytest.mark.parametrize("args", [["pull"], ["pull", "me/tiny"], ["run", "me/tiny", "hello"]])
@pytest.mark.parametrize("place", ["{home}/file/cache", "/proc/octavo"])
def test_f58_a_cache_folder_that_cannot_be_made_is_one_sentence(
    home: dict[str, str], tmp_path: Path, args: list[str], place: str
) -> None:
    """F58."""
    (tmp_path / "file").write_text("")
    place = place.format(home=tmp_path)
    done = octavo({**home, "OCTAVO_CACHE": place}, *args)
    assert done.returncode == 1
    assert f"the cache folder {place} cannot be written" in last(done)
    assert last(done).endswith("set OCTAVO_CACHE to a folder that can")


def within_permissions(home: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """The command as a user whom permissions bind, which they do not where tests run as root."""
    caps = "-dac_override,-dac_read_search"
    bound = ["setpriv", f"--bounding-set={caps}", f"--inh-caps={caps}"] if os.geteuid() == 0 else []
    return subprocess.run([*bound, *OCTAVO, *args], env=home, capture_output=True, text=True, timeout=LIMIT_S)


def test_f58_a_home_that_cannot_be_written_is_one_sentence(home: dict[str, str], tmp_path: Path) -> None:
    """F58: HOME read-only at the first pull."""
    place = tmp_path / "locked"
    place.mkdir(mode=0o555)
    for args in (["pull"], ["pull", "me/tiny"], ["complete", "hello"]):
        done = within_permissions({**home, "HOME": str(place), "OCTAVO_CACHE": ""}, *args)
        assert done.returncode == 1
        assert f"the cache folder {place}/.cache/octavo cannot be written (Permission denied)" in last(done)


@pytest.mark.parametrize(
    "locked",
    [".", "config.json", "tokenizer.json", "model.safetensors", "generation_config.json", "tokenizer_config.json"],
)
def test_f58_a_model_that_this_user_may_not_read_is_one_sentence(
    home: dict[str, str], tmp_path: Path, locked: str
) -> None:
    """F58: the folder, and each file of it."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama(), folder)
    (folder / "generation_config.json").write_text("{}")
    (folder / locked).chmod(0)
    try:
        done = within_permissions(home, "complete", "hello", "--model", str(folder), "--max-tokens", "1")
    finally:
        (folder / locked).chmod(0o755)
    assert done.returncode == 1
    assert str(folder) in last(done)
    assert "cannot be read" in last(done)
    assert "ermission denied" in last(done) or "may not look" in last(done)


def test_f58_a_folder_that_this_user_may_not_look_into_does_not_hide_the_others(home: dict[str, str]) -> None:
    """F58."""
    assert octavo(home, "pull", "me/gguf").returncode == 0
    closed = cache(home) / "hub" / "me--closed"
    closed.mkdir(mode=0)
    done = within_permissions(home, "list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["NAME", "me/gguf"]


@pytest.mark.parametrize("lengths", ["0", "1,0", "0k"])
def test_f58_lengths_of_nothing_are_refused(home: dict[str, str], lengths: str) -> None:
    """F58."""
    done = octavo(home, "plan", str(tiny_llama()), "--lengths", lengths)
    assert done.returncode == 2
    assert last(done) == f"octavo: --lengths must be at least 1 token each, got {lengths}."
