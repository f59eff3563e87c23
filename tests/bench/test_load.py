"""The load generator sends when it should, times what comes, and hides no failure (OPS-8)."""

import asyncio
import json
import socket
import threading
from itertools import pairwise

import pytest

from octavo.base.errors import ConfigError
from octavo.bench.load import LoadTarget, ceilings, own_ceiling, run, run_load
from octavo.bench.workloads import Item, Workload, multi_turn, random_prompts
from tests.bench.scripted import END, STREAM_HEAD, chunk, event, plain, scripted, token, usage, words
from tests.support import checkpoints
from tests.support.live import live


def target(server, **more):
    return LoadTarget(base_url=getattr(server, "url", server), model="m", **{"timeout_s": 30.0, **more})


def work(num, max_tokens=5, **more):
    items = tuple(Item(prompt=(i, i + 1), max_tokens=max_tokens) for i in range(num))
    return Workload(name="w", items=items, **{"concurrency": 4, **more})


def test_each_item_gives_a_sample_in_order_with_its_tokens_and_times():
    with scripted() as server:
        items = tuple(Item(prompt=(1,), max_tokens=n) for n in (3, 1, 8))
        result = run_load(target(server), Workload(name="w", items=items, concurrency=2))
    assert [s.output_tokens for s in result.samples] == [3, 1, 8]
    assert [len(s.token_times) for s in result.samples] == [3, 1, 8]
    for s in result.samples:
        assert s.ok
        assert not s.counted
        assert s.prompt_tokens == 7
        assert 0 <= s.start_s <= s.first_token_s == s.token_times[0]
        assert list(s.token_times) == sorted(s.token_times)
        assert s.token_times[-1] <= s.end_s
    assert result.wall_s == max(s.end_s for s in result.samples) - min(s.start_s for s in result.samples)
    assert result.client.num_chunks == 3 + 1 + 8 + 3 * 2  # and usage and [DONE]
    assert result.client.cpu_s > 0


def test_a_closed_loop_never_opens_more_than_it_may_and_keeps_its_connections():
    with scripted() as server:
        result = run_load(target(server), work(20, concurrency=3))
    assert all(s.ok for s in result.samples)
    assert server.max_open <= 3
    assert server.num_connections <= 3
    assert sorted(r.body["prompt"][0] for r in server.requests) == list(range(20))


def test_an_open_loop_sends_whatever_the_server_does():
    arrived = threading.Semaphore(0)
    everybody = asyncio.Event()

    async def waits_for_all(request):
        arrived.release()
        if len(state.requests) == 6:
            everybody.set()
        await everybody.wait()
        async for piece in words(request):
            yield piece

    with scripted(waits_for_all) as state:
        items = tuple(Item(prompt=(i,), max_tokens=2, at_s=0.02 * i) for i in range(6))
        result = run_load(target(state), Workload(name="w", items=items))
    assert all(s.ok for s in result.samples)
    assert state.max_open == 6
    for i, s in enumerate(result.samples):
        assert s.due_s == 0.02 * i <= s.start_s
    assert result.client.max_late_s == max(s.start_s - s.due_s for s in result.samples)


def test_items_are_sent_in_the_order_of_their_times():
    with scripted() as server:
        items = tuple(Item(prompt=(i,), max_tokens=1, at_s=at) for i, at in enumerate((0.06, 0.0, 0.03)))
        run_load(target(server), Workload(name="w", items=items))
    assert [r.body["prompt"][0] for r in server.requests] == [1, 2, 0]


def test_turns_of_a_conversation_follow_each_other():
    items = multi_turn(3, turns=3, input_len=4, output_len=2)
    with scripted() as server:
        result = run_load(target(server), Workload(name="w", items=items, concurrency=3))
    assert all(s.ok for s in result.samples)
    for c in range(3):
        turns = [s for s in result.samples if s.conversation == c]
        assert all(a.end_s <= b.start_s for a, b in pairwise(turns))


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_real_history_carries_what_the_server_said(api):
    async def says(request):
        yield STREAM_HEAD
        for text in ('a "quoted" ', "día\n"):
            delta = {"delta": {"content": text}} if api == "chat" else {"text": text}
            yield chunk(event({"choices": [{**delta, "finish_reason": None}]}))
        yield chunk(usage(1, 2)) + chunk(event(b"[DONE]")) + END

    items = tuple(Item(prompt=p, max_tokens=2, conversation=0) for p in ("one ", "two ", "three"))
    with scripted(says) as server:
        result = run_load(target(server, api=api), Workload(name="w", items=items, concurrency=1, real_history=True))
    assert all(s.ok for s in result.samples)
    said = 'a "quoted" día\n'
    if api == "completions":
        assert server.requests[-1].body["prompt"] == f"one {said}two {said}three"
    else:
        assert [m["content"] for m in server.requests[-1].body["messages"]] == ["one ", said, "two ", said, "three"]


def test_a_whole_answer_has_no_token_times():
    async def whole(request):
        assert request.body["stream"] is False
        yield plain(200, {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 2, "completion_tokens": 5}})

    with scripted(whole) as server:
        result = run_load(target(server), work(3, stream=False))
    assert all(s.ok and s.first_token_s is None and s.output_tokens == 5 for s in result.samples)


def test_without_usage_events_are_counted_and_said_to_be():
    async def no_usage(request):
        yield STREAM_HEAD + chunk(token("a")) + chunk(token("b")) + chunk(event(b"[DONE]")) + END

    with scripted(no_usage) as server:
        result = run_load(target(server), work(2))
    assert [(s.output_tokens, s.counted, s.prompt_tokens) for s in result.samples] == [(2, True, None)] * 2


def test_key_path_and_extra_fields_are_sent():
    with scripted() as server:
        run_load(target(server.url + "/proxy/v1/", api_key="secret", extra={"top_k": 3}), work(1))
    head, body = server.requests[0].head.decode(), server.requests[0].body
    assert head.startswith("POST /proxy/v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\n" in head
    assert body["top_k"] == 3


async def refuses(request):
    yield plain(500, {"error": {"message": "broken"}})


async def cuts(request):
    yield STREAM_HEAD + chunk(token("a"))
    yield None


async def says_nothing(request):
    yield None


async def babbles(request):
    yield b"hello there\r\n\r\n"


async def fails_in_the_stream(request):
    yield STREAM_HEAD + chunk(token("a")) + chunk(event({"error": {"message": "lost"}})) + END


async def never_ends(request):
    yield STREAM_HEAD + chunk(token("a"))
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("script", "words", "num_tokens"),
    [
        (refuses, "HTTP 500: broken", 0),
        (cuts, "the connection ended in the middle of the answer", 1),
        (says_nothing, "the connection ended before an answer", 0),
        (babbles, "the answer cannot be read: the answer is not HTTP/1.1", 0),
        (fails_in_the_stream, "error in the stream: lost", 1),
        (never_ends, "no whole answer within 0.5 s", 1),
    ],
)
def test_a_failed_request_is_a_sample_with_its_error(script, words, num_tokens):
    with scripted(script) as server:
        result = run_load(target(server, timeout_s=0.5), work(3))
    assert [s.error for s in result.samples] == [words] * 3
    assert [len(s.token_times) for s in result.samples] == [num_tokens] * 3


def test_one_failure_among_many_leaves_the_others_alone():
    async def odd(request):
        if request.body["prompt"][0] == 4:
            yield plain(429, {"error": {"message": "full"}})
            return
        async for piece in words(request):
            yield piece

    with scripted(odd) as server:
        result = run_load(target(server), work(9))
    assert [s.error for s in result.samples] == [None] * 4 + ["HTTP 429: full"] + [None] * 4


def test_a_server_that_is_not_there_is_said_to_refuse():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = run_load(target(url), work(2))
    assert {s.error for s in result.samples} == {f"no connection to {url}: Connection refused"}


def test_a_kept_connection_that_has_ended_costs_no_request():
    seen = []

    async def once_a_connection(request):
        """The second request of each connection finds it closed without an answer."""
        seen.append(request.connection)
        if seen.count(request.connection) > 1:
            yield None
            return
        async for piece in words(request):
            yield piece

    with scripted(once_a_connection) as server:
        result = run_load(target(server), work(5, concurrency=1))
    assert [s.error for s in result.samples] == [None] * 5
    assert len(seen) == 9
    assert server.num_connections == 5


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://a:b", "http://h:99999"])
def test_a_wrong_url_is_refused(url):
    with pytest.raises(ConfigError, match="is not the URL of a server"):
        run_load(target(url), work(1))


def test_an_impossible_workload_is_refused():
    with pytest.raises(ConfigError, match="has no requests"):
        run_load(target("http://h"), work(0))
    with pytest.raises(ConfigError, match="concurrency must be at least 1"):
        run_load(target("http://h"), work(1, concurrency=0))


def test_the_run_can_be_part_of_a_loop_and_is_cancelled_with_it():
    async def some(server):
        task = asyncio.create_task(run(target(server), work(1)))
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with scripted(never_ends) as server:
        asyncio.run(some(server))


def test_the_ceiling_is_far_above_what_a_server_gives():
    assert own_ceiling() > 5_000


def test_events_that_come_together_cost_less():
    alone, together = ceilings()
    assert together > alone


def test_a_real_server_gives_the_tokens_that_were_asked_for():
    items = random_prompts(5, input_len=(3, 40), output_len=(1, 9), ids=(10, 500))
    with live(checkpoints.tiny_llama()) as server:
        result = run_load(
            LoadTarget(base_url=server.url, model=server.model), Workload(name="w", items=items, concurrency=3)
        )
        for item, s in zip(items, result.samples, strict=True):
            assert s.error is None
            assert not s.counted
            assert (s.prompt_tokens, s.output_tokens) == (len(item.prompt), item.max_tokens)
            assert 1 <= len(s.token_times) <= item.max_tokens
        bad = Workload(name="w", items=(Item(prompt=(10_000,), max_tokens=1),), concurrency=1)
        error = run_load(LoadTarget(base_url=server.url, model=server.model), bad).samples[0].error
        assert error.startswith("HTTP 400: ")
        assert "10000" in error


def test_a_real_chat_with_several_turns():
    items = multi_turn(2, turns=2, input_len=4, output_len=3, text=True)
    with live(checkpoints.tiny_llama()) as server:
        result = run_load(
            LoadTarget(base_url=server.url, model=server.model, api="chat"),
            Workload(name="w", items=items, concurrency=2, real_history=True),
        )
    assert [s.error for s in result.samples] == [None] * 4
    assert [s.output_tokens for s in result.samples] == [3] * 4
    assert json.dumps([s.prompt_tokens for s in result.samples])
    for first, second in (result.samples[:2], result.samples[2:]):
        assert second.prompt_tokens > first.prompt_tokens
