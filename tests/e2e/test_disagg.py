"""Prefill in one process and decode in another: the text is that of one engine, whatever fails (PDX-4 .. PDX-13)."""

import signal
import time

import pytest

from octavo.engine.core import SETTLE_S, UNFINISHED
from tests.support import checkpoints
from tests.support.disagg import OPTIONS, consumer, figures, hand_over, pair, prefill_only, producer, signal_all
from tests.support.live import spawn

LONG = [(i * 31) % 400 + 10 for i in range(150)]
PROMPTS = [LONG, LONG[:16], LONG[:17], LONG[:33], "Once upon a time there was a small engine", [5, 6], LONG[40:]]


def texts(server, prompts=PROMPTS, **body):
    return [server.text(prompt, **{"max_tokens": 12, "ignore_eos": True, **body}) for prompt in prompts]


def eventually(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def both():
    with pair() as servers:
        yield servers


@pytest.fixture(scope="module")
def plain():
    with spawn(str(checkpoints.tiny_llama()), *OPTIONS) as server:
        yield server


def test_the_text_is_that_of_one_engine_and_the_prompt_is_not_computed_twice(both, plain):
    prefill, decode = both
    before = figures(decode)["tokens_fetched"]
    for prompt in PROMPTS:
        for body in ({}, {"temperature": 0.9, "seed": 7}):
            want = plain.complete(prompt, max_tokens=12, ignore_eos=True, **body)
            got = hand_over(prefill, decode, prompt, max_tokens=12, ignore_eos=True, **body)
            assert got["choices"] == want["choices"]
            assert got["usage"]["completion_tokens"] == 12
    assert figures(decode)["tokens_fetched"] > before
    sources = got["usage"]["prompt_tokens_details"]
    assert sources["cached_tokens"] >= len(PROMPTS[-1]) - 16
    eventually(lambda: figures(prefill)["leases"] == 0)
    assert figures(prefill)["leases_expired"] == 0 and figures(decode)["failed"] == 0


def test_fetched_tokens_are_told_in_usage(both):
    prompt = [(i * 17) % 300 + 50 for i in range(100)]
    usage = hand_over(*both, prompt, max_tokens=2)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens_by_source"] == {"remote": 99}


def test_streams_and_chats_carry_the_parameters_too(both, plain):
    prefill, decode = both
    messages = [{"role": "user", "content": "Tell me something about engines that nobody has told me before."}]
    ask = {"messages": messages, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answer = prefill.post("/v1/chat/completions", **ask).json()
    hint = answer["kv_transfer_params"]
    events = decode.events(
        "/v1/chat/completions", messages=messages, max_tokens=8, temperature=0, kv_transfer_params=hint
    )
    text = "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
    assert text == plain.chat(messages, max_tokens=8)["choices"][0]["message"]["content"]
    assert not any("kv_transfer_params" in event for event in events)
    for path, more in (("/v1/chat/completions", ask), ("/v1/completions", {**ask, "messages": None, "prompt": LONG})):
        events = prefill.events(path, **{k: v for k, v in more.items() if v is not None})
        offers = [event["kv_transfer_params"] for event in events if "kv_transfer_params" in event]
        assert len(offers) == 1 and offers[0]["do_remote_prefill"]


@pytest.mark.parametrize(
    ("params", "more", "said"),
    [
        ({"do_remote_prefill": True}, {}, "started with --kv-role producer; it takes consumer or both"),
        ({"do_remote_decode": True}, {"n": 2}, "is for one prompt with one answer"),
    ],
)
def test_what_a_server_cannot_do_is_a_400(both, params, more, said):
    answer = both[0].post("/v1/completions", prompt="x", kv_transfer_params=params, max_tokens=1, **more)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("kv_transfer_params")


def test_hints_that_were_altered_are_refused_or_computed(both, plain):
    prefill, decode = both
    hint = prefill_only(prefill, LONG)
    answer = decode.post("/v1/completions", prompt=LONG, kv_transfer_params={**hint, "address": "x"})
    assert answer.status_code == 400
    for change in ({"lease": "0" * 32}, {"address": "tcp://:7100"}, {"num_tokens": 151}):
        text = decode.text(
            LONG, max_tokens=6, ignore_eos=True, kv_transfer_params={**hint, **change}, cache_salt=str(change)
        )
        assert text == plain.text(LONG, max_tokens=6, ignore_eos=True)
    other = LONG[::-1]  # the hint of another prompt
    assert decode.text(other, max_tokens=6, kv_transfer_params=hint) == plain.text(other, max_tokens=6)


def test_a_server_without_a_role_says_so(plain):
    answer = plain.post("/v1/completions", prompt="x", kv_transfer_params={"do_remote_decode": True})
    assert (
        answer.status_code == 400
        and "start it with --kv-role, --kv-tier or --kv-connector" in answer.json()["error"]["message"]
    )


def test_engines_that_disagree_compute_and_say_why(plain):
    with producer(checkpoints.tiny_llama(seed=5)) as prefill, consumer(checkpoints.tiny_llama()) as decode:
        text = decode.text(LONG, max_tokens=6, kv_transfer_params=prefill_only(prefill, LONG))
        assert text == plain.text(LONG, max_tokens=6)
        said = "".join(decode.lines)
        assert "KV could not be fetched" in said and "weights: " in said and figures(decode)["failed"] == 1


def test_a_failed_fetch_ends_the_request_where_that_was_asked_for():
    with pair("--kv-load-failure", "fail") as (prefill, decode):
        hint = prefill_only(prefill, LONG)
        signal_all(prefill, signal.SIGKILL)
        prefill.process.wait()
        answer = decode.post("/v1/completions", prompt=LONG, kv_transfer_params=hint)
        assert (
            answer.status_code == 500
            and "could not be fetched from tcp://127.0.0.1" in answer.json()["error"]["message"]
        )
        assert decode.text("others go on", max_tokens=3)
        assert decode.metrics()["octavo_kv_blocks_used"] == 0


@pytest.mark.parametrize(
    "options", [("--async-scheduling", "--max-num-batched-tokens", "24"), ("--no-enable-prefix-caching",)]
)
def test_any_mode_of_scheduling(plain, options):
    with pair(*options) as (prefill, decode):
        for prompt in PROMPTS:
            assert hand_over(prefill, decode, prompt, max_tokens=8, ignore_eos=True)["choices"][0][
                "text"
            ] == plain.text(prompt, max_tokens=8, ignore_eos=True)
        assert figures(decode)["failed"] == figures(decode)["partly_fetched"] == 0


def test_sliding_windows():
    model = checkpoints.tiny_swa(mixed=True)
    with spawn(str(model), *OPTIONS) as alone, pair(model=model) as (prefill, decode):
        for prompt in PROMPTS:
            got = hand_over(prefill, decode, prompt, max_tokens=8, ignore_eos=True)
            assert got["choices"][0]["text"] == alone.text(prompt, max_tokens=8, ignore_eos=True)
        assert figures(decode)["fetched"] >= 5 and figures(decode)["failed"] == 0


def test_salts_do_not_mix(both, plain):
    prefill, decode = both
    prompt = [(i * 13) % 350 + 20 for i in range(64)]
    hint = prefill_only(prefill, prompt, cache_salt="a")
    before = figures(decode)["not_ours"]
    got = decode.complete(prompt, max_tokens=4, kv_transfer_params=hint, cache_salt="b")
    assert got["choices"][0]["text"] == plain.text(prompt, max_tokens=4)
    assert figures(decode)["not_ours"] == before + 1 and got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_producer_that_stops_waits_a_little_for_its_consumers():
    with pair() as (prefill, decode):
        hint = prefill_only(prefill, LONG)
        prefill.process.send_signal(signal.SIGTERM)
        got = decode.complete(LONG, max_tokens=4, kv_transfer_params=hint)
        assert got["usage"]["prompt_tokens_details"]["cached_tokens_by_source"] == {"remote": 149}
        assert prefill.process.wait(20) == 0
    assert not any("still under way" in line for line in prefill.lines), "a release was missed"


def test_a_producer_that_stops_before_its_consumer_came_says_so():
    with producer(checkpoints.tiny_llama()) as prefill:
        prefill_only(prefill, LONG)
        prefill.process.send_signal(signal.SIGTERM)
        assert prefill.process.wait(SETTLE_S + 15) == 0
    assert any(UNFINISHED in line for line in prefill.lines)


@pytest.mark.parametrize("transport", ["file", "nixl"])
def test_other_transports(plain, transport, tmp_path):
    if transport == "nixl":
        pytest.importorskip(
            "nixl._api", reason="the package nixl is not installed; it is an extra", exc_type=ImportError
        )
    with pair("--kv-transport", f"file://{tmp_path}" if transport == "file" else transport) as (prefill, decode):
        for prompt in PROMPTS:
            got = hand_over(prefill, decode, prompt, max_tokens=8, ignore_eos=True)
            assert got["choices"][0]["text"] == plain.text(prompt, max_tokens=8, ignore_eos=True)
        seen = figures(decode)
        assert seen["failed"] == seen["partly_fetched"] == 0 and seen["fetched"] >= 5
        eventually(lambda: figures(prefill)["leases"] == 0)
        hint = prefill_only(prefill, LONG[::-1])
        signal_all(prefill, signal.SIGKILL)
        prefill.process.wait()
        want = plain.text(LONG[::-1], max_tokens=8, ignore_eos=True)
        assert decode.text(LONG[::-1], max_tokens=8, ignore_eos=True, kv_transfer_params=hint) == want


@pytest.mark.slow
def test_a_consumer_of_another_transport_computes(plain, tmp_path):
    model = checkpoints.tiny_llama()
    with producer(model) as prefill, consumer(model, "--kv-transport", f"file://{tmp_path}") as decode:
        text = decode.text(LONG, max_tokens=6, kv_transfer_params=prefill_only(prefill, LONG))
        assert text == plain.text(LONG, max_tokens=6) and figures(decode)["not_allowed"] == 1
