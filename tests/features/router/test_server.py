"""The router over real sockets: hand-over, retries, breaks, and servers that fail in every way (PDX-12, PDX-13)."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from octavo.config.schema import ServerConfig
from octavo.features.router.prompt import Prompt
from octavo.kvcache.published import Narrator, Scheme
from tests.entrypoints.http.events import check_error
from tests.support.fake_instance import FakeInstance
from tests.support.http_server import wait_until
from tests.support.routed import Routed, read_event, routed, words

LONG = "word " * 100
SHORT = "hi"


@contextmanager
def fakes(*names: str, **options: Any) -> Iterator[list[FakeInstance]]:
    """Servers of these names."""
    with ExitStack() as stack:
        yield [stack.enter_context(FakeInstance(name, **options)) for name in names]


@contextmanager
def pair(**config: Any) -> Iterator[tuple[Routed, dict[str, FakeInstance]]]:
    """Two servers for each purpose."""
    names = ("p1", "p2", "d1", "d2", "w1")
    with fakes(*names) as made:
        by_name = dict(zip(names, made, strict=True))
        with routed(prefill=made[:2], decode=made[2:4], plain=made[4:], **config) as router:
            yield router, by_name


def told(*instances: FakeInstance) -> dict[str, int]:
    """How many generating requests came to each."""
    return {one.name: len(one.generating()) for one in instances}


# ---- prefill, then decode ----


@pytest.mark.parametrize("streamed", [False, True])
def test_the_prompt_is_computed_on_one_server_and_the_answer_made_on_another(streamed: bool) -> None:
    body = {"model": "m", "prompt": LONG, "max_tokens": 40, "min_tokens": 3, "temperature": 0, "stream": streamed}
    with fakes("p") as (p,), fakes("d") as (d,), routed(prefill=[p], decode=[d]) as router:
        answer = router.http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-octavo-instance"] == d.host
        assert answer.headers["x-octavo-prefill-instance"] == p.host
        (first,), (second,) = p.generating(), d.generating()
        assert first.body == {
            "model": "m", "prompt": LONG, "max_tokens": 1, "temperature": 0, "stream": False,
            "kv_transfer_params": {"do_remote_decode": True},
        }  # fmt: skip
        assert second.body == {**body, "kv_transfer_params": {"lease": "p-1", "host": "127.0.0.1", "port": 7}}
        if streamed:
            events = [read_event(line) for line in answer.text.split("\n") if line.startswith("data: ")]
            assert words(events) == d.said() and events[-1] == "[DONE]"
        else:
            assert answer.json()["choices"][0]["text"] == " ".join(d.said())
        router.wait_figure(1, "requests_total", outcome="done")
        assert router.figure("fallbacks_total", leg="prefill") == 0


def test_a_chat_is_handed_over_on_its_own_route() -> None:
    with fakes("p") as (p,), fakes("d") as (d,), routed(prefill=[p], decode=[d]) as router:
        body = {"messages": [{"role": "user", "content": LONG}], "max_completion_tokens": 30}
        assert router.http.post("/v1/chat/completions", json=body).status_code == 200
        assert [one.path for one in (*p.asked, *d.asked)] == ["/v1/chat/completions"] * 2
        assert p.asked[0].body["max_completion_tokens"] == 1 and d.asked[0].body["max_completion_tokens"] == 30


@pytest.mark.parametrize(
    "body",
    [{"prompt": SHORT}, {"prompt": LONG, "echo": True}, {"prompt": LONG, "n": 2}, {"prompt": [LONG, LONG]},
     {"prompt": LONG, "max_tokens": 1}, {"prompt": LONG, "prompt_logprobs": 1}],
)  # fmt: skip
def test_what_gains_nothing_goes_whole_to_a_plain_server_and_unchanged(body: dict[str, Any]) -> None:
    with pair() as (router, servers):
        answer = router.complete(**body)
        assert answer.status_code == 200 and answer.headers["x-octavo-instance"] == servers["w1"].host
        assert "x-octavo-prefill-instance" not in answer.headers
        assert told(*servers.values()) == {"p1": 0, "p2": 0, "d1": 0, "d2": 0, "w1": 1}
        assert servers["w1"].asked[0].body == body


def test_a_server_may_be_there_for_both() -> None:
    with fakes("a", "b") as (a, b), routed(prefill=[a, b], decode=[a, b]) as router:
        assert router.complete(prompt=LONG).status_code == 200
        assert told(a, b)["a"] + told(a, b)["b"] == 2


@pytest.mark.parametrize("failure", ["reset", 502, 503, 504, 500, "babble", "not json"])
def test_when_one_prefill_server_fails_another_is_asked(failure: Any) -> None:
    with pair() as (router, servers):
        p1, p2 = servers["p1"], servers["p2"]
        p1.behaviours.append(failure)
        p2.behaviours.append(failure)
        first = router.complete(prompt=LONG)  # whoever was asked first has failed; then the other, too
        assert first.status_code == 200 and "x-octavo-prefill-instance" not in first.headers
        assert told(p1, p2) == {"p1": 1, "p2": 1}
        assert router.figure("fallbacks_total", leg="prefill") == 1
        assert "kv_transfer_params" not in servers["w1"].generating()[0].body
        p1.behaviours.append(failure)
        p2.behaviours.append("well")
        for _ in range(2):
            answer = router.complete(prompt=LONG)
            assert answer.headers["x-octavo-prefill-instance"] in (p1.host, p2.host)


def test_a_prefill_server_that_keeps_nothing_makes_the_request_go_whole() -> None:
    with fakes("p") as (p,), fakes("d") as (d,), routed(prefill=[p], decode=[d]) as router:
        p.behaviours.append("no params")
        answer = router.complete(prompt=LONG)
        assert answer.status_code == 200 and answer.headers["x-octavo-instance"] == d.host
        assert "kv_transfer_params" not in d.asked[0].body
        assert router.figure("fallbacks_total", leg="prefill") == 1


def test_without_any_prefill_server_whole_requests_are_served() -> None:
    with fakes("p") as (p,), fakes("d") as (d,), routed(prefill=[p], decode=[d]) as router:
        p.stop()
        router.wait_state(p, "down")
        answer = router.complete(prompt=LONG)
        assert answer.status_code == 200 and "kv_transfer_params" not in d.asked[0].body
        assert router.figure("fallbacks_total", leg="prefill") == 1


@pytest.mark.parametrize("failure", ["reset", 503, "reset before the first byte", "babble"])
def test_when_a_decode_server_dies_before_its_answer_another_gets_the_same_parameters(failure: Any) -> None:
    with fakes("p") as (p,), fakes("d1", "d2") as (d1, d2), routed(prefill=[p], decode=[d1, d2]) as router:
        d1.behaviours.append(failure)
        for _ in range(2):  # one of the two is asked first the first or the second time
            events = router.stream(prompt=LONG)
            assert words(events) == d2.said() or words(events) == d1.said()
        assert told(p) == {"p": 2}
        retried = [one.body["kv_transfer_params"]["lease"] for one in (*d1.generating(), *d2.generating())]
        assert len(retried) == 3 and len(set(retried)) == 2
        assert router.figure("fallbacks_total", leg="decode") == 0


def test_when_every_decode_server_fails_one_serves_the_whole_request() -> None:
    with pair() as (router, servers):
        servers["d1"].behaviours.append("reset")
        servers["d2"].behaviours.append("reset")
        answer = router.complete(prompt=LONG)
        assert answer.status_code == 200 and answer.headers["x-octavo-instance"] == servers["w1"].host
        assert "kv_transfer_params" not in servers["w1"].asked[0].body
        assert router.figure("fallbacks_total", leg="decode") == 1
        assert router.figure("retries_total", leg="decode", failure="lost") == 2


# ---- retries ----


FAILURES = ["reset", 502, 503, 504, "draining", "babble"]


@pytest.mark.parametrize(
    ("failure", "streamed"),
    [(f, s) for f in FAILURES for s in (False, True)] + [("reset before the first byte", True)],
)
def test_before_the_first_byte_another_server_is_asked(failure: Any, streamed: bool) -> None:
    with fakes("a", "b") as (a, b), routed(plain=[a, b]) as router:
        a.behaviours.append(failure)
        b.behaviours.append("well")
        for _ in range(2):
            answer = router.http.post("/v1/completions", json={"prompt": SHORT, "stream": streamed})
            assert answer.status_code == 200, answer.text
        assert sum(told(a, b).values()) == 3


def test_a_server_that_is_silent_for_too_long_is_left_for_another() -> None:
    with fakes("a", "b") as (a, b), routed(plain=[a, b], first_byte_timeout_s=0.3) as router:
        a.behaviours.append("freeze")
        b.behaviours.append("freeze")
        assert check_error(router.complete(prompt=SHORT), 502)["code"] == "instance_failed"
        assert told(a, b) == {"a": 1, "b": 1}
        a.behaviours.append("freeze")
        assert [router.complete(prompt=SHORT).status_code for _ in range(2)] == [200, 200]
        router.wait_figure(1, "requests_total", outcome="unserved")


def test_a_server_whose_process_is_gone_is_down_at_once_and_comes_back() -> None:
    with fakes("a", "b") as (a, b), routed(plain=[a, b], health_interval_s=0.5) as router:
        a.stop()
        assert [router.complete(prompt=SHORT).headers["x-octavo-instance"] for _ in range(4)] == [b.host] * 4
        assert router.router.fleet[a.host].health.state == "down"
        a.start()
        router.wait_state(a, "up")
        assert {router.complete(prompt=SHORT).headers["x-octavo-instance"] for _ in range(4)} == {a.host, b.host}


def test_a_server_that_answers_no_checks_is_given_up_with_what_waits_there() -> None:
    with fakes("a", "b") as (a, b), routed(plain=[a, b], health_timeout_s=0.2) as router:
        a.behaviours.append("freeze")
        b.behaviours.append("freeze")
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(router.complete(prompt=SHORT)))
        thread.start()
        assert wait_until(lambda: len(a.asked) + len(b.asked) == 1)
        frozen, other = (a, b) if a.asked else (b, a)
        other.behaviours.clear()
        frozen.health = "freeze"
        thread.join(15)
        assert answers[0].status_code == 200 and answers[0].headers["x-octavo-instance"] == other.host
        assert router.router.fleet[frozen.host].health.state == "down"
        assert router.figure("retries_total", leg="whole", failure="given_up") == 1
        frozen.released.set()
        frozen.health = "ok"
        router.wait_state(frozen, "up")


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 500, 501])
def test_what_a_server_refuses_is_relayed_as_it_is_and_never_asked_again(status: int) -> None:
    with fakes("a", "b") as (a, b), routed(plain=[a, b]) as router:
        a.behaviours.append(status)
        b.behaviours.append(status)
        answer = router.complete(prompt=SHORT)
        assert answer.status_code == status and answer.json()["error"]["message"].endswith(f"says {status}")
        assert sum(told(a, b).values()) == 1
        router.wait_figure(1, "requests_total", outcome="refused")


def test_what_the_prefill_server_refuses_is_relayed_too() -> None:
    with fakes("p") as (p,), fakes("d") as (d,), routed(prefill=[p], decode=[d]) as router:
        p.behaviours.append(400)
        answer = router.complete(prompt=LONG)
        assert answer.status_code == 400 and answer.headers["x-octavo-instance"] == p.host
        assert told(d) == {"d": 0}


def test_when_all_say_503_the_last_ones_own_words_are_relayed() -> None:
    with fakes("a", "b") as (a, b), routed(plain=[a, b]) as router:
        a.behaviours.append(503)
        b.behaviours.append(503)
        answer = router.complete(prompt=SHORT)
        assert answer.status_code == 503 and answer.json()["error"]["message"].endswith("says 503")


def test_a_draining_server_is_passed_over_and_not_called_down() -> None:
    with fakes("a", "b") as (a, b), routed(plain=[a, b]) as router:
        a.health = "draining"
        router.wait_state(a, "draining")
        assert {router.complete(prompt=SHORT).headers["x-octavo-instance"] for _ in range(4)} == {b.host}
        assert router.figure("instance_state", instance=a.host, state="draining") == 1
        assert router.figure("instance_up", instance=a.host) == 0
        b.behaviours.append("draining")
        answer = router.complete(prompt=SHORT)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert check_error(router.complete(prompt=SHORT), 503)["code"] == "no_instance"


def test_where_nobody_is_the_answer_says_so_at_once() -> None:
    with fakes("a") as (a,):
        a.stop()
        with routed(plain=[a]) as router:
            error = check_error(router.complete(prompt=SHORT), 503)
            assert error["code"] == "no_instance" and error["type"] == "server_error"
            assert f"{a.host} is down" in error["message"]
            check_error(router.http.get("/health"), 503)
            check_error(router.http.get("/v1/models"), 503)
            a.start()
            router.wait_state(a, "up")
            assert router.http.get("/health").json() == {"status": "ok"}
            assert router.complete(prompt=SHORT).status_code == 200


# ---- streams ----


def test_a_stream_is_relayed_as_it_comes() -> None:
    with fakes("a") as (a,), routed(plain=[a]) as router:
        a.behaviours.append("freeze in the stream")
        with router.http.stream("POST", "/v1/completions", json={"prompt": SHORT, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            assert words([read_event(next(lines))]) == ["a-0"]  # while the server holds the rest back
            router.wait_figure(1, "instance_in_flight", instance=a.host)
            a.released.set()
            assert words([read_event(line) for line in lines]) == ["a-1", "a-2"]
        router.wait_figure(0, "instance_in_flight", instance=a.host)


def test_events_reach_the_client_whole_however_they_come() -> None:
    with fakes("a") as (a,), routed(plain=[a]) as router:
        a.behaviours.append("split an event")
        with router.http.stream("POST", "/v1/completions", json={"prompt": SHORT, "stream": True}) as answer:
            chunks = [chunk for chunk in answer.iter_raw() if chunk]
        assert all(chunk.endswith(b"\n\n") for chunk in chunks)
        assert b"".join(chunks).count(b"data: ") == 4


@pytest.mark.parametrize("failure", ["reset in the stream", "reset in an event"])
def test_after_the_first_byte_a_break_is_told_in_the_stream_and_nobody_else_is_asked(failure: str) -> None:
    with fakes("a", "b") as (a, b), routed(plain=[a, b]) as router:
        for one in (a, b):
            one.behaviours.append(failure)
        with router.http.stream("POST", "/v1/completions", json={"prompt": SHORT, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert words([read_event(next(lines))])[0].endswith("-0")
            a.released.set()
            b.released.set()
            (event,) = [read_event(line) for line in lines]  # whole, although the server stopped inside one
        assert set(event) == {"error"} and event["error"]["type"] == "server_error"
        assert "broke off" in event["error"]["message"]
        assert sum(told(a, b).values()) == 1
        router.wait_figure(1, "requests_total", outcome="broken")


def test_a_stream_from_a_server_that_answers_no_checks_is_ended() -> None:
    with fakes("a") as (a,), routed(plain=[a], health_timeout_s=0.2) as router:
        a.behaviours.append("freeze in the stream")
        with router.http.stream("POST", "/v1/completions", json={"prompt": SHORT, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(lines)
            a.health = "freeze"
            (event,) = [read_event(line) for line in lines]
        assert "broke off" in event["error"]["message"]


def test_silence_in_a_stream_is_commented_between_events() -> None:
    with fakes("a") as (a,), routed(plain=[a], server=ServerConfig(stream_keep_alive_s=0.05)) as router:
        a.behaviours.append("freeze in the stream")
        with router.http.stream("POST", "/v1/completions", json={"prompt": SHORT, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines).startswith("data: ")
            assert next(lines).startswith(":")
            a.released.set()
            assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"


def test_a_client_that_goes_away_ends_the_request_behind_the_router_at_once() -> None:
    with fakes("a") as (a,), routed(plain=[a]) as router:
        a.behaviours.append("endless")
        with router.http.stream("POST", "/v1/completions", json={"prompt": SHORT, "stream": True}) as answer:
            next(answer.iter_lines())
        assert a.left.wait(5)
        router.wait_figure(1, "requests_total", outcome="client_gone")
        router.wait_figure(0, "instance_in_flight", instance=a.host)


def test_a_client_that_goes_away_before_the_answer_ends_it_too() -> None:
    with fakes("a") as (a,), routed(plain=[a]) as router:
        a.behaviours.append("freeze")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{router.url}/v1/completions", json={"prompt": SHORT}, timeout=0.3)
        router.wait_figure(1, "requests_total", outcome="client_gone")
        router.wait_figure(0, "instance_in_flight", instance=a.host)


# ---- choice ----


def test_load_is_spread_over_equal_servers() -> None:
    with fakes("a", "b", "c") as made, routed(plain=made) as router:
        for _ in range(9):
            assert router.complete(prompt=SHORT).status_code == 200
        assert set(told(*made).values()) == {3}


def test_a_prompt_goes_to_the_server_whose_cache_holds_it() -> None:
    scheme = Scheme(hash="sha256", hash_block_size=16, block_size=16)
    prompt = "a conversation that comes back, again and again, to the one who knows it"
    held = Prompt(tuple(prompt.encode())).hashes(16)
    with fakes("a", "b", tells=True) as (a, b), routed(plain=[a, b]) as router:
        teller = Narrator("e", scheme)
        for one, hashes in ((a, []), (b, held)):
            for note in (teller if one is b else Narrator("f", scheme)).opening(hashes):
                one.notes.put(note)
        assert wait_until(lambda: len(router.router.fleet[b.host].mirror) == 4, 10.0)
        for body in ({"prompt": prompt}, {"prompt": list(prompt.encode())}, {"prompt": prompt + " and more of it"}):
            assert router.complete(**body).headers["x-octavo-instance"] == b.host
        assert router.figure("choices_total", leg="whole", reason="held") == 3
        assert router.figure("held_tokens_total") == 3 * 64
        assert any(one.path.endswith("/render") for one in (*a.asked, *b.asked))
        salted = {router.complete(prompt=prompt, cache_salt="s").headers["x-octavo-instance"] for _ in range(4)}
        assert salted == {a.host, b.host}
        b.notes.put(None)  # the stream ends: nothing is known any more
        assert wait_until(lambda: len(router.router.fleet[b.host].mirror) == 0)
        assert wait_until(lambda: len(b.followed_with) == 2, 10.0)


def test_a_gap_in_what_a_server_tells_starts_it_over() -> None:
    scheme = Scheme(hash="sha256", hash_block_size=16, block_size=16)
    with fakes("a", tells=True) as (a,), routed(plain=[a]) as router:
        notes = [*Narrator("e", scheme).opening([b"x" * 32])]
        mirror = router.router.fleet[a.host].mirror
        for note in (notes[0], notes[1]):
            a.notes.put(note)
        assert wait_until(lambda: len(mirror) == 1, 10.0)
        a.notes.put(notes[1])  # again: not what follows
        assert wait_until(lambda: len(mirror) == 0)
        a.notes.put(None)  # for the old stream, if it is still read
        assert wait_until(lambda: len(a.followed_with) == 2, 10.0)


# ---- as a server ----


def test_headers_of_the_client_are_passed_on_and_its_id_comes_back() -> None:
    with fakes("p") as (p,), fakes("d") as (d,), routed(prefill=[p], decode=[d]) as router:
        headers = {"authorization": "Bearer secret", "x-request-id": "mine", "traceparent": "00-1-2-3", "cookie": "no"}
        answer = router.http.post("/v1/completions", json={"prompt": LONG}, headers=headers)
        assert answer.headers["x-request-id"] == "mine"
        for one in (*p.asked, *d.asked):
            assert one.headers["authorization"] == "Bearer secret" and one.headers["x-request-id"] == "mine"
            assert one.headers["traceparent"] == "00-1-2-3" and "cookie" not in one.headers


def test_the_routers_own_keys_guard_it_and_open_the_events_of_its_servers() -> None:
    with fakes("a", tells=True) as (a,), routed(plain=[a], server=ServerConfig(api_key=("k",))) as router:
        assert wait_until(lambda: a.followed_with == ["Bearer k"])
        check_error(router.complete(prompt=SHORT), 401)
        assert router.http.get("/health").status_code == 200
        answer = router.http.post("/v1/completions", json={"prompt": SHORT}, headers={"authorization": "Bearer k"})
        assert answer.status_code == 200


def test_bodies_are_read_as_a_server_reads_them() -> None:
    with fakes("a") as (a,), routed(plain=[a], server=ServerConfig(max_request_bytes=1000)) as router:
        check_error(router.complete(prompt="x" * 2000), 413)
        check_error(router.http.post("/v1/completions", content=b"{"), 400)
        check_error(router.http.post("/v1/completions", json=[1]), 400)
        check_error(router.http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 415)
        check_error(router.http.get("/nothing"), 404)
        check_error(router.http.get("/v1/completions"), 405)
        assert told(a) == {"a": 0}


def test_a_client_cannot_choose_what_servers_connect_to() -> None:
    with fakes("a") as (a,), routed(plain=[a]) as router:
        params = {"host": "10.0.0.1", "port": 1}
        check_error(router.complete(prompt=LONG, kv_transfer_params=params), 400, param="kv_transfer_params")
        assert told(a) == {"a": 0}
        assert router.complete(prompt=LONG, kv_transfer_params=None).status_code == 200


def test_models_are_those_of_a_server_behind_the_router() -> None:
    with fakes("a") as (a,), routed(plain=[a]) as router:
        answer = router.http.get("/v1/models")
        assert answer.json()["data"][0]["by"] == "a" and answer.headers["x-octavo-instance"] == a.host
        check_error(router.http.get("/v1/models/other"), 404)


def test_a_router_that_stops_refuses_and_lets_what_runs_end() -> None:
    with fakes("a") as (a,), routed(plain=[a]) as router:
        a.behaviours.append("freeze in the stream")
        with router.http.stream("POST", "/v1/completions", json={"prompt": SHORT, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(lines)
            router.router.gate.stop()
            assert check_error(httpx.post(f"{router.url}/v1/completions", json={"prompt": "x"}), 503)["code"] == (
                "server_stopping"
            )
            check_error(httpx.get(f"{router.url}/ready"), 503)
            a.released.set()
            assert [*lines][-1] == "data: [DONE]"


def test_many_requests_over_servers_that_fail_at_random_all_end() -> None:
    """PDX-13: every request ends with an answer or an explicit error, and nothing is left under way."""
    names = ("p1", "p2", "d1", "d2", "w1")
    faults = ["well", "reset", 503, "well", "reset in the stream", "babble", "no params", "well", 504, "not json"]
    with fakes(*names) as made, routed(prefill=made[:2], decode=made[2:4], plain=made[4:]) as router:
        for place, one in enumerate(made):
            one.released.set()
            one.behaviours.extend(faults[(place + i) % len(faults)] for i in range(60))
        results: list[str] = []

        def ask(number: int) -> None:
            body = {"prompt": LONG if number % 3 else SHORT, "stream": number % 2 == 0}
            answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=30)
            text = answer.text
            if answer.status_code != 200:
                results.append(json.loads(text)["error"]["message"] and "error")
            elif body["stream"]:
                events = [read_event(line) for line in text.split("\n") if line.startswith("data: ")]
                last = events[-1] if events else "[DONE]"  # some say something else than a stream
                results.append("done" if last == "[DONE]" else "error" if last["error"]["message"] else "")
            else:
                results.append("done" if text else "")

        threads = [threading.Thread(target=lambda k=k: [ask(k * 15 + i) for i in range(15)]) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == 120 and set(results) <= {"done", "error"} and results.count("done") > 60
        assert wait_until(lambda: all(m.in_flight == 0 for m in router.router.fleet.members))


@pytest.mark.parametrize("roles", ["plain", "hand-over"])
def test_the_context_is_the_shortest_on_the_way(roles: str) -> None:
    """F25: the router advertised the longer one, and prompts between got a 400."""
    with fakes("a", "b") as (a, b):
        a.length, b.length = 512, 256
        ways = {"plain": [a, b]} if roles == "plain" else {"prefill": [b], "decode": [a]}
        with routed(**ways) as router:
            router.wait_state(a, "up")
            router.wait_state(b, "up")
            (card,) = router.http.get("/v1/models").json()["data"]
            assert card["max_model_len"] == 256
            b.stop()
            router.wait_state(b, "down")
            assert router.http.get("/v1/models").json()["data"][0]["max_model_len"] == 512


@pytest.mark.parametrize("word", ["engine_silent", "starting"])
def test_a_server_that_says_it_is_not_well_is_out_at_once_and_comes_back(word: str) -> None:
    """F30, F69: its own word counts without a second check; what had not begun is asked of another."""
    with fakes("a", "b") as (a, b), routed(plain=[a, b], health_failures=100, health_interval_s=0.1) as router:
        a.health = word
        router.wait_state(a, "down")
        assert f"it is {word}" in router.router.fleet[a.host].health.why
        assert {router.complete(prompt=SHORT).headers["x-octavo-instance"] for _ in range(4)} == {b.host}
        a.health = "ok"
        router.wait_state(a, "up")


def test_another_kind_of_server_is_asked_for_its_health() -> None:
    with fakes("a") as (a,):
        a.knows_ready = False
        with routed(plain=[a]) as router:
            assert router.complete(prompt=SHORT).status_code == 200
            a.health = "freeze"
            router.wait_state(a, "down")
