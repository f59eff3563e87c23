"""Message lists of every accepted shape become one shape (INP-10, INP-15)."""

import enum
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ClientError
from octavo.inputs.messages import ROLES, check_objects, join_parts, normalize, to_plain
from octavo.inputs.verbatim import Verbatim


def one(message: Any) -> dict[str, Any]:
    (out,) = normalize([message])
    return out


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "hi"}],
        [{"text": "hi"}],
        ["hi"],
        {"type": "text", "text": "hi"},
        [{"type": "input_text", "text": "hi"}],
        [{"type": "output_text", "text": "hi"}],
        [{"type": "refusal", "refusal": "hi"}],
        [{"refusal": "hi"}],
        [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "hi"}]}],
        [{"type": "tool_result", "content": "hi"}],
    ],
)
def test_text_parts_of_both_shapes_are_read(content: Any) -> None:
    assert one({"role": "user", "content": content}) == {"role": "user", "content": [{"type": "text", "text": "hi"}]}


def test_strings_stay_strings_and_parts_join_in_order() -> None:
    assert one({"role": "user", "content": "hi"})["content"] == "hi"
    parts = one({"role": "user", "content": ["a", {"text": "b"}]})["content"]
    assert join_parts(parts) == "a\nb" and join_parts("c") == "c"


CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "system"}, "content"),
        ({"role": "developer", "content": None}, "content"),
        ({"role": "assistant"}, "content"),
        ({"role": "assistant", "tool_calls": []}, "content"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": None}, "tool_call_id"),
        ({"role": "tool", "tool_call_id": "1"}, "content"),
        ({"role": "function", "content": "x"}, "name"),
        ({"role": "function", "name": "f"}, "content"),
        ({"role": "user", "content": "x", "name": 5}, "name"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id"),
        ({"role": "assistant", "content": "x", "reasoning_content": {"a": 1}}, "reasoning_content"),
        ({"role": "assistant", "tool_calls": [{**CALLS[0], "id": 5}]}, "tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [{**CALLS[0], "type": "custom"}]}, "tool_calls[0].type"),
    ],
)
def test_every_role_has_what_it_needs(message: dict[str, Any], field: str) -> None:
    """F18: what a role lacks is named with its place, before a template prints it as nothing."""
    with pytest.raises(ClientError) as caught:
        normalize([{"role": "user", "content": "hi"}, message])
    assert caught.value.param == f"messages[1].{field}" and f"messages[1].{field}" in caught.value.message


def test_what_may_be_empty_stays_so() -> None:
    """F18: an empty text is a text; a tool may have nothing to say; a refusal is what was said."""
    assert one({"role": "user", "content": ""})["content"] == ""
    assert one({"role": "tool", "content": None, "tool_call_id": "1"})["content"] == ""
    assert one({"role": "function", "content": None, "name": "f"})["content"] == ""
    assert one({"role": "assistant", "content": None, "refusal": "no"})["content"] == "no"
    assert "content" not in one({"role": "assistant", "reasoning_content": "why"})


def test_an_assistant_without_content_has_no_content_key() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
    assert "content" not in one({"role": "assistant", "content": None, "tool_calls": calls})


def test_null_fields_are_left_out() -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": None, "name": None, "refusal": None}
    assert one(message) == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_names_that_templates_read(key: str) -> None:
    out = one({"role": "assistant", "content": "a", key: "why"})
    assert out["reasoning_content"] == out["thinking"] == "why"


def test_thinking_parts_become_reasoning() -> None:
    out = one(
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "a"}]}
    )
    assert out["reasoning_content"] == "why" and out["content"] == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "images"),
        ({"image_url": "https://example.org/a.png"}, "images"),
        ({"type": "input_image", "image_url": "data:..."}, "images"),
        ({"type": "image_embeds", "image_embeds": "..."}, "images"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio"),
        ({"audio_url": "https://example.org/a.wav"}, "audio"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video"),
        ({"type": "file", "file": {}}, "files"),
        ({"type": "prompt_embeds", "prompt_embeds": ""}, "embeddings"),
    ],
)
def test_media_are_refused_with_the_place_and_the_reason(part: dict[str, Any], word: str) -> None:
    with pytest.raises(ClientError, match=rf"messages\[1\]\.content\[1\].*text only.*{word}.*no vision") as caught:
        normalize(
            [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
        )
    assert caught.value.param == "messages[1].content[1]" and caught.value.status == 400


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (5, "messages"),
        ("hi", "messages"),
        (None, "messages"),
        ({"role": "user"}, "messages"),
        ([], "messages"),
        ([5], "messages[0]"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "banana", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": True}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": ["x"]}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": 3}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_mistakes_are_named_with_their_place(messages: Any, param: str) -> None:
    """API-06, TPL-01: never a 500."""
    with pytest.raises(ClientError) as caught:
        normalize(messages)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


def call_arguments(arguments: Any) -> Any:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return one({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), ("  ", {}), (None, {}), ("{}", {})],
)
def test_arguments_may_be_text_or_an_object(arguments: Any, expected: Any) -> None:
    assert call_arguments(arguments) == expected


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "5", "null, null", 5, [1], "{" * 5, "[" * 100_000])
def test_broken_arguments_stay_as_they_were_sent(arguments: Any) -> None:
    """F16, INP-15: the model reads what it wrote, and one bad turn does not make the conversation unrecoverable."""
    kept = call_arguments(arguments)
    assert isinstance(kept, Verbatim) and kept == (arguments if isinstance(arguments, str) else json.dumps(arguments))


def test_deep_arguments_stay_text() -> None:
    """F16: what lies deeper than anything reads is still a text that can be shown."""
    deep = '{"a": ' * 600 + "1" + "}" * 600
    assert isinstance(call_arguments(deep), Verbatim) and call_arguments(deep) == deep
    assert call_arguments('{"a": ' * 50 + "1" + "}" * 50) == json.loads('{"a": ' * 50 + "1" + "}" * 50)


def test_short_and_old_tool_calls_get_the_usual_shape() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    short = one({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]})
    old = one({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}})
    assert short["tool_calls"] == old["tool_calls"] == [call]
    assert "function_call" not in old
    assert "tool_calls" not in one({"role": "assistant", "content": "x", "tool_calls": []})


def test_the_callers_messages_are_not_changed() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    before = json.dumps(messages)
    normalize(messages)
    assert json.dumps(messages) == before


def test_tools_and_documents_are_lists_of_objects() -> None:
    assert check_objects("tools", None) is None and check_objects("tools", []) is None
    tool = {"type": "function", "function": {"name": "f"}}
    assert check_objects("tools", (tool,)) == [tool]
    for name, value in [("tools", "x"), ("tools", {"a": 1}), ("documents", 5), ("documents", ["x"])]:
        with pytest.raises(ClientError) as caught:
            check_objects(name, value)
        assert caught.value.param == name


class Colour(enum.StrEnum):
    RED = "red"


class Dumped:
    def model_dump(self) -> dict[str, Any]:
        return {"role": "user", "content": Colour.RED}


def test_templates_get_plain_data_only() -> None:
    out = one(Dumped())
    assert out == {"role": "user", "content": "red"} and type(out["content"]) is str
    assert to_plain(object()) == "<object>"
    assert to_plain({"a": (1, 2.5, True, None)}) == {"a": [1, 2.5, True, None]}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "image_url"]), inner, max_size=4),
        max_leaves=12,
    )
)  # fmt: skip
def test_any_json_is_either_messages_or_a_client_error(value: Any) -> None:
    try:
        out = normalize(value)
    except ClientError:
        return
    assert all(message["role"] in ROLES for message in out)
