"""The environment is read once into a value; not set and empty differ for plugins (PLG-2)."""

from pathlib import Path

import pytest

from octavo.config.env import NAMES, SPIN_COUNT, compute_environment, read_env


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
