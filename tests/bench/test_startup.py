"""Starts say what is known of the file cache and of their stages; `bench startup` times a real one in its own test."""

import pytest

from octavo.bench.startup import (
    AS_FOUND,
    DROPPED,
    WARM,
    Start,
    drop_from_cache,
    measure_starts,
    model_files,
    stages,
    startup_table,
)
from octavo.bench.workloads import Item

PROMPT = Item(prompt=(11, 12, 13), max_tokens=1)


@pytest.mark.parametrize(
    ("drop", "states", "counted"), [(False, [AS_FOUND, WARM, WARM], [2.0, 3.0]), (True, [DROPPED] * 3, [1.0, 2.0, 3.0])]
)
def test_each_run_says_what_is_known_of_the_file_cache_and_warm_runs_count(tmp_path, drop, states, counted):
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    seconds = iter([1.0, 2.0, 3.0])

    def start(arguments, files, prompt):
        assert (arguments, prompt) == (["m"], PROMPT)
        ready_s = next(seconds)
        return Start(files=files, ready_s=ready_s, first_token_s=ready_s + 0.5, stages={"load": 0.25})

    found = measure_starts(["m"], runs=3, prompt=PROMPT, drop=[file] if drop else [], start=start)
    assert [run.files for run in found.runs] == states
    assert (found.ready_s.num, found.ready_s.mean) == (len(counted), sum(counted) / len(counted))
    assert found.first_token_s.min == counted[0] + 0.5
    text = startup_table(found)
    assert all(state in text for state in states)
    assert "load 0.25 s" in text


def test_stages_are_read_from_the_log():
    lines = ["octavo: [  1.0 s] loading", "octavo: [  2.10 s] start-up: probe 0.01 s, load 1.61 s, warm up 0.27 s"]
    assert stages(lines) == {"probe": 0.01, "load": 1.61, "warm up": 0.27}
    assert stages(["nothing"]) == {}


def test_files_can_be_put_out_of_the_cache_and_stay_as_they_are(tmp_path):
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "weights"
    file.write_bytes(b"x" * 100_000)
    assert model_files(tmp_path) == [file]
    assert model_files(file) == [file]
    assert drop_from_cache([file, tmp_path / "absent"]) in (True, False)
    assert file.read_bytes() == b"x" * 100_000


@pytest.mark.parametrize("line", ["start-up: ", "start-up: x", "start-up: a b s"])
def test_a_log_without_stages_gives_none(line):
    assert stages([line]) == {}
