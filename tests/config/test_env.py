"""The environment is read once into a value; not set and empty differ for plugins (PLG-2)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.config.env import NAMES, SPIN_COUNT, compute_environment, compute_settings, read_env
from tests.support import checkpoints


@pytest.mark.parametrize(("value", "plugins"), [(None, None), ("", ()), ("a, b", ("a", "b"))])
def test_plugins_not_set_means_all_and_empty_means_none(value, plugins):
    assert read_env({} if value is None else {"OCTAVO_PLUGINS": value}).plugins == plugins


def test_cache_folder_and_debug():
    env = read_env({"OCTAVO_CACHE": "/x/y", "OCTAVO_DEBUG": "1"})
    assert (env.cache_dir, env.debug) == (Path("/x/y"), True)
    assert read_env({"HOME": "/h", "OCTAVO_DEBUG": "0"}).cache_dir == Path("/h/.cache/octavo")
    assert read_env({"OCTAVO_DEBUG": "0"}).debug is False


def test_options_are_told_from_the_few_names():
    env = read_env({"OCTAVO_MAX_MODEL_LEN": "5", "OCTAVO_CACHE": "/c", "OTHER": "1"})
    assert dict(env.options) == {"OCTAVO_MAX_MODEL_LEN": "5"}
    assert len(NAMES) <= 15


def test_a_process_that_computes_spins_for_a_bounded_time_unless_the_user_has_set_it():
    assert compute_environment({"HOME": "/h"}) == {"HOME": "/h", "GOMP_SPINCOUNT": SPIN_COUNT}
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        assert compute_environment({name: "mine"}) == {name: "mine"}


def test_settings_for_computing_here_leave_the_environment_as_it_was(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for mine, inside in ((None, SPIN_COUNT), ("7", "7")):
        if mine is None:
            monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        else:
            monkeypatch.setenv("GOMP_SPINCOUNT", mine)
        before = dict(os.environ)
        with compute_settings():
            assert os.environ["GOMP_SPINCOUNT"] == inside
        assert dict(os.environ) == before


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU OpenMP on Linux only")
def test_an_engine_in_the_caller_s_process_spins_for_a_bounded_time_too():
    code = f"from octavo import LLM\nLLM({str(checkpoints.tiny_llama())!r}, num_threads=2, max_model_len=64).close()"
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr
