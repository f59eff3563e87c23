"""One bad request never hurts the others (API-06, ABT-01, INP-20): random requests of every kind from several clients at
once, some of whom leave early, beside a canary whose answer must not change.

No answer is a 5xx, no stream holds an error event, every 200 has the shape that was asked for, and when all is
over nothing runs, waits or holds a block.
"""

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.support import checkpoints
from tests.support.live import Live, live

TEXTS = (
    "", " ", "a", "hello world", "\x00", "a\x00b", "\n\n\t\r", "\u2028\u2029\ufeff\u200d", "日本語のテキスト", "👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301\u0327" * 5, "עברית العربية", "\U0010ffff\ufffe\uffff", "<s></s><unk>", "<|im_start|>user\n<|im_end|>",
    "z" * 90, "a b " * 30, "🤖" * 30, "{{ 1/0 }}{% raw %}", "\\u0000", "'\"\\",
)  # fmt: skip
RARE_TEXTS = ("\ud83d", "\udc00\ud800", "z" * 300, "a b " * 150, "q" * 50_000, "é\u0301" * 5000)
NUMBERS = (
    0, 1, 2, -1, 3, 5, 1.5, 0.0, 1e-300, 1e-6, 1e-5, 0.1, 0.999999, 1e308, -1e308, 2**31 - 1, 2**31, 2**32 + 1, 2**63 - 1,
    2**63, -(2**63), -(2**63) - 1, 2**64, 10**40, 10**400,
)  # fmt: skip
JUNK = (
    None, True, False, "", "x", "1", [], {}, [[]], [None], {"a": 1}, [1, "a"], [1.5], {"": ""}, [True], "auto", ["\ud83d"],
)  # fmt: skip
DEEP = json.loads("[" * 400 + "]" * 400)
ROLES = ("user", "system", "assistant", "tool", "developer", "function", "", "nobody", 5, None)
SANE: dict[str, tuple[Any, ...]] = {
    "n": (1, 2, 3),
    "temperature": (0, 0.3, 1, 2.5, 100),
    "top_p": (1, 0.5, 1e-9, 0.01),
    "top_k": (-1, 0, 1, 7, 511, 512, 100_000),
    "min_p": (0, 0.1, 1),
    "presence_penalty": (0, -2, 2),
    "frequency_penalty": (0, -2, 2),
    "repetition_penalty": (1, 0.01, 1e-300, 100, 1.3),
    "seed": (0, -1, 7, 2**63 - 1, -(2**63)),
    "max_tokens": (0, 1, 2, 5, 20, 40, 100),
    "min_tokens": (0, 1, 5, 20),
    "stop": ("a", ["e", " "], ["zzzz"], ["\ufffd"], "👩", [" "] * 64),
    "stop_token_ids": ([], [1], [5, 6, 7], list(range(512))),
    "ignore_eos": (True, False),
    "include_stop_str_in_output": (True, False),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "bad_words": (["a"], ["hello world", "e", "\ud7ff"], [" "], ["a", "a"], ["👩‍👩‍👧‍👦"], ["\x00"]),
    "allowed_token_ids": ([5], [1], [0, 1, 2], list(range(512)), [7] * 50),
    "logit_bias": ({"5": 100}, {"5": -100, "6": 100}, {str(i): -100 for i in range(512)}, {"1": -100}, {"1": 100}, {}),
    "prompt_logprobs": (0, 1, 5, 20),
    "priority": (0, -5, 5),
    "cache_salt": ("salt", "\x00", "日"),
    "request_id": ("same-id", "", "\r\nx: y"),
    "add_special_tokens": (True, False),
    "return_token_ids": (True, False),
    "response_format": ({"type": "text"},),
    "user": ("u",),
}
SANE_COMPLETION = {"echo": (True, False), "logprobs": (0, 1, 5, 20), "best_of": (1,)}
SANE_CHAT: dict[str, tuple[Any, ...]] = {
    "logprobs": (True, False),
    "top_logprobs": (0, 1, 20),
    "max_completion_tokens": (1, 5, 30),
    "add_generation_prompt": (True, False),
    "continue_final_message": (True, False),
    "chat_template_kwargs": ({}, {"x": [1]}, {"\x00": {}}),
    "documents": ([], [{"title": "t", "text": "x"}], [{}]),
    "tools": ([], [{"type": "function", "function": {"name": "f", "parameters": {}}}], [{}], [{"type": "x"}]),
    "tool_choice": ("none", "auto", "required", {"type": "function"}),
    "reasoning_effort": ("low", "\x00"),
}
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


class Maker:
    """Requests from a seed.

    Owns: its random numbers.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def odd(self) -> Any:
        """Any JSON value at all."""
        kind = self.rng.random()
        if kind < 0.3:
            return self.rng.choice(NUMBERS)
        if kind < 0.6:
            return self.rng.choice(JUNK)
        if kind < 0.8:
            return self.text()
        if kind < 0.82:
            return DEEP
        if kind < 0.9:
            return [self.odd() for _ in range(self.rng.randrange(4))]
        return {self.rng.choice(("1", "5", "type", "role", "é", "\x00")): self.odd()}

    def text(self) -> str:
        """Some text, now and then one that cannot be served."""
        return self.rng.choice(RARE_TEXTS if self.rng.random() < 0.03 else TEXTS)

    def prompt(self) -> Any:
        """A prompt: text, ids, lists of both, with mixtures and wrong ones now and then."""
        one = self.rng.choice(
            (
                self.text,
                lambda: [self.rng.randrange(512) for _ in range(self.rng.choice((1, 1, 15, 16, 17, 33, 127, 200)))],
            )
        )
        kind = self.rng.random()
        if kind < 0.6:
            return one()
        if kind < 0.85:
            return [one() for _ in range(self.rng.choice((1, 2, 3)))]
        if kind < 0.9:
            return [self.rng.choice(TEXTS), [1, 2], self.odd()]
        if kind < 0.95:
            return [self.rng.randrange(-2, 600) for _ in range(5)]
        return self.odd()

    def messages(self) -> Any:
        """Conversations, right and wrong."""
        if self.rng.random() < 0.1:
            return self.odd()
        made = [self.message() for _ in range(self.rng.choice((1, 1, 1, 2, 2, 4)))]
        return [] if self.rng.random() < 0.03 else made

    def message(self) -> Any:
        """One message."""
        kind = self.rng.random()
        if kind < 0.03:
            return self.odd()
        content: Any = self.text()
        if kind < 0.08:
            content = [{"type": self.rng.choice(("text", "image_url", "x")), "text": content}, self.odd()]
        elif kind < 0.12:
            content = self.odd()
        elif kind < 0.3:
            content = [{"type": "text", "text": content}]
        made = {"role": self.rng.choice(ROLES if kind > 0.85 else ROLES[:3]), "content": content}
        if kind > 0.9:
            made[self.rng.choice(("name", "tool_calls", "tool_call_id", "reasoning_content", "odd"))] = self.odd()
        return made

    def request(self) -> tuple[str, dict[str, Any]]:
        """A path and a body."""
        path = self.rng.choices(PATHS, (6, 3, 1, 1))[0]
        if path == "/detokenize":
            return path, {"tokens": self.rng.choice((self.prompt(), [5, 6], list(range(512))))}
        if path == "/tokenize":
            key = self.rng.choice(("prompt", "messages"))
            return path, {
                key: self.prompt() if key == "prompt" else self.messages(),
                **self.fields({**SANE_CHAT, "add_special_tokens": (True, False), "return_token_strs": (True,)}),
            }
        if path == "/v1/completions":
            body = {"prompt": self.prompt(), **self.fields({**SANE, **SANE_COMPLETION})}
        else:
            body = {"messages": self.messages(), **self.fields({**SANE, **SANE_CHAT})}
        body |= self.extra()
        if self.rng.random() < 0.5:
            body["stream"] = True
            if self.rng.random() < 0.3:
                body["stream_options"] = {"include_usage": True, "continuous_usage_stats": self.rng.random() < 0.5}
        return path, body

    def extra(self) -> dict[str, Any]:
        """Fields that are not served, unknown, or change nothing."""
        if self.rng.random() > 0.15:
            return {}
        name = self.rng.choice(
            ("suffix", "guided_json", "metadata", "functions", "prompt_embeds", "no_such", "\x00", "")
        )
        return {name: self.odd()}

    def fields(self, sane: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        """A few fields, mostly with values that may be served."""
        chosen = self.rng.sample(sorted(sane), min(len(sane), self.rng.choice((0, 1, 2, 3, 5, 9))))
        wrong = self.rng.choice(chosen) if chosen and self.rng.random() < 0.15 else None
        return {name: self.odd() if name == wrong else self.rng.choice(sane[name]) for name in chosen}


def encoded(body: dict[str, Any], model: str) -> bytes:
    """JSON, with half surrogates escaped as a careless client would."""
    return json.dumps({"model": model, **body}).encode()


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def read(text: str) -> Any:
    """Strict JSON."""
    return json.loads(text, parse_constant=no_constants)


class Client:
    """A client that sends random requests, and leaves some of them.

    Owns: its connection, and what went wrong.
    """

    def __init__(self, server: Live, seed: int, count: int) -> None:
        self.maker = Maker(seed)
        self.server = server
        self.count = count
        self.wrong: list[str] = []
        self.statuses: dict[int, int] = {}

    def run(self) -> None:
        """Send them all."""
        with httpx.Client(base_url=self.server.url, timeout=60) as http:
            for _ in range(self.count):
                path, body = self.maker.request()
                try:
                    self.one(http, path, body)
                except Exception as error:
                    self.wrong.append(f"{type(error).__name__}: {error!s:.500} for {path} {json.dumps(body):.3000}")

    def one(self, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
        """One request: read to its end and checked, or left early."""
        patience = self.maker.rng.choice((None, None, None, 0, 1, 3))
        content = encoded(body, self.server.model)
        headers = {"content-type": "application/json"}
        if patience is not None and not body.get("stream"):
            with suppress(httpx.TimeoutException):
                http.post(path, content=content, headers=headers, timeout=0.002 + 0.02 * patience)
            return
        with http.stream("POST", path, content=content, headers=headers) as answer:
            status = answer.status_code
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status == 200 and body.get("stream") is True and path.startswith("/v1"):
                self.stream(answer, patience)
                return
            answer.read()
        data = read(answer.text)
        if status == 200:
            check_answer(path, body, data)
            return
        assert 400 <= status < 500, f"{status}: {answer.text}"
        assert data["error"]["message"], data
        assert len(answer.content) < 4000, "a small refusal"
        for word in ("Traceback", "pydantic", "msgspec", "object at 0x"):
            assert word not in answer.text, answer.text

    def stream(self, answer: httpx.Response, patience: int | None) -> None:
        """Events until the end mark, or until patience ends."""
        last = ""
        for i, line in enumerate(answer.iter_lines()):
            if patience is not None and i >= patience:
                return
            if line and not line.startswith(":"):
                assert line.startswith("data: "), line
                last = line[6:]
                if last != "[DONE]":
                    assert "error" not in read(last), last
        assert last == "[DONE]", "a stream ends with its mark"


def check_answer(path: str, body: dict[str, Any], data: dict[str, Any]) -> None:
    """What every plain answer shows."""
    if not path.startswith("/v1"):
        return
    prompts = body.get("prompt")
    batch = len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1
    assert [c["index"] for c in data["choices"]] == list(range(batch * (body.get("n") or 1)))
    assert all(c["finish_reason"] in ("stop", "length") for c in data["choices"])
    usage = data["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if body.get("return_token_ids"):
        assert usage["completion_tokens"] == sum(len(c["token_ids"]) for c in data["choices"])
    if path == "/v1/completions" and body.get("logprobs") is not None:
        for choice in data["choices"]:
            scores = choice["logprobs"]
            if scores is not None:
                assert (
                    len({len(scores[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
                )


CANARY: dict[str, Any] = {"max_tokens": 12, "return_token_ids": True, "logprobs": 2}
CANARY_TOKENS = [7, 3, 99, 250, 12, 400, 31]


def canary(server: Live) -> tuple[list[int], str]:
    """What the canary is answered."""
    choice = server.complete(CANARY_TOKENS, **CANARY)["choices"][0]
    return choice["token_ids"], choice["text"]


@pytest.fixture(scope="module", params=[False, True], ids=["in-turn", "async"])
def server(request: pytest.FixtureRequest) -> Iterator[Live]:
    """A small engine: few blocks, few rows, small steps, so that requests wait, and are preempted."""
    options = {"num_kv_blocks": 40, "num_threads": 1, "max_model_len": 256, "max_num_seqs": 6}
    with live(checkpoints.tiny_llama(), max_num_batched_tokens=96, async_scheduling=request.param, **options) as server:
        yield server


def storm(server: Live, seed: int, count: int, num_clients: int = 4) -> None:
    """Clients at once beside the canary; afterwards nothing is left."""
    alone = canary(server)
    clients = [Client(server, seed * 1000 + i, count) for i in range(num_clients)]
    threads = [threading.Thread(target=c.run) for c in clients]
    for thread in threads:
        thread.start()
    sung = 0
    while any(t.is_alive() for t in threads):
        assert canary(server) == alone
        sung += 1
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert [w for c in clients for w in c.wrong] == []
    assert sung > 3
    statuses = {s for c in clients for s in c.statuses}
    assert statuses <= {200, 400, 404, 422, 429}
    server.wait_metrics(requests_running=0, requests_waiting=0, kv_cache_usage_ratio=0)
    assert server.http.get("/load").json() == {"requests": 0, "running": 0, "waiting": 0, "kv_usage": 0.0}
    assert server.http.get("/health").status_code == 200
    assert canary(server) == alone


def test_random_requests_hurt_nobody(server: Live) -> None:
    storm(server, seed=1, count=60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_random_requests_hurt_nobody_for_long(server: Live, seed: int) -> None:
    storm(server, seed=seed, count=150)


def test_a_request_that_fails_in_the_engine_fails_alone(server: Live) -> None:
    """Nobody can know beforehand: the bad word is one token twice, and no other token is allowed."""

    def ids(text: str) -> list[int]:
        return server.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]

    letter = next(c for c in "qxzjkvw" if len(set(ids(c + c))) == 1 and len(ids(c + c)) == 2)
    body = {"prompt": letter, "allowed_token_ids": ids(letter), "bad_words": [letter * 2], "max_tokens": 20}
    alone = canary(server)
    with futures.ThreadPoolExecutor(4) as pool:
        failing = [pool.submit(server.post, "/v1/completions", **body) for _ in range(6)]
        assert canary(server) == alone
        answers = [f.result() for f in failing]
    assert {a.status_code for a in answers} == {500}
    assert all("no token is left" in a.json()["error"]["message"] for a in answers)
    server.wait_metrics(requests_running=0, requests_waiting=0, kv_cache_usage_ratio=0)
    assert canary(server) == alone
