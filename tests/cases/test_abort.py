"""Who leaves costs nothing any more: ABT-01, ABT-02, MET-01."""

import socket
import time
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.support import checkpoints
from tests.support.clients import Visitor, together
from tests.support.live import live, spawn

LEAVES = ["close", "reset", "half_close"]
PATHS = ["/v1/completions", "/v1/chat/completions"]
WITHIN_S = 5.0
POSITIONS = 8192
NOTHING = {"requests_running": 0, "requests_waiting": 0, "kv_blocks_used": 0, "kv_cache_usage_ratio": 0}


def long_model():
    """`tiny-llama` with room for answers that nobody would wait for."""
    return checkpoints.tiny_llama(max_position_embeddings=POSITIONS)


@pytest.fixture(scope="module")
def patient():
    with live(long_model(), num_kv_blocks=4096, num_threads=1, max_num_seqs=64) as server:
        yield server


@pytest.fixture(scope="module")
def real_command():
    """The engine in a process of its own: an abort crosses a socket."""
    options = ["--num-kv-blocks", "4096", "--num-threads", "1", "--block-size", "16", "--dtype", "float32"]
    with spawn(str(long_model()), *options, "--max-num-seqs", "64") as server:
        yield server


def endless(server, path="/v1/completions", stream=True, headers=None, **body):
    """A request that goes on for a long time unless somebody ends it."""
    asked = {"messages": [{"role": "user", "content": "Go on"}]} if "chat" in path else {"prompt": "Go on"}
    more = {"max_tokens": 5000, "temperature": 0, "ignore_eos": True, "stream": stream, **asked, **body}
    return Visitor(server, path, headers, **more)


def until(server, timeout_s=30.0, **wanted):
    """Until gauges have at least these values."""
    end = time.monotonic() + timeout_s
    while any(server.metrics()[f"octavo_{name}"] < value for name, value in wanted.items()):
        assert time.monotonic() < end, (wanted, server.metrics())
        time.sleep(0.02)


def leave_all(visitors, way):
    """All go at once; sockets that were half closed are freed later, by `free`."""
    for visitor in visitors:
        getattr(visitor, way)()


def check_gone(server, visitors=()):
    """Nothing runs, waits or is held; no token is made any more; the next one is served at once."""
    server.wait_metrics(WITHIN_S, **NOTHING)
    made = server.metrics()["octavo_output_tokens_total"]
    time.sleep(0.1)
    now = server.metrics()
    assert now["octavo_output_tokens_total"] == made
    assert all(now[f"octavo_{name}"] == value for name, value in NOTHING.items())
    assert server.http.get("/load").json() == {"requests": 0, "running": 0, "waiting": 0, "kv_usage": 0}
    start = time.monotonic()
    assert server.text("next", max_tokens=2, ignore_eos=True) is not None
    assert time.monotonic() - start < 5
    for visitor in visitors:
        visitor.close()


# ---- ABT-01 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", LEAVES)
def test_abt01_a_closing_a_stream_stops_the_work(patient, path, way):
    visitor = endless(patient, path)
    visitor.read_deltas(3)
    leave_all([visitor], way)
    check_gone(patient, [visitor])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", LEAVES)
def test_abt01_b_closing_a_plain_request_stops_the_work(patient, path, way):
    before = patient.metrics()["octavo_output_tokens_total"]
    visitor = endless(patient, path, stream=False)
    until(patient, output_tokens_total=before + 20)
    leave_all([visitor], way)
    check_gone(patient, [visitor])


@pytest.mark.parametrize("way", LEAVES)
@pytest.mark.parametrize("stream", [True, False])
def test_abt01_c_closing_while_still_queued(way, stream):
    with live(long_model(), num_kv_blocks=2048, num_threads=1, max_num_seqs=2) as server:
        running = [endless(server) for _ in range(2)]
        for visitor in running:
            visitor.read_deltas(2)
        queued = [endless(server, stream=stream) for _ in range(3)]
        until(server, requests_waiting=3)
        leave_all(queued, way)
        server.wait_metrics(WITHIN_S, requests_waiting=0, requests_running=2)
        running[0].read_deltas(10)  # those that stay are served on
        last = endless(server, stream=False, max_tokens=5)
        until(server, requests_waiting=1)
        leave_all(running[:1], way)
        assert b"200 OK" in last.socket.recv(4096), "whoever leaves makes room"
        leave_all(running[1:], way)
        check_gone(server, [*queued, *running, last])


@pytest.mark.parametrize("way", LEAVES)
@pytest.mark.parametrize("stream", [True, False])
def test_abt01_d_closing_during_a_long_prefill(way, stream):
    prompt = np.random.default_rng(1).integers(5, 500, 7000).tolist()
    with live(long_model(), num_kv_blocks=1024, num_threads=1, max_num_batched_tokens=16) as server:
        visitor = endless(server, stream=stream, prompt=prompt, max_tokens=100)
        until(server, kv_blocks_used=8)
        leave_all([visitor], way)
        check_gone(server, [visitor])
        assert server.metrics()["octavo_output_tokens_total"] == 2, "only the next one's tokens were made"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("several", ["answers", "prompts", "both"])
def test_abt01_e_closing_ends_all_answers_of_a_request(patient, stream, several):
    body = {"temperature": 1.0, "seed": 1, "n": 1 if several == "prompts" else 4}
    if several != "answers":
        body["prompt"] = ["Go on", "And on", "Again"]
    visitor = endless(patient, stream=stream, **body)
    until(patient, requests_running=3 if several == "prompts" else 4 if several == "answers" else 12)
    visitor.close()
    check_gone(patient)


@pytest.mark.parametrize("way", LEAVES)
def test_abt01_f_fifty_at_once(patient, way):
    visitors = [endless(patient, PATHS[i % 2], stream=i % 3 > 0) for i in range(50)]
    until(patient, requests_running=50)
    leave_all(visitors, way)
    check_gone(patient, visitors)


@pytest.mark.parametrize("way", LEAVES)
def test_abt01_g_leaving_before_anything_was_answered(patient, way):
    visitors = [endless(patient, stream=i % 2 == 0) for i in range(10)]
    leave_all(visitors, way)
    time.sleep(1)  # until what was sent has arrived, as far as it does
    check_gone(patient, visitors)


def test_abt01_g_leaving_in_the_middle_of_the_request(patient):
    where = urlsplit(patient.url)
    for body in (b"", b'{"prompt": "x", "max_tok'):
        with socket.create_connection((where.hostname, where.port)) as sock:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            sock.sendall(head + b"content-length: 500\r\n\r\n" + body)
            time.sleep(0.05)
    check_gone(patient)


def test_abt01_g_a_reader_that_does_not_read_and_then_leaves(patient):
    """What it has not read is not piled up without limit, and its going is noticed all the same."""
    visitor = endless(patient, return_token_ids=True)
    until(patient, requests_running=1)
    time.sleep(0.5)
    visitor.reset()
    check_gone(patient)


def test_abt01_those_who_stay_get_what_they_would_have_got(patient):
    alone = patient.text("Stay", max_tokens=60, ignore_eos=True)

    def stay():
        return patient.text("Stay", max_tokens=60, ignore_eos=True)

    def go():
        visitor = endless(patient)
        visitor.read_deltas(2)
        visitor.reset()

    found = together([stay, go, go, go, stay, go, go, go])
    assert (found[0], found[4]) == (alone, alone)
    check_gone(patient)


def test_abt01_aborts_are_counted_as_such(patient):
    def finished():
        lines = patient.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if "finished_total{" in line and 'reason="abort"' in line)

    before = finished()
    visitors = [endless(patient, stream=i % 2 == 0) for i in range(6)]
    until(patient, requests_running=6)
    leave_all(visitors, "close")
    check_gone(patient)
    assert finished() == before + 6


@pytest.mark.parametrize("way", LEAVES)
def test_abt01_the_real_command_with_its_engine_in_a_process(real_command, way):
    visitors = [endless(real_command, PATHS[i % 2], stream=i % 3 > 0) for i in range(12)]
    until(real_command, requests_running=12)
    leave_all(visitors, way)
    check_gone(real_command, visitors)


# ---- ABT-02 ----------------------------------------------------------------------------------

DUP = {"x-request-id": "dup"}


def test_abt02_one_id_twice_at_once_gives_two_answers(patient):
    def ask(content):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 40, "temperature": 0}
        whole = {"model": patient.model, "request_id": "dup", "ignore_eos": True, **body}
        answer = patient.http.post("/v1/chat/completions", json=whole, headers=DUP)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "dup"
        data = answer.json()
        return data["id"], data["choices"][0]["message"]["content"]

    contents = ["first", "second", "third", "first"]
    alone = [ask(content)[1] for content in contents]
    found = together([lambda c=c: ask(c) for c in contents])
    assert [text for _, text in found] == alone
    assert len({answer_id for answer_id, _ in found}) == len(contents), "the ids of answers are ours"
    assert len(set(alone)) == 3


def test_abt02_an_id_is_used_again_right_after_an_abort(patient):
    prompts = [f"prompt number {i}" for i in range(5)]
    alone = [patient.text(p, max_tokens=6, ignore_eos=True) for p in prompts]
    start = time.monotonic()
    for i in range(200):
        visitor = endless(patient, headers=DUP, request_id="dup", prompt=f"dropped {i % 3}")
        visitor.read_deltas(1)
        getattr(visitor, ["close", "reset"][i % 2])()
        body = {"prompt": prompts[i % 5], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "request_id": "dup"}
        answer = patient.http.post("/v1/completions", json={"model": patient.model, **body}, headers=DUP)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == alone[i % 5]
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert time.monotonic() - start < 120
    check_gone(patient)


def test_abt02_streams_with_one_id_never_mix(patient):
    def stream(prompt):
        body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "request_id": "same"}
        events = patient.events("/v1/completions", **body)
        assert len({e["id"] for e in events}) == 1
        return "".join(c["text"] for e in events for c in e["choices"])

    prompts = [f"prompt number {i}" for i in range(8)]
    alone = [patient.text(p, max_tokens=30, ignore_eos=True) for p in prompts]
    assert together([lambda p=p: stream(p) for p in prompts]) == alone


@pytest.mark.parametrize("name", ["\u00fc" * 10, "a" * 300, "../../x", "a.b.0", "", "x\ty"])
def test_abt02_strange_ids_are_harmless(patient, name):
    answer = patient.post("/v1/completions", prompt="x", max_tokens=1, request_id=name)
    assert answer.status_code == 200 or (answer.status_code == 400 and "request_id" in answer.text)
    headers = {"x-request-id": name.encode().replace(b"\t", b" ")}
    assert patient.http.get("/v1/models", headers=headers).status_code == 200


# ---- MET-01 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["patient", "real_command"])
def test_met01_gauges_fall_to_zero_without_any_new_request(request, where):
    server = request.getfixturevalue(where)
    visitors = [endless(server, PATHS[i % 2], max_tokens=4000) for i in range(100)]
    until(server, requests_running=64, requests_waiting=36)
    assert server.metrics()["octavo_kv_cache_usage_ratio"] > 0
    leave_all(visitors, "reset")
    server.wait_metrics(WITHIN_S, **NOTHING)
    for _ in range(10):  # and they stay there
        time.sleep(0.05)
        server.wait_metrics(0, **NOTHING)
    assert server.metrics()["octavo_engine_up"] == 1
    assert server.metrics()["octavo_kv_blocks"] == 4096, "cached blocks are neither used nor lost"


def test_met01_gauges_are_zero_after_answers_that_ended_by_themselves(patient):
    together([lambda i=i: patient.text(f"number {i}", max_tokens=5 + i, ignore_eos=True) for i in range(20)])
    patient.wait_metrics(WITHIN_S, **NOTHING)
    patient.post("/v1/completions", prompt="x", max_tokens=-1)
    patient.wait_metrics(0, **NOTHING)
