"""Hundreds of requests through a router while its engines freeze and die: the right text, or an error that says so
(PDX-12, PDX-13)."""

import contextlib
import random
import signal
import threading

import httpx
import pytest

from tests.support import checkpoints
from tests.support.disagg import consumer, pair
from tests.support.http_server import wait_until
from tests.support.live import live
from tests.support.routed import read_event, routed, words

NUM_THREADS, NUM_EACH = 4, 75
PROMPTS = [[5 + (n * 37 + i * 7) % 90 for i in range(40 + 12 * n)] for n in range(12)]
BODY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


def ask(url, model, number, streamed):
    """Text and error of one request; a stream that broke has both."""
    body = {"model": model, "prompt": PROMPTS[number], "stream": streamed, **BODY}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    if answer.status_code != 200:
        return "", answer.json()["error"]["message"]
    if not streamed:
        return answer.json()["choices"][0]["text"], ""
    events = [read_event(line) for line in answer.text.split("\n") if line.startswith("data: ")]
    return "".join(words(events)), "" if events[-1] == "[DONE]" else events[-1]["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_pdx_13_every_request_ends_with_the_right_text_or_an_error(seed):
    chance = random.Random(seed)
    with live(checkpoints.tiny_llama(), num_threads=1, num_kv_blocks=200) as server:
        wanted = [server.complete(prompt, **BODY)["choices"][0]["text"] for prompt in PROMPTS]
    with contextlib.ExitStack() as stack:
        first, second = stack.enter_context(pair())
        third = stack.enter_context(consumer(checkpoints.tiny_llama()))
        quick = {"health_interval_s": 0.1, "health_timeout_s": 1.0}
        router = stack.enter_context(routed(prefill=[first], decode=[second, third], **quick))
        results, ended = [], threading.Event()

        def client(number):
            mine = random.Random(seed * 100 + number)
            for _ in range(NUM_EACH):
                which, streamed = mine.randrange(len(PROMPTS)), mine.random() < 0.5
                results.append((which, *ask(router.url, first.model, which, streamed)))

        def faults():
            while not ended.wait(chance.uniform(0.1, 1.0)):
                victim = chance.choice([first, second, third])
                if victim.process.poll() is None:
                    victim.process.send_signal(signal.SIGSTOP)
                    ended.wait(chance.uniform(0.1, 3.5))
                    victim.process.send_signal(signal.SIGCONT)
                if len(results) > NUM_THREADS * NUM_EACH // 2 and second.process.poll() is None:
                    second.process.kill()

        threads = [threading.Thread(target=client, args=(n,)) for n in range(NUM_THREADS)]
        trouble = threading.Thread(target=faults)
        for thread in (*threads, trouble):
            thread.start()
        for thread in threads:
            thread.join(240)
        ended.set()
        trouble.join(10)
        assert len(results) == NUM_THREADS * NUM_EACH, "a request waits for ever"
        for which, text, error in results:
            assert wanted[which].startswith(text) if error else text == wanted[which], (which, text, error)
        right = sum(not error for _, _, error in results)
        print(f"{right} of {len(results)} right; errors: {sorted({e for _, _, e in results if e})}")
        assert right > 0.8 * len(results)
        assert wait_until(lambda: all(member.in_flight == 0 for member in router.router.fleet.members))
