"""Streams say what plain answers say: STR-01, STR-05, STR-07."""

import json

import pytest

from tests.support import checkpoints
from tests.support.live import live

EVERY_BYTE = ["A", "x", "\u00e9".encode(), "\U0001f9d1".encode(), "\u6b6a".encode(), " done"]
SCRIPTS = {
    "one token a byte": EVERY_BYTE,
    "bytes at the end": ["A", "tail ", "\u00fc\u4f60".encode()],
    "bytes at the start": ["A", "\u20ac".encode(), " is money"],
    "a character cut short by the end": ["A", "cut ", "\U0001f600".encode()[:3]],
    "a combining mark": ["A", "e", "\u0301".encode(), "x"],
}


@pytest.fixture(scope="module", params=SCRIPTS)
def chain(request, tmp_path_factory):
    path = checkpoints.chain(tmp_path_factory.mktemp("chain") / "m", SCRIPTS[request.param])
    with live(path, num_kv_blocks=64, num_threads=1, max_model_len=256) as server:
        yield server, b"".join(s if isinstance(s, bytes) else s.encode() for s in SCRIPTS[request.param][1:])


@pytest.mark.parametrize("max_tokens", [64, 3, 5])
def test_str01_characters_split_over_tokens_come_whole(chain, max_tokens):
    server, script = chain
    plain = server.text("A", max_tokens=max_tokens)
    events = server.events("/v1/completions", prompt="A", max_tokens=max_tokens, temperature=0)
    deltas = [c["text"] for e in events for c in e["choices"]]
    assert "".join(deltas) == plain
    try:
        whole = script.decode()
    except UnicodeDecodeError:
        whole = None  # the script itself ends inside a character
    if max_tokens == 64 and whole is not None:
        assert plain == whole
    if whole is not None and max_tokens == 64:
        assert "\ufffd" not in plain
    assert all("\ufffd" not in d for d in deltas[:-1]), "only an end may leave a character unfinished"


def usage_cases():
    return [("absent", {}), ("on", {"stream_options": {"include_usage": True}}),
            ("off", {"stream_options": {"include_usage": False}})]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("name", "options"), usage_cases())
def test_str05_usage_comes_once_when_asked(chat135m, path, name, options):
    prompt = {"messages": [{"role": "user", "content": "Say hi."}]} if "chat" in path else {"prompt": "Say hi."}
    body = {**prompt, "max_tokens": 5, "temperature": 0}
    events = chat135m.events(path, **body, **options)
    plain = chat135m.post(path, **body).json()["usage"]
    if name == "on":
        *earlier, last = events
        assert last["choices"] == []
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][key] == plain[key]
        assert last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"] == last["usage"]["total_tokens"]
    else:
        earlier = events
    assert all(e["choices"] and e.get("usage") is None for e in earlier)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_str07_chunks_hold_what_a_strict_client_checks(chat135m, chat, n):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": "Count to five."}]} if chat else {"prompt": "One, two,"}
    events = chat135m.events(path, **prompt, max_tokens=6, temperature=0.9, n=n, seed=3)
    assert len({e["id"] for e in events}) == 1
    assert len({e["created"] for e in events}) == 1
    assert isinstance(events[0]["created"], int)
    assert {e["object"] for e in events} == {"chat.completion.chunk" if chat else "text_completion"}
    assert {e["model"] for e in events} == {"chat135m"}
    reasons, roles = {}, {}
    for choice in (c for e in events for c in e["choices"]):
        assert "finish_reason" in choice
        index = choice["index"]
        assert index not in reasons, "nothing follows a finish reason"
        if choice["finish_reason"] is not None:
            reasons[index] = choice["finish_reason"]
        if chat and "role" in choice["delta"]:
            assert index not in roles, "the role comes once"
            roles[index] = choice["delta"]["role"]
    assert set(reasons) == set(range(n))
    assert set(reasons.values()) <= {"stop", "length"}
    if chat:
        assert roles == dict.fromkeys(range(n), "assistant")


def test_str07_the_official_client_reads_both_kinds(chat135m):
    client = chat135m.openai
    body = {"model": "chat135m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    plain = client.chat.completions.create(**body)
    pieces = [
        c.choices[0].delta.content or "" for c in client.chat.completions.create(**body, stream=True) if c.choices
    ]
    assert "".join(pieces) == plain.choices[0].message.content
    done = client.completions.create(model="chat135m", prompt="Once upon", max_tokens=8, temperature=0)
    chunks = list(
        client.completions.create(model="chat135m", prompt="Once upon", max_tokens=8, temperature=0, stream=True)
    )
    assert "".join(c.choices[0].text for c in chunks) == done.choices[0].text
    assert json.loads(plain.model_dump_json())["object"] == "chat.completion"
