"""What the README shows: the command without a model, and the official client on every kind of request."""

import pytest
from openai import BadRequestError, NotFoundError

from tests.support.live import spawn


@pytest.fixture(scope="module")
def server():
    """`octavo serve` with nothing but a port: the embedded model, pulled if it is absent."""
    with spawn("--num-threads", "1", start_s=240) as server:
        yield server


def test_the_embedded_model_is_served_by_its_name(server):
    assert [m.id for m in server.openai.models.list()] == ["SmolLM2-135M-Instruct"]


def test_chat_plain_and_streamed_agree(server):
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "What is 2+2?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    plain = server.openai.chat.completions.create(**body)
    assert "4" in plain.choices[0].message.content
    assert plain.usage.completion_tokens > 0
    stream = server.openai.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens


def test_three_completions_of_one_prompt(server):
    done = server.openai.completions.create(
        model=server.model, prompt="Once upon a time", n=3, max_tokens=12, temperature=1.0, seed=7
    )
    assert [c.index for c in done.choices] == [0, 1, 2]
    assert len({c.text for c in done.choices}) > 1


def test_log_probabilities(server):
    chat = server.openai.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, logprobs=True, top_logprobs=3,
        temperature=0,
    )  # fmt: skip
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(t.logprob for t in entry.top_logprobs)
    text = server.openai.completions.create(model=server.model, prompt="Hi", max_tokens=4, logprobs=2, temperature=0)
    assert len(text.choices[0].logprobs.token_logprobs) == 4


def test_stop_strings(server):
    done = server.openai.completions.create(
        model=server.model, prompt="One, two, three,", max_tokens=40, temperature=0, stop=["six"]
    )
    assert "six" not in done.choices[0].text
    assert done.choices[0].finish_reason == "stop"


def test_errors_are_the_clients_own_exceptions(server):
    with pytest.raises(NotFoundError, match="nope"):
        server.openai.completions.create(model="nope", prompt="x")
    with pytest.raises(BadRequestError, match="temperature"):
        server.openai.completions.create(model=server.model, prompt="x", temperature=-1)
