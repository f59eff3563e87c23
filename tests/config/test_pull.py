"""Models from a hub: whole or not at all, resumed where they stopped, and failures that say what to do (F01, F54)."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.base.errors import LoadError
from octavo.config.env import Env, read_env
from octavo.config.hub_files import HubFile
from octavo.config.meter import Meter, Passing
from octavo.config.names import EMBEDDED_FILE, hub_name
from octavo.config.pull import pull_model
from octavo.config.store import RECORD, STALE_S, Hold, Store
from tests.support.checkpoints import tiny_llama
from tests.support.hub import Hub, Repo, running_hub

BIG = 1 << 20
DATA = b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(BIG // 32))
HF = {"config.json": b"{}", "tokenizer.json": b"{} ", "model.safetensors": DATA, "notes.md": b"no"}
GGUF = {"m-Q4_K_M.gguf": DATA, "m-Q8_0.gguf": DATA[::-1], "x/m-Q6_K-00001-of-00002.gguf": DATA[:9000],
        "x/m-Q6_K-00002-of-00002.gguf": DATA[:8000]}  # fmt: skip


def silent(line: str) -> None:
    """No progress."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    old = Repo({"config.json": b"old", "model.safetensors": DATA[:5000]})
    repos = {"me/hf": Repo(dict(HF), revisions={"v1": old, "refs/pr/1": old}), "me/gguf": Repo(dict(GGUF))}
    with running_hub(repos) as found:
        yield found


@pytest.fixture
def env(hub: Hub, tmp_path: Path) -> Env:
    return read_env({"HOME": str(tmp_path), "HF_ENDPOINT": hub.url})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits before another attempt are written down, not waited."""
    waits: list[float] = []
    made = __import__("octavo.config.hub", fromlist=["Hub"]).Hub
    monkeypatch.setattr("octavo.config.hub.Hub", lambda access, say: made(access, say, sleep=waits.append))
    return waits


def left(env: Env) -> list[str]:
    """Everything in the cache but finished models."""
    return sorted(str(p.relative_to(env.cache_dir)) for p in env.cache_dir.rglob("*") if "hub" not in p.parts)


def test_paths_and_cached_names_are_found_without_fetching(tmp_path: Path) -> None:
    env, folder = read_env({"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}), tiny_llama()
    assert pull_model(str(folder), env, silent) == folder
    place = env.cache_dir / "hub" / "owner--model"
    place.mkdir(parents=True)
    with pytest.raises(LoadError, match="not on this machine"):
        pull_model("owner/model", env, silent)
    (place / "config.json").write_text("{}")
    assert pull_model("owner/model", env, silent) == place


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "nonsense", "a/b/c", "~nobody-here/x", "a" * 5000, "\0"]
)
def test_what_is_neither_a_path_nor_a_name_is_refused(env: Env, name: str) -> None:
    with pytest.raises(LoadError, match="neither a model folder, nor a GGUF file, nor a name"):
        pull_model(name, env, silent)


@pytest.mark.parametrize("name", ["my-org/smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_f01_a_name_with_an_owner_asks_the_hub_though_the_built_in_model_is_here(hub: Hub, env: Env, name: str) -> None:
    """F01."""
    env.cache_dir.mkdir(parents=True)
    (env.cache_dir / EMBEDDED_FILE).write_bytes(b"built in")
    with pytest.raises(LoadError, match=f"no such model as {name}, or it needs HF_TOKEN"):
        pull_model(name, env, silent)
    hub.repos[name] = Repo(dict(HF))
    assert (pull_model(name, env, silent) / "model.safetensors").read_bytes() == DATA
    assert pull_model("smollm2", env, silent).name == EMBEDDED_FILE


def test_f54_a_model_is_fetched_whole_and_once_and_nothing_else_is_left(hub: Hub, env: Env) -> None:
    """F54."""
    lines: list[str] = []
    place = pull_model("me/hf", env, lines.append)
    assert {p.name: p.read_bytes() for p in place.iterdir() if p.name != RECORD} == {
        k: v for k, v in HF.items() if k != "notes.md"
    }
    assert left(env) == []
    assert "fetching me/hf: 3 files, 1.0 MB" in lines[0]
    assert hub.repos["me/hf"].commit[:12] in lines[-1]
    asked = len(hub.seen)
    assert pull_model("me/hf", env, silent) == place
    assert len(hub.seen) == asked


def test_f54_revisions_are_pinned_and_kept_apart(hub: Hub, env: Env) -> None:
    """F54."""
    newest = pull_model("me/hf", env, silent)
    old = pull_model("me/hf@v1", env, silent)
    assert (old / "config.json").read_bytes() == b"old"
    assert (newest / "config.json").read_bytes() == b"{}"
    assert pull_model("me/hf@refs/pr/1", env, silent) != old
    commits = {e.name: e.commit for e in Store(env.cache_dir).entries()}
    assert commits["me/hf@v1"] == hub.repos["me/hf"].revisions["v1"].commit
    asked = len(hub.seen)
    assert pull_model(f"me/hf@{commits['me/hf@v1']}", env, silent).name in (old.name, "me--hf--@refs%2Fpr%2F1")
    assert len(hub.seen) == asked  # the commit is here under another name
    hub.repos["me/hf"].files["config.json"] = b"changed"
    assert pull_model("me/hf", env, silent) == newest  # pinned until it is removed


def test_f54_gguf_files_are_chosen_by_their_tag(hub: Hub, env: Env) -> None:
    """F54."""
    lines: list[str] = []
    assert pull_model("me/gguf:q8_0", env, silent).read_bytes() == GGUF["m-Q8_0.gguf"]
    default = pull_model("me/gguf", env, lines.append)
    assert default.name == "m-Q4_K_M.gguf"
    assert any("taking Q4_K_M" in line for line in lines)
    first = pull_model("me/gguf:Q6_K", env, silent)
    assert sorted(p.name for p in first.parent.glob("*.gguf")) == [
        "m-Q6_K-00001-of-00002.gguf", "m-Q6_K-00002-of-00002.gguf",
    ]  # fmt: skip
    assert first.name == "m-Q6_K-00001-of-00002.gguf"
    asked = len(hub.seen)
    assert pull_model("me/gguf:Q4_K_M", env, silent) == default  # what the plain name chose
    assert len(hub.seen) == asked
    with pytest.raises(LoadError, match="no GGUF file with the tag Q2_K; it has Q4_K_M, Q8_0, Q6_K"):
        pull_model("me/gguf:Q2_K", env, silent)
    assert left(env) == []


def test_f54_a_cut_connection_goes_on_where_it_was(hub: Hub, env: Env, quick: list[float]) -> None:
    """F54."""
    hub.faults.cut_after = [100_000, 300_000, 50_000]
    place = pull_model("me/hf", env, silent)
    assert (place / "model.safetensors").read_bytes() == DATA
    starts = [int(s.range[6:-1]) if s.range else 0 for s in hub.asked("model.safetensors")]
    assert starts[0] == 0
    assert 0 < starts[1] <= 100_000 < starts[2] <= 400_000 < starts[3] <= 450_000
    assert quick == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_f54_an_interrupted_pull_is_resumed_by_the_next(
    hub: Hub, env: Env, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F54."""
    monkeypatch.setattr("octavo.config.meter.TELL_S", 0.0)
    hub.faults.bytes_per_s = 400_000
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        if isinstance(line, Passing) and hub.asked("model.safetensors") and " kB of 1.0 MB" in line:
            raise error

    with pytest.raises(error):
        pull_model("me/hf", env, show)
    assert "the same command goes on from there" in lines[-1]
    (half,) = Store(env.cache_dir).entries()
    assert half.partial
    assert 0 < half.size < half.wanted < BIG + 1000
    assert not list(env.cache_dir.rglob("*lock"))
    hub.faults.bytes_per_s = None
    place = pull_model("me/hf", env, lines.append)
    assert (place / "model.safetensors").read_bytes() == DATA
    asked = hub.asked("model.safetensors")
    assert asked[-1].range is not None
    assert len([s for s in hub.seen if s.path.endswith("config.json")]) == 1  # what was whole is not fetched again
    assert left(env) == []


def test_f54_what_was_begun_of_another_commit_is_not_gone_on_with(hub: Hub, env: Env) -> None:
    """F54."""
    hub.faults.cut_after = [200_000] * 50
    hub.faults.answers = []
    store = Store(env.cache_dir)
    with store.pulling("me--hf", silent) as partial:  # as an interrupted pull leaves it
        (partial / "config.json").write_bytes(b"of before")
        (partial / "model.safetensors.part").write_bytes(b"of before")
        (partial / "gone.json").write_bytes(b"of before")
    hub.faults.cut_after = []
    place = pull_model("me/hf", env, silent)
    assert (place / "config.json").read_bytes() == b"{}"
    assert (place / "model.safetensors").read_bytes() == DATA
    assert not (place / "gone.json").exists()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_f54_a_busy_hub_is_asked_again(hub: Hub, env: Env, quick: list[float], status: int) -> None:
    """F54."""
    hub.faults.answers = [(status, {}), (status, {"Retry-After": "7"}), (status, {"Retry-After": "9999"})]
    pull_model("me/hf", env, silent)
    assert quick == [1.0, 7.0, 60.0]


def test_f54_a_hub_that_stays_busy_is_given_up(hub: Hub, env: Env, quick: list[float]) -> None:
    """F54."""
    hub.faults.answers = [(503, {})] * 100
    with pytest.raises(LoadError, match=r"me/hf could not be fetched: the hub answered 503 .*, 5 times"):
        pull_model("me/hf", env, silent)
    assert quick == [1.0, 2.0, 4.0, 8.0]
    assert left(env) == []


def test_f54_a_damaged_file_is_fetched_again_and_never_kept(hub: Hub, env: Env) -> None:
    """F54."""
    hub.faults.damaged = 1
    assert (pull_model("me/hf", env, silent) / "model.safetensors").read_bytes() == DATA
    hub.faults.damaged = 100
    with pytest.raises(LoadError, match=r"model\.safetensors came damaged"):
        pull_model("me/hf@v1", env, silent)
    assert not Store(env.cache_dir).place(hub_name("me/hf@v1")).exists()


def test_f54_a_server_without_ranges_starts_again(hub: Hub, env: Env) -> None:
    """F54."""
    hub.faults.cut_after = [100_000]
    hub.faults.ignore_range = True
    assert (pull_model("me/hf", env, silent) / "model.safetensors").read_bytes() == DATA


def test_f54_a_token_goes_to_the_hub_and_not_where_it_redirects(hub: Hub, env: Env, tmp_path: Path) -> None:
    """F54."""
    hub.faults.tokens = ("hf_good",)
    with pytest.raises(LoadError, match=r"no such model as me/hf, or it needs HF_TOKEN \(401\)"):
        pull_model("me/hf", env, silent)
    bad = replace(env, hub=replace(env.hub, token="hf_bad"))
    with pytest.raises(LoadError, match="or it needs HF_TOKEN of somebody who may read it"):
        pull_model("me/hf", bad, silent)
    hub.seen.clear()
    (tmp_path / ".cache" / "huggingface").mkdir()
    (tmp_path / ".cache" / "huggingface" / "token").write_text("hf_good\n")  # as `hf auth login` writes it
    pull_model("me/hf", env, silent)
    assert {s.authorization for s in hub.seen if s.host == "hub"} == {"Bearer hf_good"}
    assert {s.authorization for s in hub.seen if s.host == "cdn"} == {None}
    assert "hf_good" not in repr(read_env({"HF_TOKEN": "hf_good"}))


def test_f54_a_gated_model_names_the_page_with_its_terms(hub: Hub, env: Env) -> None:
    """F54."""
    hub.faults.tokens, hub.faults.gated = ("hf_good",), True
    with pytest.raises(LoadError, match=rf"accepted its terms at {hub.url}/me/hf; set HF_TOKEN"):
        pull_model("me/hf", env, silent)


@pytest.mark.parametrize(
    ("name", "words"),
    [("me/none", "no such model as me/none, or it needs HF_TOKEN"), ("me/hf@v9", "me/hf has no revision v9")],
)
def test_f54_what_is_not_there_is_one_sentence(env: Env, name: str, words: str) -> None:
    """F54."""
    with pytest.raises(LoadError, match=words):
        pull_model(name, env, silent)
    assert left(env) == []


def test_f54_no_network_is_one_sentence_with_ways_out(tmp_path: Path) -> None:
    """F54."""
    with running_hub({}) as gone:
        url = gone.url
    env = read_env({"HOME": str(tmp_path), "HF_ENDPOINT": url})
    with pytest.raises(LoadError, match=rf"{url} cannot be reached \(.+\); try again with a network, set HF_ENDPOINT"):
        pull_model("me/hf", env, silent)
    with pytest.raises(LoadError, match=r"HF_HUB_OFFLINE says not to ask .*; unset HF_HUB_OFFLINE, or copy"):
        pull_model("me/hf", replace(env, hub=replace(env.hub, offline=True)), silent)


@pytest.mark.parametrize(
    "endpoint", ["nonsense", "ftp://127.0.0.1", "http://[", "http://127.0.0.1:99999", "http://a b"]
)
def test_f54_an_endpoint_that_is_none_is_one_sentence(tmp_path: Path, endpoint: str) -> None:
    """F54."""
    with pytest.raises(LoadError, match="cannot be reached"):
        pull_model("me/hf", read_env({"HOME": str(tmp_path), "HF_ENDPOINT": endpoint}), silent)


def test_f54_something_that_is_no_hub_is_one_sentence(hub: Hub, env: Env) -> None:
    """F54."""
    hub.faults.answers = [(200, {})]
    with pytest.raises(LoadError, match="cannot be understood; is HF_ENDPOINT a hub"):
        pull_model("me/hf", env, silent)


def test_f54_a_disk_too_small_is_said_before_the_first_byte(
    hub: Hub, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F54."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=500_000))
    with pytest.raises(LoadError, match=r"me/hf needs 1.0 MB more, and the disk of .* has 500.0 kB left; make room"):
        pull_model("me/hf", env, silent)
    assert hub.asked("model.safetensors") == []


def test_f54_a_disk_that_fills_meanwhile_is_one_sentence(hub: Hub, env: Env) -> None:
    """F54: /dev/full takes nothing."""
    from octavo.config.hub import Hub as Client

    client = Client(env.hub, silent)
    commit, file = hub.repos["me/hf"].commit, HubFile(path="model.safetensors", size=BIG)
    with pytest.raises(
        LoadError, match=r"the disk of /dev is full after .* of model\.safetensors \(1.0 MB\); make room"
    ):
        client.fetch(hub_name("me/hf"), commit, file, Path("/dev/full"), lambda num_bytes: None)
    client.close()


def test_f54_pulls_of_one_model_at_once_fetch_it_once(hub: Hub, env: Env) -> None:
    """F54."""
    hub.faults.hold = threading.Event()
    places: list[Path] = []
    lines: list[str] = []
    threads = [
        threading.Thread(target=lambda: places.append(pull_model("me/hf", env, lines.append)), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while sum("another process is fetching me/hf" in line for line in lines) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    hub.faults.hold.set()
    for thread in threads:
        thread.join(60)
    assert len(set(places)) == 1 and len(places) == 4
    assert len(hub.asked("model.safetensors")) == 1
    assert left(env) == []


def test_f54_pulls_that_end_while_others_begin_never_find_a_folder_in_the_way(env: Env) -> None:
    """F54: the last pull to end removes the folder of half fetched models just when another one makes it."""
    failed: list[LoadError] = []

    def pull_often(folder: str) -> None:
        store = Store(env.cache_dir)
        try:
            for _ in range(1000):
                with store.pulling(folder, silent):
                    pass
        except LoadError as error:
            failed.append(error)

    threads = [threading.Thread(target=pull_often, args=(f"me--{i}",), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failed == []
    assert left(env) == []


@pytest.mark.parametrize("kind", ["file", "link"])
def test_f54_something_else_in_the_place_of_half_fetched_models_is_said(env: Env, kind: str) -> None:
    """F54."""
    env.cache_dir.mkdir(parents=True)
    partial = env.cache_dir / ".partial"
    if kind == "file":
        partial.write_text("mine")
    else:
        partial.symlink_to(env.cache_dir / "nowhere")
    with (
        pytest.raises(LoadError, match=r"cannot be written \(File exists\)"),
        Store(env.cache_dir).pulling("me--hf", silent),
    ):
        pass
    assert partial.is_symlink() or partial.read_text() == "mine"


def test_f54_old_leftovers_are_cleaned_and_fresh_ones_are_not(hub: Hub, env: Env) -> None:
    """F54."""
    old, fresh = env.cache_dir / ".partial" / "me--old", env.cache_dir / ".partial" / "me--fresh"
    left_by_older = env.cache_dir / "hub" / ".pull-abc"
    for folder in (old, fresh, left_by_older):
        folder.mkdir(parents=True)
        (folder / "x.part").write_bytes(b"x")
    for path in (old / "x.part", old, left_by_older / "x.part", left_by_older):
        os.utime(path, (0, time.time() - STALE_S - 60))
    pull_model("me/hf", env, silent)
    assert not old.exists()
    assert not left_by_older.exists()
    assert fresh.exists()


def test_rm_refuses_a_model_in_use_and_one_being_fetched(hub: Hub, env: Env) -> None:
    store = Store(env.cache_dir)
    place = pull_model("me/gguf:Q8_0", env, silent)
    hold = Hold(env.cache_dir, place)
    (entry,) = store.named("me/gguf:Q8_0")
    with pytest.raises(LoadError, match="me/gguf:Q8_0 is in use by a running engine"):
        store.remove(entry)
    hold.close()
    hold.close()
    store.remove(entry)
    assert not place.exists()
    with store.pulling("me--hf", silent) as partial:
        (partial / "x.part").write_bytes(b"x")
        (half,) = store.entries()
        with pytest.raises(LoadError, match="is being fetched by another process"):
            store.remove(half)
    store.remove(half)
    assert store.entries() == []


def test_a_damaged_record_leaves_the_model_usable(hub: Hub, env: Env) -> None:
    """F58: a corrupt index."""
    place = pull_model("me/hf", env, silent)
    (place / RECORD).write_bytes(b"\xff\xfe{")
    asked = len(hub.seen)
    assert pull_model("me/hf", env, silent) == place
    assert [e.name for e in Store(env.cache_dir).entries()] == ["me/hf"]
    assert len(hub.seen) == asked


def test_the_line_of_progress_has_size_share_speed_and_time() -> None:
    now, lines = [0.0], []
    meter = Meter("me/hf", {"a": 10**9, "b": None}, {"a": 10**8}, lines.append, clock=lambda: now[0])
    report = meter.of("a")
    report(10**8)
    now[0] = 10.0
    report(2 * 10**8)
    assert lines[0] == "fetching me/hf: 2 files, 1.0 GB, 100.0 MB of it here already"
    assert lines[1] == "me/hf: 200.0 MB of 1.0 GB (20 %), 10.0 MB/s, 1 min 20 s left"
    assert isinstance(lines[1], Passing)


def test_a_proxy_that_is_no_address_is_said(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    """F58: it was an unexpected error."""
    for wrong in ("bad::", "ftp://a"):
        monkeypatch.setenv("HTTPS_PROXY", wrong)
        with pytest.raises(LoadError, match="the proxy or certificate settings of this environment cannot be used"):
            pull_model("me/hf", env, silent)
