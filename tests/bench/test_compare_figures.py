"""The comparison's table, the machine's limits and the file behind them (OPS-9)."""

import sys
from pathlib import Path

import pytest

from octavo.base.errors import ConfigError
from octavo.bench.peers.api import ModelShape
from octavo.bench.records import BenchRun, Probed, RecordLog
from octavo.bench.roof import Roof, limit, probe, share
from octavo.bench.standings import best_capacity, failures, median_roof, rows, table
from octavo.bench.works import CAPACITY, works

SHAPE = ModelShape(
    num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152
)
ROOF = Roof(read_gb_s=40.0, bf16_gflop_s=300.0, int8_gop_s=900.0)


def run(peer: str, round_: int, work: str = "W1", width: str = "bf16", **values: float) -> BenchRun:
    return BenchRun(
        work=work, model="m", width=width, peer=peer, round=round_, values={k: (v,) for k, v in values.items()}
    )


def test_cells_are_medians_over_rounds_with_their_extremes():
    runs = [run("octavo", i, decode_tok_s=v) for i, v in enumerate((50.0, 10.0, 30.0))]
    (row,) = rows(runs, works(1), {}, Roof())
    cell = row.cells["octavo"]
    assert (cell.median, cell.low, cell.high, cell.num_rounds) == (30.0, 10.0, 50.0, 3)
    assert "30.0 (10.0..50.0)" in table([row])
    assert row.ratio is None and row.best_other is None


def test_a_rounds_value_is_the_median_of_its_repeats():
    one = BenchRun(work="W1", model="m", width="bf16", peer="octavo", round=1, values={"decode_tok_s": (1.0, 9.0, 2.0)})
    (row,) = rows([one], works(1), {}, Roof())
    assert row.cells["octavo"].median == 2.0


@pytest.mark.parametrize(
    ("work", "key", "ours", "ratio", "best"),
    [("W2", "output_tok_s", 300.0, 1.5, "b"), ("W4", "wall_s", 50.0, 2.0, "a"), ("W4", "wall_s", 200.0, 0.5, "a")],
)
def test_above_one_means_octavo_is_better_whatever_the_unit(work: str, key: str, ours: float, ratio: float, best: str):
    runs = [run("a", 1, work, **{key: 100.0}), run("b", 1, work, **{key: 200.0}), run("octavo", 1, work, **{key: ours})]
    (row,) = rows(runs, works(1), {}, Roof())
    assert (row.ratio, row.best_other) == (ratio, best)


def test_widths_and_models_are_rows_of_their_own():
    runs = [run("octavo", 1, width=w, decode_tok_s=v) for w, v in (("bf16", 1.0), ("int8", 2.0))]
    runs.append(run("llamacpp", 1, width="int8", decode_tok_s=4.0))
    by_width = {row.width: row for row in rows(runs, works(1), {}, Roof())}
    assert by_width["bf16"].ratio is None
    assert by_width["int8"].ratio == 0.5


def test_what_failed_is_in_no_cell_and_in_the_list():
    bad = BenchRun(work="W1", model="m", width="bf16", peer="vllm", round=2, error="it ended")
    (row,) = rows([run("octavo", 1, decode_tok_s=5.0), bad], works(1), {}, Roof())
    assert set(row.cells) == {"octavo"}
    assert failures([bad]) == ("W1 m bf16 vllm, round 2: it ended",)


def test_octavo_is_the_first_column_and_missing_cells_are_dashes():
    runs = [run("a", 1, decode_tok_s=4.0), run("octavo", 1, decode_tok_s=5.0), run("octavo", 1, "W4", wall_s=1.0)]
    lines = table(rows(runs, works(1), {}, Roof())).splitlines()
    assert lines[0].split()[-5:] == ["octavo", "a", "ratio", "of", "limit"]
    assert next(line for line in lines if line.startswith("W4")).split()[-4:] == ["1.00", "-", "-", "-"]
    assert table([]) == "nothing was measured"


def test_the_capacity_is_the_best_others_or_our_own_when_alone():
    runs = [run(peer, 0, CAPACITY, requests_s=v) for peer, v in (("octavo", 9.0), ("a", 2.0), ("b", 3.0))]
    assert best_capacity(runs, "m", "bf16") == 3.0
    assert best_capacity(runs[:1], "m", "bf16") == 9.0
    assert best_capacity(runs, "m", "int8") is None


def test_decoding_can_be_no_faster_than_reading_the_weights():
    """SmolLM2: 134.5 M weights of matrices and head in bf16, and the keys and values of 192 tokens."""
    weights = 30 * (576 * 64 * 24 + 3 * 576 * 1536) + 576 * 49152
    read = weights * 2 + 192 * SHAPE.kv_bytes_per_token
    assert limit("decode_tok_s", SHAPE, "bf16", ROOF) == pytest.approx(40e9 / read)
    slow = Roof(read_gb_s=40.0, bf16_gflop_s=1.0)
    assert limit("decode_tok_s", SHAPE, "bf16", slow) == pytest.approx(1e9 / (2 * weights))  # now arithmetic binds
    assert limit("decode_tok_s", SHAPE, "bf16", Roof(read_gb_s=40.0)) == pytest.approx(40e9 / read)


def test_narrower_weights_have_a_higher_limit():
    by_width = [limit("decode_tok_s", SHAPE, width, ROOF) or 0 for width in ("bf16", "int8", "int4")]
    assert by_width == sorted(by_width) and len(set(by_width)) == 3


@pytest.mark.parametrize("key", ["decode_tok_s", "prompt_tok_s", "output_tok_s"])
def test_a_faster_machine_has_higher_limits(key: str):
    twice = Roof(read_gb_s=80.0, bf16_gflop_s=600.0, int8_gop_s=1800.0)
    for width in ("bf16", "int8", "int4"):
        assert (limit(key, SHAPE, width, twice) or 0) == pytest.approx(2 * (limit(key, SHAPE, width, ROOF) or 0))


def test_sharing_a_prefix_has_a_lower_limit_than_computing_it_each_time():
    wall_s = limit("wall_s", SHAPE, "bf16", ROOF)
    computed_each_time = 32 * 1056 * 2 * SHAPE.layer_weights / 300e9
    assert wall_s is not None and 0 < wall_s < computed_each_time / 4
    # 63 steps read the weights, the prefix once, and what each request has of its own
    a_step = 2 * (SHAPE.layer_weights + SHAPE.head_weights) + (1024 + 32 * 64) * SHAPE.kv_bytes_per_token
    assert wall_s > 63 * a_step / (ROOF.read_gb_s * 1e9)
    unlimited = limit("wall_s", SHAPE, "bf16", Roof(read_gb_s=40.0, bf16_gflop_s=1e12))
    assert unlimited == pytest.approx(63 * a_step / (ROOF.read_gb_s * 1e9), rel=1e-3)


def test_latency_start_and_memory_have_no_limit_and_nor_has_an_unprobed_machine():
    for key in ("ttft_p99_60%", "start_s", "peak_bytes", "request_tok_s"):
        assert limit(key, SHAPE, "bf16", ROOF) is None
    assert limit("decode_tok_s", SHAPE, "bf16", Roof()) is None
    assert limit("prompt_tok_s", SHAPE, "int8", Roof(read_gb_s=40.0, bf16_gflop_s=300.0)) is None


def test_a_share_is_below_one_for_what_is_slower_than_the_limit():
    assert share(50.0, 100.0, higher_is_better=True) == 0.5
    assert share(4.0, 1.0, higher_is_better=False) == 0.25


def test_the_roof_is_the_middle_of_the_probes():
    probes = [Probed(before="x", read_gb_s=v) for v in (30.0, 50.0, 34.0)] + [Probed(before="x", bf16_gflop_s=7.0)]
    assert median_roof(probes) == Roof(read_gb_s=34.0, bf16_gflop_s=7.0)
    assert median_roof([]) == Roof()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('print(\'{"read_gb_s": 31.5, "kernel": "avx512"}\')', Roof(read_gb_s=31.5)),
        ("print('warming up'); print('{\"int8_gop_s\": 2}')", Roof(int8_gop_s=2.0)),
        ("print('not json')", None),
        ("pass", None),
        ("import no_such_module_at_all", None),
    ],
)
def test_a_probe_that_is_missing_or_broken_is_none(code: str, found: Roof | None):
    assert probe((sys.executable, "-c", code)) == found


def test_a_probe_command_that_is_not_there_is_none():
    assert probe(("/nowhere/probe",)) is None


def test_a_file_is_continued_and_a_half_written_end_dropped(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    RecordLog(path, append=False).add(run("octavo", 1, decode_tok_s=5.0))
    with path.open("ab") as file:
        file.write(b'{"type":"run","work":"W3"')
    book = RecordLog(path, append=True)
    assert [r.work for r in book.runs] == ["W1"]
    book.add(run("octavo", 2, decode_tok_s=6.0))
    assert len(RecordLog(path, append=True).runs) == 2


def test_a_later_run_takes_the_place_of_an_earlier_one():
    book = RecordLog(None, append=False)
    failed = BenchRun(work="W1", model="m", width="bf16", peer="octavo", round=1, error="bad luck")
    book.add(failed)
    assert not book.done("W1", "m", "bf16", "octavo", 1)
    book.add(run("octavo", 1, decode_tok_s=5.0))
    assert book.done("W1", "m", "bf16", "octavo", 1)
    assert [r.error for r in book.runs] == [None]


def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\nit rains\n")
    with pytest.raises(ConfigError, match=r"line 1 of .* is not a record"):
        RecordLog(path, append=True)
    assert path.read_text() == "dear diary\nit rains\n"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot write"):
        RecordLog(tmp_path / "no" / "such" / "folder", append=False)
