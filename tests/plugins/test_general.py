"""General plugins run in every process; failures are visible; a selection is obeyed (PLG-1 to PLG-3).

A real package is made in a temporary folder: a module and its metadata with entry points.
"""

import os
import subprocess
import sys

import httpx
import pytest

from octavo.base.errors import ConfigError
from octavo.plugins.general import load_general
from tests.support import checkpoints
from tests.support.live import spawn

MODULE = """
import os, pathlib
def good():
    with open(os.environ["TRACE"], "a") as f:
        f.write(f"{os.getpid()}\\n")
def bad():
    raise RuntimeError("the moon is full")
def leaver():
    raise SystemExit(0)
"""
MODEL = """
from octavo.models.catalogue.llama import LlamaForCausalLM
class Renamed(LlamaForCausalLM):
    pass
"""


@pytest.fixture
def package(tmp_path):
    (tmp_path / "toyplugin.py").write_text(MODULE)
    (tmp_path / "toymodel.py").write_text(MODEL)
    info = tmp_path / "toyplugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toyplugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[octavo.plugins]\ngood = toyplugin:good\nbad = toyplugin:bad\nleaver = toyplugin:leaver\nabsent = nowhere:at_all\n"
        "[octavo.models]\nMyOwnForCausalLM = toymodel:Renamed\nBrokenForCausalLM = nowhere:Model\n"
    )
    return tmp_path


def octavo(package, *args, **env):
    trace = package / "trace"
    base = {k: v for k, v in os.environ.items() if k != "OCTAVO_PLUGINS"}
    path = os.pathsep.join([str(package), base.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "octavo.entrypoints.cli", *args],
        capture_output=True, text=True, timeout=90, env={**base, "PYTHONPATH": path, "TRACE": str(trace), **env},
    )  # fmt: skip
    return done, set(trace.read_text().split()) if trace.exists() else set()


def test_the_list_shows_each_plugin_with_its_state_and_error(package):
    done, _ = octavo(package, "plugins")
    assert done.returncode == 0
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert lines["good"] == "octavo.plugins  good  toyplugin  toyplugin:good  loaded"
    assert "failed" in lines["absent"]
    assert "nowhere" in lines["absent"]
    assert "failed: RuntimeError: the moon is full" in lines["bad"], "F68: its function raises"
    assert "failed: SystemExit" in lines["leaver"]
    assert "loaded" in lines["MyOwnForCausalLM"]
    assert "failed: ModuleNotFoundError" in lines["BrokenForCausalLM"]
    done, _ = octavo(package, "plugins", OCTAVO_PLUGINS="")
    assert "loaded" not in done.stdout
    done, _ = octavo(package, "plugins", OCTAVO_PLUGINS="good,MyOwnForCausalLM,godo")
    states = [line.split()[-1] for line in done.stdout.splitlines() if "toyplugin:" in line or "toymodel:" in line]
    assert states == ["selected", "loaded", "selected", "loaded"]  # bad, good, leaver: not selected, or loaded
    missing = [line for line in done.stdout.splitlines() if "missing" in line]
    assert len(missing) == 1 and "did you mean 'good'" in missing[0]


def complete(package, *args, **env):
    model = str(checkpoints.tiny_llama())
    return octavo(package, "complete", "x", "--model", model, "--max-tokens", "2", "--num-threads", "1", *args, **env)


def test_failures_are_told_and_stop_nothing(package):
    done, processes = complete(package)
    assert done.returncode == 0, done.stderr
    assert len(processes) == 2, "front and engine process both load it"
    for words in ("the moon is full", "nowhere", "'leaver'"):  # F68: once, with what one uninstalls
        (line,) = [line for line in done.stderr.splitlines() if words in line]
        assert line.startswith("octavo: warning: plugin ") and "from toyplugin" in line


def test_set_and_empty_means_none(package):
    done, processes = complete(package, OCTAVO_PLUGINS="")
    assert done.returncode == 0
    assert processes == set()
    assert "moon" not in done.stderr


def test_a_required_plugin_that_fails_ends_the_start_in_one_sentence(package):
    done, _ = complete(package, "--require-plugin", "bad")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "plugin 'bad' is required but not in use (octavo.plugins, from toyplugin)" in last
    assert "moon" in last


@pytest.mark.parametrize("multiprocessing", ["--multiprocessing", "--no-multiprocessing"])
def test_f68_a_required_plugin_of_any_group_is_known(package, multiprocessing):
    """F68: it is tried where it would be used, and selected even where no other plugin is."""
    done, _ = complete(package, "--require-plugin", "MyOwnForCausalLM", multiprocessing, OCTAVO_PLUGINS="")
    assert done.returncode == 0, done.stderr
    done, _ = complete(package, "--require-plugin", "BrokenForCausalLM", multiprocessing)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "'BrokenForCausalLM' is required but not in use (octavo.models, from toyplugin)" in last


@pytest.mark.parametrize(("args", "env"), [(["--require-plugin", "godo"], {}), ([], {"OCTAVO_PLUGINS": "good,godo"})])
def test_f68_a_named_plugin_that_is_nowhere_ends_the_start(package, args, env):
    done, _ = complete(package, *args, **env)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert ("--require-plugin" if args else "OCTAVO_PLUGINS") in last
    assert "there is no plugin named 'godo'; did you mean 'good'" in last


def test_f68_a_running_server_lists_its_plugins_to_who_has_the_key(package, monkeypatch):
    """F68, PLG-3."""
    monkeypatch.delenv("OCTAVO_PLUGINS", raising=False)
    env = {"PYTHONPATH": str(package), "TRACE": str(package / "trace")}
    with spawn("--model", str(checkpoints.tiny_llama()), "--num-threads", "1", "--api-key", "k", env=env) as server:
        route = f"{server.url}/v1/plugins"
        assert httpx.get(route, headers={"Authorization": "Bearer other"}).status_code == 401
        answer = httpx.get(route, headers={"Authorization": "Bearer k"})
    assert answer.status_code == 200
    listed = {one["name"]: one for one in answer.json()["data"]}
    assert listed["good"]["state"] == "loaded"
    assert listed["bad"]["state"] == "failed" and "moon" in listed["bad"]["error"]
    assert listed["bad"]["source"] == "toyplugin" and listed["bad"]["group"] == "octavo.plugins"
    assert listed["MyOwnForCausalLM"]["state"] == "known"


def test_an_architecture_of_a_package_serves(package, tmp_path):
    folder = tmp_path / "model"
    checkpoints.tiny_llama(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MyOwnForCausalLM"))
    done, _ = octavo(package, "complete", "hello", "--model", str(folder), "--max-tokens", "3", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    done, _ = octavo(package, "complete", "hello", "--model", str(folder), OCTAVO_PLUGINS="good")
    assert done.returncode == 1
    assert "MyOwnForCausalLM" in done.stderr.strip().splitlines()[-1]


def test_a_name_of_another_group_is_not_missed_here():
    class Found:
        def __init__(self, name, value):
            self.name, self.value, self.dist = name, value, None

    groups = {"octavo.models": (Found("m", "x:y"),), "octavo.plugins": (Found("g", "builtins:list"),)}
    told = []
    load_general(("m", "g"), (), told.append, scan=lambda group: groups.get(group, ()))
    assert told == []
    with pytest.raises(ConfigError, match="OCTAVO_PLUGINS typo: there is no plugin named 'typo'"):
        load_general(("typo",), (), told.append, scan=lambda group: groups.get(group, ()))
    with pytest.raises(ConfigError, match="typo"):
        load_general((), ("typo",), told.append, scan=lambda group: groups.get(group, ()))
