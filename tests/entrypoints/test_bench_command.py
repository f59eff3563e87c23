"""`octavo bench` on real sockets: figures out, failures shown, wrong options told in one sentence (OPS-8)."""

import json
from xml.etree import ElementTree

import pytest

from octavo.config.args import given_from_flags
from octavo.config.env import read_env
from octavo.entrypoints.cli import main
from octavo.entrypoints.commands.arguments import BENCH, add_arguments
from octavo.entrypoints.commands.bench import serve_arguments
from octavo.plugins.features import server_sections
from tests.bench.scripted import plain, scripted, words
from tests.support import checkpoints
from tests.support.live import live

TINY = ["--num-requests", "4", "--input-len", "6", "--output-len", "3", "--token-ids", "10:500"]
ENGINE = ["--dtype", "float32", "--num-threads", "1", "--max-model-len", "64", "--no-multiprocessing"]


def bench(*args):
    """Run it in this process; the exit code."""
    try:
        return main(["bench", *map(str, args)])
    except SystemExit as left:
        return left.code


def serve(server, *args):
    return bench("serve", "--base-url", server.url, "--model", "m", *TINY, *args)


@pytest.mark.parametrize(
    ("sending", "count"),
    [
        ([], 4),
        (["--concurrency", 2], 4),
        (["--rate", 200], 4),
        (["--rate", 200, "--concurrency", 1], 4),
        (["--rate", 200, "--arrivals", "burst", "--burst-size", 2], 4),
        (["--rate", 200, "--arrivals", "even"], 4),
        (["--rate", 100, "--ramp-to", 400], 4),
        (["--dataset", "shared-prefix", "--prefix-len", 5, "--length-spread", 0.5], 4),
        (["--dataset", "multi-turn", "--turns", 2], 8),
        (["--dataset", "multi-turn", "--turns", 2, "--text"], 8),
    ],
)
def test_serve_measures_each_kind_of_work(sending, count, capsys):
    with scripted() as server:
        assert serve(server, *sending) == 0
    assert len(server.requests) == count + 1  # and one to warm up
    out = capsys.readouterr().out
    assert f"{count} of {count} requests answered" in out
    for word in ("TTFT", "TPOT", "ITL", "E2E", "tokens per s", "client"):
        assert word in out


def test_serve_without_a_rate_sends_all_at_once_and_with_concurrency_so_many():
    with scripted() as server:
        assert serve(server, "--concurrency", 1, "--num-warmups", 0) == 0
    assert (len(server.requests), server.max_open) == (4, 1)


def test_serve_writes_json_a_plot_and_the_goodput(tmp_path, capsys):
    out, svg = tmp_path / "out.json", tmp_path / "plot.svg"
    with scripted() as server:
        code = serve(
            server, "--output-json", out, "--details", "--plot", svg, "--api-key", "secret", "--extra-body", '{"top_k": 2}',
            "--goodput", "ttft:60000", "tpot:60000",
        )  # fmt: skip
    assert code == 0
    found = json.loads(out.read_text())
    assert found["summary"]["num_ok"] == found["summary"]["num_good"] == 4
    assert found["summary"]["output_tokens"] == 12
    assert len(found["requests"]) == 4
    assert "secret" not in out.read_text()
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "4 requests met ttft <= 60000 ms, tpot <= 60000 ms" in capsys.readouterr().out
    assert all(r.body["top_k"] == 2 for r in server.requests)


def test_json_can_take_the_place_of_the_table(capsys):
    with scripted() as server:
        assert serve(server, "--output-json", "-") == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "serve"


async def refuses(request):
    yield plain(500, {"error": {"message": "broken"}})


async def refuses_some(request):
    if request.body["prompt"][0] % 2:
        yield plain(429, {"error": {"message": "full"}})
        return
    async for piece in words(request):
        yield piece


def test_a_run_whose_requests_all_fail_exits_with_1_and_shows_why(capsys):
    with scripted(refuses) as server:
        assert serve(server) == 1
    assert "FAILED: 4 requests\n  4 x HTTP 500: broken" in capsys.readouterr().out


def test_a_run_with_some_failures_shows_them_and_exits_with_0(capsys):
    with scripted(refuses_some) as server:
        assert serve(server, "--num-requests", 20) == 0
    assert "x HTTP 429: full" in capsys.readouterr().out


def test_a_file_of_prompts_is_sent_as_it_is(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "max_tokens": 2}\n{"prompt": "two", "completion": "12345678"}\n')
    with scripted() as server:
        code = bench("serve", "--base-url", server.url, "--model", "m", "--dataset", "file", "--file", path)
    assert code == 0
    assert [(r.body["prompt"], r.body["max_tokens"]) for r in server.requests[1:]] == [("one", 2), ("two", 2)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--concurrency", "0"], "--concurrency: must be a whole number of at least 1, got '0'"),
        (["serve", "--concurrency", "1.5"], "--concurrency: must be a whole number"),
        (["serve", "--rate", "inf"], "--rate: must be a number above 0"),
        (["serve", "--rate", "nan"], "--rate: must be a number above 0"),
        (["serve", "--rate", "-1"], "--rate: must be a number above 0"),
        (["serve", "--length-spread", "1"], "--length-spread: must be at least 0 and below 1"),
        (["serve", "--token-ids", "9:3"], "--token-ids: must be LOW:HIGH"),
        (["serve", "--extra-body", "[1]"], "--extra-body: must be a JSON object"),
        (["serve", "--dataset", "rndom"], "--dataset: invalid choice: 'rndom'"),
        (["serve", "--concurency", "3"], "did you mean --concurrency?"),
        (["serve", "--goodput", "ttft"], "--goodput takes NAME:MILLISECONDS"),
        (["serve", "--ramp-to", "3"], "--ramp-to needs --rate"),
        (["serve", "--arrivals", "burst"], "--arrivals burst needs --rate"),
        (["serve", "--rate", "1", "--arrivals", "even", "--ramp-to", "3"], "--ramp-to goes with Poisson"),
        (["serve", "--dataset", "file"], "--dataset file and --file FILE go together"),
        (["serve", "--file", "x"], "--dataset file and --file FILE go together"),
        (["serve", "--dataset", "file", "--file", "absent.jsonl"], "absent.jsonl cannot be read: No such file"),
        (["serve", "--output-json", "absent/x.json"], "its folder does not exist"),
        (["serve", "--base-url", "http://h", "--start", "m"], "give it or --base-url, not both"),
        (["serve", "--start"], "--start needs the arguments"),
        (["serve", "--base-url", "ftp://h"], "is not the URL of a server"),
        (["latency", "--batch-size", "0"], "--batch-size: must be a whole number"),
        (["throughput", "--dataset", "multi-turn"], "--dataset: invalid choice"),
        (["startup", "--runs", "no"], "--runs: must be a whole number"),
        (["compare", "--works", "W99"], "--works takes W1"),
        (["sreve"], "unknown command 'bench sreve'; did you mean 'bench serve'?"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_exit_code_2(args, words, capsys):
    assert bench(*args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_the_self_test_prints_the_ceiling(capsys, tmp_path):
    out = tmp_path / "x.json"
    assert bench("serve", "--self-test", "--output-json", out) == 0
    assert "streamed events per second on one core" in capsys.readouterr().out
    assert json.loads(out.read_text())["ceiling_chunks_s"] > 1000


def test_the_ceiling_stands_beside_the_figures_on_demand(capsys):
    with scripted() as server:
        assert serve(server, "--ceiling") == 0
    assert "it could take" in capsys.readouterr().out


@pytest.mark.parametrize("api", [["--api", "completions"], ["--api", "chat"]])
def test_serve_asks_a_real_server_for_its_model_and_measures_it(api, capsys):
    with live(checkpoints.tiny_llama()) as server:
        assert bench("serve", "--base-url", server.url, *TINY, *api, "--concurrency", 2) == 0
    out = capsys.readouterr().out
    assert "4 of 4 requests answered" in out
    assert "(12 tokens)" in out


@pytest.mark.slow
def test_serve_starts_a_server_of_its_own(capsys):
    assert bench("serve", *TINY, "--start", checkpoints.tiny_llama(), *ENGINE) == 0
    captured = capsys.readouterr()
    assert "4 of 4 requests answered" in captured.out
    assert "ready after" in captured.err


def test_a_server_that_does_not_start_ends_the_measurement_with_its_words(capsys, tmp_path):
    assert bench("serve", *TINY, "--start", tmp_path / "absent") == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the server ended before it was ready" in last
    assert "absent" in last


def test_latency_and_throughput_measure_the_engine(capsys, tmp_path):
    out = tmp_path / "x.json"
    work = ["--input-len", 6, "--output-len", 3, "--token-ids", "10:500", "--output-json", out]
    assert bench("latency", checkpoints.tiny_llama(), *ENGINE, *work, "--iterations", 2, "--num-warmups", 1) == 0
    assert "2 batches of 1, 6 tokens in, 3 out" in capsys.readouterr().out
    assert json.loads(out.read_text())["latency"]["e2e_s"]["num"] == 2
    assert bench("throughput", checkpoints.tiny_llama(), *ENGINE, *work, "--num-requests", 3) == 0
    assert "3 of 3 requests answered" in capsys.readouterr().out
    assert json.loads(out.read_text())["throughput"]["output_tokens"] == 9


def test_startup_gives_the_server_the_options_that_were_given_to_it():
    from octavo.config.flags import Parser

    parser = Parser(prog="x")
    add_arguments(parser, BENCH["startup"])
    args = ["m", "--max-model-len", "8k", "--no-multiprocessing", "--api-key", "-a", "--api-key=b", "--runs", "1"]
    args[args.index("-a") - 1 : args.index("-a") + 1] = ["--api-key=-a"]
    namespace = parser.parse_args(args)
    found = serve_arguments(given_from_flags(namespace, server_sections(), read_env()), "c.yaml")
    assert found[:2] == ["--config", "c.yaml"]
    assert sorted(found[2:]) == sorted(
        ["--model=m", "--max-model-len=8000", "--no-multiprocessing", "--api-key=-a", "--api-key=b"]
    )


def test_startup_times_the_real_command_to_ready_and_to_the_first_token(capsys, tmp_path):
    out = tmp_path / "x.json"
    options = ["--token-ids", "10:500", "--input-len", 4, "--runs", 1, "--cold", "--output-json", out]
    assert bench("startup", checkpoints.tiny_llama(), *options, *ENGINE) == 0
    assert "dropped from the file cache" in capsys.readouterr().out
    (run,) = json.loads(out.read_text())["startup"]["runs"]
    assert 0 < run["ready_s"] < run["first_token_s"]
    assert "loading weights" in run["stages"]
    assert sum(run["stages"].values()) < run["ready_s"] + 0.1  # each is rounded to hundredths
