"""`/v1/chat/completions` over a real socket: shapes, templates, what is refused and how."""

import logging
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from octavo.config.schema import ServerConfig
from octavo.entrypoints.http.fields import WARNING_HEADER
from tests.entrypoints.http.events import chat_stream, check_error
from tests.entrypoints.http.toy import BOS, text_script
from tests.entrypoints.http.toy_server import MODEL, Served, toy_server

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}


def prompt_of(served: Served) -> str:
    return bytes(t for t in served.engine.seen[-1].prompt_token_ids if t < 256).decode()


def test_plain_answer_has_openais_shape(served: Served) -> None:
    answer = served.chat(model=MODEL, max_completion_tokens=60, temperature=0).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "answer 0 to i[assistant]", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}])
@pytest.mark.parametrize("n", [1, 2])
def test_stream_equals_plain_answer(served: Served, options: dict | None, n: int) -> None:
    """STR-05, STR-07, OUT-23."""
    plain = served.chat(n=n, seed=1).json()
    wants = bool(options and options["include_usage"])
    stream = chat_stream(served.chat(n=n, seed=1, stream=True, stream_options=options), include_usage=wants)
    assert stream.texts == {c["index"]: c["message"]["content"] for c in plain["choices"]}
    assert stream.finish == {c["index"]: c["finish_reason"] for c in plain["choices"]}
    assert stream.usage == (plain["usage"] if wants else None)


def test_usage_on_every_chunk_when_asked(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chat_stream(served.chat(stream=True, stream_options=options), include_usage=True, continuous=True)


def test_answers_to_the_same_seed_repeat_and_samples_differ(served: Served) -> None:
    """SED-03: each sample has its own index in the engine, so it draws its own numbers."""
    runs = [
        [c["message"]["content"] for c in served.chat(n=4, seed=1, temperature=1.2).json()["choices"]] for _ in "ab"
    ]
    assert runs[0] == runs[1] and len(set(runs[0])) == 4
    assert [r.sample_index for r in served.engine.seen[-4:]] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_carry_text_and_bytes(stream: bool) -> None:
    with toy_server(text_script("\u00e9!")) as served:
        response = served.chat(logprobs=True, top_logprobs=2, stream=stream)
        if stream:
            chunks = chat_stream(response).chunks
            found = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
            content = [entry for each in found for entry in each["content"]]
        else:
            content = response.json()["choices"][0]["logprobs"]["content"]
        first, _, third = content  # F14: and no entry for the end of text
        assert first["bytes"] == [0xC3] and first["token"] == "\ufffd"
        assert third == {
            "token": "!", "logprob": -0.5, "bytes": [33],
            "top_logprobs": [
                {"token": "!", "logprob": -0.5, "bytes": [33]}, {"token": '"', "logprob": -1.0, "bytes": [34]},
            ],
        }  # fmt: skip


def test_logprobs_without_candidates(served: Served) -> None:
    choice = served.chat(logprobs=True, max_tokens=1).json()["choices"][0]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    check_error(served.chat(top_logprobs=2), 400, param="top_logprobs")
    check_error(served.chat(logprobs=True, top_logprobs=21), 400, param="top_logprobs")
    check_error(served.chat(logprobs=True, top_logprobs=-1), 400, param="top_logprobs")


def test_an_answer_without_limit_gets_what_the_context_leaves(served: Served) -> None:
    served.chat(ignore_eos=True)
    request = served.engine.seen[-1]
    assert request.sampling.max_tokens == 256 - len(request.prompt_token_ids)


def test_everything_reaches_the_template(served: Served) -> None:
    """INP-16."""
    served.chat(messages=[{"role": "system", "content": [{"type": "text", "text": "be"}]}, USER], max_tokens=1)
    assert prompt_of(served) == "[system]be[user]hi[assistant]"
    served.chat(add_generation_prompt=False, max_tokens=1)
    assert prompt_of(served) == "[user]hi"
    half = [USER, {"role": "assistant", "content": "so"}]
    served.chat(messages=half, continue_final_message=True, max_tokens=1)
    assert prompt_of(served) == "[user]hi[assistant]so"
    served.chat(chat_template_kwargs={"mood": "calm"}, max_tokens=1)
    assert "(mood calm)" in prompt_of(served)
    response = served.chat(tools=[TOOL], max_tokens=1)
    assert "(tools 1)" in prompt_of(served) and "tools" in response.headers[WARNING_HEADER]
    served.chat(tools=[TOOL], tool_choice="none", max_tokens=1)
    assert "(tools" not in prompt_of(served)
    check_error(served.chat(messages=half, continue_final_message=True, add_generation_prompt=True), 400)
    check_error(served.chat(chat_template_kwargs={"messages": []}), 400, param="chat_template_kwargs")


def test_templates_of_requests_need_permission(served: Served) -> None:
    check_error(served.chat(chat_template="{{ 1 }}"), 400, param="chat_template")
    with toy_server(server=ServerConfig(trust_request_chat_template=True)) as trusting:
        assert trusting.chat(chat_template="{{ messages[0].content }}!", max_tokens=1).status_code == 200
        assert prompt_of(trusting) == "hi!"
        error = check_error(trusting.chat(chat_template="{% if %}"), 400, param="chat_template")
        assert "chat template" in error["message"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "tools do not speak here"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "banana", "content": "x"}], "role"),
        ([], "message"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}], "image_url"),
        ([{"role": "assistant", "content": None, "tool_calls": 3}, USER], "tool_calls"),
        (["hi"], "messages[0]"),
        (5, "messages"),
        ({"role": "user"}, "messages"),
        (None, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_messages_are_named(served: Served, messages: Any, words: str, stream: bool) -> None:
    """TPL-01, API-06."""
    error = check_error(served.chat(messages=messages, stream=stream), 400)
    assert words in error["message"] and error["param"].startswith("messages")


def test_a_broken_template_is_named_without_its_stack() -> None:
    """TPL-01."""
    with toy_server(template="{{ undefined_thing.attribute }}") as served:
        error = check_error(served.chat(), 400)
        assert "chat template" in error["message"]
        assert served.complete(prompt="a", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            "tool_choice.function.name",
        ),
        ({"tool_choice": {"name": "f"}, "tools": [TOOL]}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"tools": "x"}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"function": 5}]}, "tools[0].function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
    ],
)
def test_what_is_not_served_is_refused_by_name(served: Served, body: dict, param: str) -> None:
    """INP-20."""
    before = len(served.engine.seen)
    error = check_error(served.chat(**body), 400, param=param)
    if param in ("response_format", "functions", "guided_json", "modalities"):
        assert "not available in this version" in error["message"]
    assert len(served.engine.seen) == before


IGNORANT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"])
def test_what_the_template_drops_is_refused_or_said(path: str) -> None:
    """F11, F15: on every route that renders a chat."""
    with toy_server(template=IGNORANT) as served:

        def ask(**body: Any) -> httpx.Response:
            return served.http.post(path, json={"messages": [USER], **body})

        check_error(ask(tools=[TOOL]), 400, param="tools")
        check_error(ask(documents=[{"text": "d"}]), 400, param="documents")
        check_error(ask(continue_final_message=True), 400, param="continue_final_message")
        answer = ask(chat_template_kwargs={"mood": "calm"}, reasoning_effort="low")
        told = ["mood changes nothing: the chat template has no such variable", "reasoning_effort changes nothing: the chat template has no such variable"]  # fmt: skip
        assert answer.status_code == 200 and answer.json()["warnings"] == told
        assert all(line in answer.headers[WARNING_HEADER] for line in told)
        if path != "/tokenize":  # there is no choice to be made there
            assert ask(tools=[TOOL], tool_choice="none").status_code == 200


def test_broken_arguments_of_the_history_reach_the_model() -> None:
    """F16."""
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}
    chat = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "?"},
    ]
    with toy_server(template=template) as served:
        answer = served.chat(messages=chat, max_tokens=1).json()
        assert prompt_of(served) == 'hi{"city": "Par?'
        assert any("messages[1].tool_calls[0].function.arguments" in w for w in answer["warnings"])


NO_PRIORITY = {"heeds_priority": False}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"priority": 5}, "priority 5 changes nothing"),  # F21
        ({"store": True}, "store true"),
        ({"service_tier": "flex"}, 'service_tier "flex"'),
        ({"prompt_cache_retention": "24h"}, 'prompt_cache_retention "24h"'),
        ({"verbosity": "low"}, 'verbosity "low"'),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"tools": [TOOL]}, "calls as text"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls false is not enforced"),  # F90
        ({"tools": [STRICT]}, "tools[0].function.strict is not enforced"),  # F95
        ({"zorp": 1}, "unknown field zorp"),
    ],
)
def test_what_changes_nothing_is_said(body: dict, word: str, caplog: pytest.LogCaptureFixture) -> None:
    """F70, with F21, F90 and F95: in the header, in the body, in a stream's first chunk, and in the log with the id."""
    with toy_server(facts=NO_PRIORITY) as served, caplog.at_level(logging.WARNING):
        body = body | {"max_tokens": 2, "request_id": "mine-7"}
        plain = served.chat(**body)
        assert word in plain.headers[WARNING_HEADER] and any(word in w for w in plain.json()["warnings"])
        assert len(caplog.records) == 1 and "mine-7" in caplog.text and word in caplog.text
        stream = chat_stream(served.chat(**body, stream=True))
        assert stream.chunks[0]["warnings"] == plain.json()["warnings"]
        assert not any("warnings" in chunk for chunk in stream.chunks[1:])
        rendered = served.http.post("/v1/chat/completions/render", json=body | {"messages": [USER]})
        assert rendered.json()["warnings"] == plain.json()["warnings"]


def test_a_field_that_changes_nothing_is_told_once_and_shortly(served: Served) -> None:
    """F70, F80: of a field that a route does not know one thing is said, and of a big value its kind."""
    answer = served.complete(prompt="a", max_tokens=1, verbosity="high").json()
    assert answer["warnings"] == ["unknown field verbosity is ignored"]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "verbosity": {"a": ["b"] * 100}}
    told = served.http.post("/v1/chat/completions", json=body).json()["warnings"]
    assert told == ["verbosity an object changes nothing: the model is not told"]


def test_what_is_done_anyway_is_not_warned_about() -> None:
    """F90, F70: without a warning there is no field for it."""
    with toy_server(facts=NO_PRIORITY) as served:
        body = {"priority": 0, "store": False, "service_tier": "default", "verbosity": "medium", "max_tokens": 1, "parallel_tool_calls": False, "tool_choice": "auto", "spaces_between_special_tokens": True}  # fmt: skip
        answer = served.chat(**body)
        assert answer.status_code == 200 and WARNING_HEADER not in answer.headers and "warnings" not in answer.json()
    with toy_server(facts={"heeds_priority": True}) as served:
        assert "warnings" not in served.chat(priority=5, max_tokens=1).json()
        assert served.engine.seen[-1].priority == 5


def test_the_official_client_reads_answers_with_warnings(served: Served) -> None:
    """F70, F90: as llama-index sends tool calls."""
    ask = {"model": MODEL, "messages": [USER], "tools": [STRICT], "parallel_tool_calls": False}
    with OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        plain = client.chat.completions.create(**ask)
        assert len(plain.warnings) == 3 and plain.choices[0].message.content
        with client.chat.completions.create(**ask, stream=True) as stream:
            chunks = list(stream)
        assert chunks[0].warnings == plain.warnings
        text = client.completions.create(model=MODEL, prompt="a", extra_body={"zorp": 1})
        assert text.warnings == ["unknown field zorp is ignored"]


def test_a_misplaced_schema_hears_where_it_belongs(served: Served) -> None:
    """API-11."""
    error = check_error(served.chat(response_format={"type": "json_schema", "schema": {}}), 400)
    assert "response_format.json_schema.schema" in error["message"]
    assert served.chat(response_format={"type": "text"}, max_tokens=1).status_code == 200


def test_harmless_fields_of_other_clients_are_accepted(served: Served) -> None:
    """TOOL-05: client libraries send these always."""
    response = served.chat(
        tool_choice="none", user="me", metadata={"a": "b"}, store=False, parallel_tool_calls=True, functions=None,
        service_tier="auto", modalities=["text"], max_tokens=1,
    )  # fmt: skip
    assert response.status_code == 200 and WARNING_HEADER not in response.headers


def test_max_tokens_is_called_as_the_client_called_it(served: Served) -> None:
    error = check_error(served.chat(max_completion_tokens=0), 400, param="max_completion_tokens")
    assert "max_completion_tokens" in error["message"]
    check_error(served.chat(max_completion_tokens=1000), 400, param="max_completion_tokens")
    check_error(served.chat(max_tokens=1000), 400, param="max_tokens")
    answer = served.chat(max_tokens=20, max_completion_tokens=3).json()  # F20
    assert answer["usage"]["completion_tokens"] == 3


def test_options_that_need_each_other(served: Served) -> None:
    check_error(served.chat(stream_options={"include_usage": True}), 400, param="stream_options")
    check_error(served.chat(stream=True, stream_options={"continuous_usage_stats": True}), 400)
    for nothing in (None, {}, {"include_usage": False}, {"continuous_usage_stats": None}):  # F90
        assert served.chat(stream_options=nothing, max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_scores_and_ids_come_once(served: Served, stream: bool) -> None:
    response = served.chat(prompt_logprobs=0, return_token_ids=True, max_tokens=3, n=2, stream=stream)
    if not stream:
        answer = response.json()
        assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
        assert answer["choices"][1]["token_ids"] == list(b"ans")
        return
    chunks = chat_stream(response).chunks
    assert [i for i, c in enumerate(chunks) if "prompt_logprobs" in c] == [0]
    assert [i for i, c in enumerate(chunks) if "prompt_token_ids" in c] == [0]
    assert chunks[0]["prompt_logprobs"][0] is None


def test_official_client_reads_all_of_it(served: Served) -> None:
    """STR-07."""
    with OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        plain = client.chat.completions.create(model="alias", messages=[USER], logprobs=True, top_logprobs=1)
        assert plain.model == "alias" and plain.choices[0].logprobs.content[0].token == "a"
        with client.chat.completions.create(model=MODEL, messages=[USER], stream=True) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == plain.choices[0].message.content
        with client.chat.completions.stream(model=MODEL, messages=[USER]) as events:
            assert events.get_final_completion().choices[0].message.content == text
        with pytest.raises(NotFoundError) as missing:
            client.chat.completions.create(model="nope", messages=[USER])
        assert missing.value.code == "model_not_found" and "nope" in str(missing.value)
        with pytest.raises(BadRequestError):
            client.chat.completions.create(model=MODEL, messages=[USER], n=0)


def test_one_bos_in_chats() -> None:
    """TPL-04: whether or not the template writes it."""
    for template in ("<s>{{ messages[0].content }}", "{{ messages[0].content }}"):
        with toy_server(adds_bos=True, template=template) as served:
            served.chat(max_tokens=1)
            assert list(served.engine.seen[-1].prompt_token_ids) == [BOS, 104, 105]
