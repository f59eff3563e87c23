"""`octavo bench compare`: turns, failures, going on, and the whole way through HTTP with stand-ins for engines (OPS-9)."""

import argparse
import json
import os
import signal
import sys
import threading
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.base.errors import ConfigError, OctavoError
from octavo.bench.compare import (
    Comparison,
    Plan,
    _terminates_as_interrupted,
    add_compare_arguments,
    make_plan,
    report,
    run_compare,
)
from octavo.bench.load import LoadTarget, run_load
from octavo.bench.peers.api import Checkpoint, Launch, ModelShape, ServerNeed
from octavo.bench.records import About, BenchRun, Probed, RecordLog
from octavo.bench.roof import Roof
from octavo.bench.samples import LoadResult, Sample
from octavo.bench.workloads import Workload
from octavo.bench.works import CAPACITY, works

FAKE = Path(__file__).parents[1] / "support" / "fake_engine.py"
SHAPE = ModelShape(
    num_layers=1, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=16
)


class FakePeer:
    """An engine that is a script."""

    widths = frozenset({"bf16", "int8"})

    def __init__(self, name: str, *options: str, works: frozenset[str] | None = None, reason: str | None = None):
        self.name, self._options, self.works, self._reason = name, options, works, reason
        self.needs: list[ServerNeed] = []

    def available(self) -> str | None:
        return self._reason

    def files(self, model: Checkpoint, width: str) -> tuple[Path, ...]:
        return (model.folder / "weights",)

    def version_command(self) -> tuple[str, ...]:
        return (sys.executable, "-c", f"print('{self.name} 1.0')")

    def launch(self, model: Checkpoint, width: str, need: ServerNeed, port: int) -> Launch:
        self.needs.append(need)
        command = (sys.executable, str(FAKE), "--port", str(port), *self._options)
        return Launch(command=command, port=port, model=self.name, extra={"ignore_eos": True})


def answer(target: LoadTarget, work: Workload) -> LoadResult:
    """Answers that need no server: 10 ms to the first token and 10 ms a token; octavo is twice as fast."""
    step = 0.005 if target.model == "octavo" else 0.01
    samples = []
    for item in work.items:
        times = array("d", [item.at_s + step * (i + 1) for i in range(item.max_tokens)])
        samples.append(
            Sample(
                due_s=item.at_s,
                start_s=item.at_s,
                end_s=times[-1],
                first_token_s=times[0],
                token_times=times,
                prompt_tokens=len(item.prompt),
                output_tokens=item.max_tokens,
            )
        )
    wall_s = max(s.end_s for s in samples)
    return LoadResult(name=work.name, samples=tuple(samples), wall_s=wall_s)


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    (tmp_path / "weights").write_bytes(b"w" * 100)
    return Checkpoint(name="tiny", folder=tmp_path, gguf={}, shape=SHAPE)


def plan_of(
    model: Checkpoint, peers: list[FakePeer], *names: str, rounds: int = 1, widths: tuple[str, ...] = ("bf16",)
):
    chosen = {name: work for name, work in works(4).items() if name in names}
    return Plan(
        works=chosen, models=[model], widths=widths, peers=peers, rounds=rounds, rate=None,
        start_timeout_s=30.0, answer_timeout_s=30.0, logs=model.folder / "logs",
    )  # fmt: skip


def compared(plan: Plan, book: RecordLog | None = None, **options: Any) -> tuple[RecordLog, list[str]]:
    said: list[str] = []
    book = book or RecordLog(None, append=False)
    settings = {"send": answer, "probe_roof": lambda: None, **options}
    Comparison(plan, book, say=said.append, **settings).run({"rounds": plan.rounds})
    return book, said


def test_engines_take_turns_within_each_round(model: Checkpoint):
    peers = [FakePeer("octavo"), FakePeer("other")]
    book, _ = compared(plan_of(model, peers, "W1", "W3", "W6", rounds=2))
    assert [(r.round, r.peer, r.work) for r in book.runs] == [
        (round_, peer, work) for round_ in (1, 2) for peer in ("octavo", "other") for work in ("W6", "W1", "W3")
    ]
    assert len(peers[0].needs) == 2  # one start a round serves the three works


def test_works_that_need_another_server_get_one(model: Checkpoint):
    peer = FakePeer("other")
    book, _ = compared(plan_of(model, [peer], "W1", "W2", "W4"))
    assert [need.slots for need in peer.needs] == [1, 32, 32]
    assert peer.needs[2].shared_tokens == 1024
    assert [r.work for r in book.runs] == ["W1", "W2", "W4"]


def test_every_engine_gets_the_same_prompts_and_each_round_new_ones(model: Checkpoint):
    sent: list[tuple[str, Any]] = []

    def send(target: LoadTarget, work: Workload) -> LoadResult:
        if work.name == "W1":
            sent.append((target.model, work.items[0].prompt))
        return answer(target, work)

    compared(plan_of(model, [FakePeer("a"), FakePeer("b")], "W1", rounds=2), send=send)
    by_peer = {name: [prompt for peer, prompt in sent if peer == name] for name in "ab"}
    assert by_peer["a"] == by_peer["b"]
    assert len(set(by_peer["a"])) == len(by_peer["a"]) == 6


def test_the_figures_are_those_of_the_samples(model: Checkpoint):
    book, _ = compared(plan_of(model, [FakePeer("other")], *(f"W{i}" for i in range(1, 8))))
    values = {r.work: r.values for r in book.runs}
    assert values["W1"]["decode_tok_s"] == pytest.approx((100.0,) * 3)
    assert values["W1"]["request_tok_s"] == pytest.approx((100.0,) * 3)
    assert values["W2"]["output_tok_s"] == pytest.approx((32 * 128 / 1.28,))
    assert values["W3"]["prompt_tok_s"] == pytest.approx((204_800.0,) * 3)
    assert values["W4"]["wall_s"] == pytest.approx((0.64,))
    assert len(values["W5"]) == 4
    assert all(value == pytest.approx((0.01,)) for value in values["W5"].values())
    assert 0 < values["W6"]["start_s"][0] < 30
    assert values["W7"]["peak_bytes"][0] > 2**20


def test_w5s_rates_come_from_the_best_other_engine(model: Checkpoint):
    rates: list[float] = []

    def send(target: LoadTarget, work: Workload) -> LoadResult:
        result = answer(target, work)
        slower = {"slow": 10.0, "octavo": 0.1}.get(target.model, 1.0)
        if work.name.startswith("W5 at"):
            rates.append(work.items[1].at_s)
        return msgspec.structs.replace(result, wall_s=result.wall_s * slower)

    plan = plan_of(model, [FakePeer("octavo"), FakePeer("slow"), FakePeer("fast")], "W5")
    book, _ = compared(plan, send=send)
    capacities = {r.peer: r.values["requests_s"][0] for r in book.runs if r.work == CAPACITY}
    assert set(capacities) == {"slow", "fast"}
    assert {r.rate for r in book.runs if r.work == "W5"} == {capacities["fast"]}
    assert len(rates) == 6 and len(set(rates)) == 2  # the same arrivals for all, at two rates


def test_one_engine_that_fails_is_reported_and_the_others_go_on(model: Checkpoint):
    peers = [FakePeer("dies", "--die"), FakePeer("refuses", "--refuse"), FakePeer("octavo")]
    plan = plan_of(model, peers, "W6", "W1")
    book, said = compared(plan, send=run_load, probe_roof=lambda: None)
    errors = {(r.peer, r.work): r.error for r in book.runs if r.error}
    assert set(errors) == {(peer, work) for peer in ("dies", "refuses") for work in ("W6", "W1")}
    assert "no such prompt here" in errors["refuses", "W1"]
    assert [r.work for r in book.runs if r.peer == "octavo" and not r.error] == ["W6", "W1"]
    assert sum("FAILED" in line for line in said) == 4
    shown: list[str] = []
    assert report(plan, book, shown.append) == 1
    assert sum(line.startswith("FAILED: W1 tiny bf16 refuses, round 1") for line in shown) == 1


def test_an_engine_that_does_not_start_costs_each_of_its_works(model: Checkpoint):
    class Broken(FakePeer):
        def launch(self, model: Checkpoint, width: str, need: ServerNeed, port: int) -> Launch:
            return Launch(command=(sys.executable, "-c", "raise SystemExit('bad model')"), port=port, model="x")

    book, _ = compared(plan_of(model, [Broken("broken"), FakePeer("octavo")], "W1", "W3"))
    assert [(r.work, "bad model" in str(r.error)) for r in book.runs if r.peer == "broken"] == [
        ("W1", True),
        ("W3", True),
    ]
    assert all(r.error is None for r in book.runs if r.peer == "octavo")


def test_an_answer_that_stops_early_gives_no_figure(model: Checkpoint):
    book, _ = compared(plan_of(model, [FakePeer("other", "--short")], "W1"), send=run_load)
    assert "tokens got" in str(book.runs[0].error)


def test_a_peer_that_is_not_there_is_said_once_and_left_out(model: Checkpoint):
    peers = [FakePeer("absent", reason="it is not built"), FakePeer("octavo")]
    book, said = compared(plan_of(model, peers, "W1", rounds=2))
    assert {r.peer for r in book.runs} == {"octavo"}
    assert said.count("absent is left out: it is not built") == 1


def test_a_peer_runs_only_the_works_it_can(model: Checkpoint):
    book, _ = compared(plan_of(model, [FakePeer("single", works=frozenset({"W1"}))], "W1", "W2", "W3"))
    assert [r.work for r in book.runs] == ["W1"]


def test_a_missing_file_leaves_the_peer_out_for_that_model(model: Checkpoint):
    (model.folder / "weights").unlink()
    book, said = compared(plan_of(model, [FakePeer("other")], "W1"))
    assert book.runs == ()
    assert any("weights is missing" in line for line in said)


def test_what_the_file_has_is_not_measured_again_and_failures_are(model: Checkpoint, tmp_path: Path):
    path = tmp_path / "out.jsonl"
    bad = plan_of(model, [FakePeer("octavo"), FakePeer("other", "--refuse")], "W1", "W3")
    compared(bad, RecordLog(path, append=False), send=run_load)
    again = [FakePeer("octavo"), FakePeer("other")]
    book, _ = compared(plan_of(model, again, "W1", "W3"), RecordLog(path, append=True))
    assert again[0].needs == [] and len(again[1].needs) == 1
    assert all(r.error is None for r in book.runs) and len(book.runs) == 4
    assert sum(isinstance(r, About) for r in book.records) == 2


def test_the_machine_is_probed_before_each_round_and_at_the_end(model: Checkpoint):
    roofs = iter([Roof(read_gb_s=float(i), bf16_gflop_s=1.0) for i in range(10)])
    book, _ = compared(plan_of(model, [FakePeer("other")], "W1", rounds=2), probe_roof=lambda: next(roofs))
    assert [p.before for p in book.probes] == ["tiny bf16 round 1", "tiny bf16 round 2", "the end"]
    shown: list[str] = []
    assert report(plan_of(model, [], "W1"), book, shown.append) == 0
    assert shown[0] == "the machine's limits: 1.0 GB/s read, 1.0 GFLOP/s bf16"


def test_samples_are_in_the_file_and_it_can_be_read_without_octavo(model: Checkpoint, tmp_path: Path):
    path = tmp_path / "out.jsonl"
    compared(plan_of(model, [FakePeer("other")], "W2"), RecordLog(path, append=False))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["about", "run"]
    assert lines[0]["versions"] == {"other": "other 1.0"}
    assert int(lines[0]["machine"]["cores"]) >= 1
    (requests,) = lines[1]["requests"]
    assert len(requests) == 32
    assert len(requests[0]["token_times"]) == requests[0]["output_tokens"] == 128


def test_through_http_from_start_to_table(model: Checkpoint, capsys: pytest.CaptureFixture[str]):
    plan = plan_of(model, [FakePeer("octavo", "--token-s", "0.001"), FakePeer("other", "--token-s", "0.004")], "W1")
    book, _ = compared(plan, send=run_load)
    shown: list[str] = []
    assert report(plan, book, shown.append) == 0
    row = next(line for line in shown[2].splitlines() if "one stream, decode" in line).split()
    assert 1.5 < float(row[-2]) < 40  # four times in quiet; a busy neighbour delays either


def test_sigterm_unwinds_as_an_interruption_does():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), _terminates_as_interrupted():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(10)
    assert signal.getsignal(signal.SIGTERM) is before


def parsed(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_compare_arguments(parser)
    return parser.parse_args(args)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "smollm2-135m-bf16"
    folder.mkdir(parents=True)
    config = {
        "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 16,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_options_choose_works_models_widths_and_peers(home: Path):
    plan = make_plan(
        parsed("--peers-dir", str(home), "--works", "W3,W1", "--widths", "int4,bf16", "--peers", "vllm,octavo")
    )
    assert list(plan.works) == ["W1", "W3"]
    assert list(plan.widths) == ["int4", "bf16"]
    assert [peer.name for peer in plan.peers] == ["vllm", "vllm-eager", "octavo"]
    assert plan.models[0].gguf["int4"] == home / "models/gguf/smollm2-135m-bf16.q4_0.gguf"


def test_more_arguments_for_an_engine_follow_its_own(home: Path):
    plan = make_plan(
        parsed(
            "--peers-dir", str(home), "--peer-args", "llamacpp=-np 8 --alias 'a b'", "--peer-args", "llamacpp=-fa off"
        )
    )
    assert plan.extra_args == {"llamacpp": ("-np", "8", "--alias", "a b", "-fa", "off")}


def test_more_arguments_reach_the_command(model: Checkpoint):
    plan = replace(plan_of(model, [FakePeer("octavo"), FakePeer("other")], "W1"), extra_args={"other": ("--refuse",)})
    book, _ = compared(plan, send=run_load)
    assert {r.peer: r.error is None for r in book.runs} == {"octavo": True, "other": False}


@pytest.mark.parametrize(("mode", "names"), [("eager", ["vllm-eager"]), ("compiled", ["vllm"])])
def test_the_mode_of_vllm_chooses_its_peers(home: Path, mode: str, names: list[str]):
    plan = make_plan(parsed("--peers-dir", str(home), "--peers", "vllm", "--vllm-mode", mode))
    assert [peer.name for peer in plan.peers] == names


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--works", "W1,W9"), "--works takes W1, .*W9"),
        (("--models", "gpt"), "--models takes smollm2, 1b"),
        (("--widths", ""), "--widths takes bf16"),
        (("--peers", "sglang"), "--peers takes octavo"),
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--folder", "smollm2"), "--folder takes NAME=DIR"),
        (("--models", "1b"), "does not describe"),
        (("--peer-args", "sglang=--x"), "--peer-args takes NAME=ARGS"),
    ],
)
def test_a_wrong_option_is_one_sentence(home: Path, args: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        make_plan(parsed("--peers-dir", str(home), *args))


def test_going_on_needs_a_file(home: Path):
    with pytest.raises(OctavoError, match="--out FILE"):
        run_compare(parsed("--peers-dir", str(home), "--append"))


def test_the_table_of_an_earlier_file_is_printed_without_measuring(home: Path, capsys: pytest.CaptureFixture[str]):
    path = home / "out.jsonl"
    book = RecordLog(path, append=False)
    book.add(Probed(before="x", read_gb_s=1.0))
    for peer, value in (("octavo", 30.0), ("vllm", 20.0)):
        book.add(
            BenchRun(work="W1", model="smollm2", width="bf16", peer=peer, round=1, values={"decode_tok_s": (value,)})
        )
    before = path.read_bytes()
    assert run_compare(parsed("--peers-dir", str(home), "--out", str(path), "--table")) == 0
    assert path.read_bytes() == before
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("W1"))
    assert row.split()[-4:] == ["30.0", "20.0", "1.50", "0%"]
