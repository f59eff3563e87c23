"""Bodies are the JSON that a plain encoder would write, and what they share is one object."""

import json

import pytest

from octavo.base.errors import ConfigError
from octavo.bench.bodies import Bodies, units
from octavo.bench.workloads import Item, Workload, shared_prefix

TEXTS = ["plain", 'quotes " and \\ and \n and \t', "día 日本 \U0001f600   \x00", " spaces "]


def bodies(api="completions", extra=None, **work):
    return Bodies(Workload(name="w", items=(), **work), model="m", api=api, extra=extra or {})


def read(body):
    return json.loads(b"".join(body))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("num_shared", [0, 3])
def test_a_completion_of_text(text, num_shared):
    body = read(bodies().whole(Item(prompt=text, max_tokens=4, num_shared=num_shared)))
    assert body == {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
        "ignore_eos": True, "prompt": text, "max_tokens": 4,
    }  # fmt: skip


@pytest.mark.parametrize(("prompt", "num_shared"), [((1,), 0), ((1, 22, 333), 0), ((1, 22, 333), 2), ((1, 22), 2)])
def test_a_completion_of_token_ids(prompt, num_shared):
    body = read(bodies().whole(Item(prompt=prompt, max_tokens=4, num_shared=num_shared)))
    assert body["prompt"] == list(prompt)


@pytest.mark.parametrize("text", TEXTS)
def test_a_chat(text):
    body = read(bodies("chat").whole(Item(prompt=text, max_tokens=4)))
    assert body["messages"] == [{"role": "user", "content": text}]
    assert body["max_tokens"] == 4


@pytest.mark.parametrize("text", TEXTS)
def test_a_turn_comes_after_the_real_answers(text):
    made = bodies("chat", real_history=True)
    first, second = Item(prompt=text, max_tokens=4), Item(prompt="and?", max_tokens=5)
    body = read(made.next_turn([(made.turn_text(first), text + "!")], made.turn_text(second), 5))
    assert body["messages"] == [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text + "!"},
        {"role": "user", "content": "and?"},
    ]
    made = bodies(real_history=True)
    body = read(made.next_turn([(made.turn_text(first), text + "!")], made.turn_text(second), 5))
    assert body["prompt"] == text + text + "!" + "and?"


def test_settings_of_the_workload_reach_the_body_and_extra_wins():
    made = bodies(extra={"temperature": 0.5, "top_k": 7}, stream=False, ignore_eos=False, temperature=None)
    assert read(made.whole(Item(prompt="a", max_tokens=1))) == {
        "model": "m", "stream": False, "temperature": 0.5, "top_k": 7, "prompt": "a", "max_tokens": 1,
    }  # fmt: skip


def test_bytes_that_bodies_share_are_one_object():
    items = shared_prefix(3, prefix_len=500, input_len=4, output_len=2)
    made = bodies()
    first, second, third = (made.whole(item) for item in items)
    assert len(first) == 4
    for part in (0, 1, 3):
        assert first[part] is second[part] is third[part]
    assert len(first[1]) > 10 * len(first[2])


def test_a_chat_takes_no_token_ids_and_real_history_no_ids():
    with pytest.raises(ConfigError, match="the chat API takes no token ids"):
        bodies("chat").whole(Item(prompt=(1,), max_tokens=1))
    with pytest.raises(ConfigError, match="needs prompts of text"):
        bodies(real_history=True).turn_text(Item(prompt=(1,), max_tokens=1))
    with pytest.raises(ConfigError, match="completions or chat, got 'chats'"):
        bodies("chats")


def test_units_keep_conversations_in_order():
    items = [Item(prompt="", max_tokens=1, conversation=c) for c in (None, 5, 6, 5, None, 6, 5)]
    assert list(units(items)) == [(0,), (1, 3, 6), (2, 5), (4,)]
