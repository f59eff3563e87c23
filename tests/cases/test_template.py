"""A chat template's complaints reach the client, and BOS comes once: TPL-01, TPL-04."""

import logging

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ClientError
from tests.support import checkpoints
from tests.support import fixture_tokenizers as tok
from tests.support.live import live

TURN = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    + TURN + "{% endfor %}{{ '<|im_start|>assistant\\n' }}"
)  # fmt: skip
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + TURN + "{% endfor %}"
)
ROLES = (
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('Only user, system and assistant roles are supported, not ' + message['role']) }}{% endif %}"
    "{% if message['name'] %}{{ message['name'] + ': ' }}{% endif %}" + TURN + "{% endfor %}"
)
BROKEN = {
    "an attribute of nothing": "{{ nothing.attr }}",
    "a chain of nothings": "{{ messages[0].a.b.c }}",
    "a type": "{{ 1 + 'a' }}",
    "a division": "{{ 1 / 0 }}",
    "an index": "{{ messages[99].role }}",
    "a function that is not there": "{{ strftime_not_there('%Y') }}",
    "endless": "{% for i in range(1000000000) %}{% for j in range(1000000000) %}{{ i }}{% endfor %}{% endfor %}",
    "a way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a message of its own that is huge": "{{ raise_exception('x' * 100000) }}",
}
UNCOMPILED = {"an open block": "{% if x %}", "no filter": "{{ x | no_such_filter }}", "a brace": "{{ x }"}
USER, ASSISTANT, SYSTEM = ({"role": role, "content": "hi"} for role in ("user", "assistant", "system"))


@pytest.fixture(scope="module")
def trusting():
    with live(checkpoints.tiny_llama(), num_kv_blocks=256, num_threads=1, trust_request_chat_template=True) as server:
        yield server


def refused(server, messages, **body):
    """The error of a chat that must be refused: short, in words, without a stack."""
    answers = [server.post("/v1/chat/completions", messages=messages, stream=s, **body) for s in (False, True)]
    answers.append(server.post("/tokenize", messages=messages, **body))
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert answer.headers["content-type"].startswith("application/json")
        assert len(answer.content) < 2000
        for word in ("Traceback", 'File "', "jinja2", "site-packages"):
            assert word not in answer.text
    errors = [answer.json()["error"] for answer in answers]
    assert errors[0] == errors[1] == errors[2]
    assert errors[0]["type"] == "invalid_request_error"
    return errors[0]


# ---- TPL-01 ----------------------------------------------------------------------------------

COMPLAINTS = [
    (ALTERNATING, [USER, USER], "must alternate"),
    (ALTERNATING, [ASSISTANT, USER], "must alternate"),
    (ALTERNATING, [SYSTEM, USER], "must alternate"),
    (ALTERNATING, [USER, ASSISTANT, ASSISTANT], "must alternate"),
    (NO_SYSTEM, [SYSTEM, USER], "System role not supported"),
    (NO_SYSTEM, [USER, SYSTEM], "System role not supported"),
    (ROLES, [USER, {"role": "tool", "content": "4", "tool_call_id": "x"}], "not tool"),
    (ROLES, [{"role": "function", "name": "f", "content": "4"}], "not function"),
]


@pytest.mark.parametrize(("template", "messages", "words"), COMPLAINTS)
def test_tpl01_what_the_template_says_reaches_the_client(trusting, template, messages, words):
    error = refused(trusting, messages, chat_template=template)
    assert words in error["message"]
    assert "chat template" in error["message"]
    assert trusting.chat([USER], chat_template=template, max_tokens=1)["choices"]


def test_tpl01_the_model_s_own_template_complains_in_the_same_way(caplog):
    with live(checkpoints.tiny_llama(), num_kv_blocks=64, num_threads=1, chat_template=ALTERNATING) as server:
        assert "must alternate" in refused(server, [USER, USER])["message"]
        assert server.chat([USER, ASSISTANT, USER], max_tokens=1)["choices"]
        answer = server.post("/v1/chat/completions", messages=[USER], chat_template=NO_SYSTEM, max_tokens=1)
        assert answer.status_code == 400, "a request brings no template unless the server allows it"
        assert "--trust-request-chat-template" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", BROKEN)
def test_tpl01_a_template_with_a_bug_is_named_as_the_one_at_fault(trusting, caplog, name):
    caplog.set_level(logging.WARNING)
    error = refused(trusting, [USER], chat_template=BROKEN[name])
    assert "chat template" in error["message"]
    lines = [r for r in caplog.records if "chat template" in r.getMessage()]
    if "huge" not in name:
        assert len(lines) == 3, "one clear line for each of the three requests"
        assert all(r.exc_info is None and len(r.getMessage()) < 1000 for r in lines)
    assert trusting.chat([USER], max_tokens=1)["choices"]


@pytest.mark.parametrize("name", UNCOMPILED)
def test_tpl01_a_template_that_does_not_compile(trusting, name):
    assert "chat template" in refused(trusting, [USER], chat_template=UNCOMPILED[name])["message"]


WRONG = [
    ([{"role": "banana", "content": "x"}], "banana"),
    ([USER, {"role": "", "content": "x"}], "role"),
    ([USER, {"content": "x"}], "messages[1].role"),
    ([{"role": None, "content": "x"}], "role"),
    ([{"role": 5, "content": "x"}], "role"),
    ([USER, {"role": "user", "content": 5}], "messages[1].content"),
    ([USER, {"role": "user"}], "messages[1].content"),  # F18
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([USER, {"role": "tool", "content": "4"}], "messages[1].tool_call_id"),
    ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "banana", "text": "x"}]}], "banana"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}], "image"),
]


@pytest.mark.parametrize(("messages", "words"), WRONG)
def test_tpl01_what_is_no_message_is_named_by_its_place(tiny, messages, words):
    assert words in refused(tiny, messages)["message"]


HARMLESS = {
    "empty content": [{"role": "user", "content": ""}],
    "an empty list": [{"role": "user", "content": []}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "a name": [{"role": "user", "content": "x", "name": "Ann"}],
    "an unknown key": [{"role": "user", "content": "x", "banana": 1}],
    "a call without content": [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ],
    "developer": [{"role": "developer", "content": "be short"}, USER],
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_tpl01_what_is_only_unusual_is_served(trusting, name):
    assert trusting.chat(HARMLESS[name], max_tokens=1)["choices"]


def test_tpl01_names_reach_a_template_that_reads_them(trusting):
    messages = [{"role": "user", "content": "x", "name": "Ann"}]
    tokens = trusting.post("/tokenize", messages=messages, chat_template=ROLES).json()["tokens"]
    assert trusting.post("/detokenize", tokens=tokens).json()["prompt"].startswith("<s>Ann: ")


def test_tpl01_a_model_without_a_template_says_so(tmp_path):
    path = checkpoints.tiny_llama(tmp_path / "m")
    tok.save_tokenizer(tok.trained_bpe(), path, chat_template=None, config={"bos_token": "<s>", "eos_token": "</s>"})
    with live(path, num_kv_blocks=64, num_threads=1) as server:
        message = refused(server, [USER])["message"]
        assert "chat template" in message
        assert "--chat-template" in message
        assert server.text("hi", max_tokens=1) is not None


def test_tpl01_python_gets_the_same_words():
    with LLM(str(checkpoints.tiny_llama()), num_kv_blocks=64, num_threads=1, chat_template=ALTERNATING) as llm:
        with pytest.raises(ClientError, match="must alternate"):
            llm.chat([USER, USER], SamplingParams(max_tokens=1))
        with pytest.raises(ClientError, match=r"prompt 1: .*must alternate"):
            llm.chat([[USER], [USER, USER]], SamplingParams(max_tokens=1))


# ---- TPL-04 ----------------------------------------------------------------------------------

WRITES_BOS = tok.CHATML
WRITES_NONE = tok.CHATML.replace("{{ bos_token }}", "")
WRITES_BOS_BY_NAME = tok.CHATML.replace("{{ bos_token }}", "<s>")
BOS = 0


def ids_of_chat(server, **body):
    """The prompt that a chat became, as the generating route says it."""
    answer = server.chat([USER], max_tokens=1, return_token_ids=True, **body)
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    return answer["prompt_token_ids"]


def ids_of_text(server, prompt, **body):
    """The prompt that a text became."""
    return server.complete(prompt, max_tokens=1, return_token_ids=True, **body)["choices"][0]["prompt_token_ids"]


def bos(ids):
    """How many BOS there are, all of them at the front."""
    count = ids.count(BOS)
    assert ids[:count] == [BOS] * count
    return count


@pytest.fixture(scope="module", params=["writes BOS", "writes none", "writes BOS by name"])
def adding(request):
    """Tokenizers that add BOS, with templates that write it too, or do not."""
    template = {"writes BOS": WRITES_BOS, "writes none": WRITES_NONE, "writes BOS by name": WRITES_BOS_BY_NAME}
    path = checkpoints.tiny_llama()
    with live(path, num_kv_blocks=64, num_threads=1, chat_template=template[request.param]) as server:
        yield server


def test_tpl04_a_chat_has_one_bos_whether_or_not_the_template_writes_it(adding):
    assert bos(ids_of_chat(adding)) == 1
    assert bos(adding.post("/tokenize", messages=[USER]).json()["tokens"]) == 1
    rendered = adding.post("/v1/chat/completions/render", messages=[USER]).json()["prompts"][0]
    assert rendered["prompt_token_ids"] == ids_of_chat(adding)


def test_tpl04_a_chat_obeys_the_switch(adding):
    written = int("<s>" in adding.post("/v1/chat/completions/render", messages=[USER]).json()["prompts"][0]["prompt"])
    assert bos(ids_of_chat(adding, add_special_tokens=False)) == written, "the template's text alone"
    assert bos(ids_of_chat(adding, add_special_tokens=True)) == 1


def test_tpl04_a_text_has_one_bos_and_a_rendered_one_no_second(adding):
    """A text that begins with BOS keeps its own and gets no other: the policy in `inputs.renderer`."""
    assert bos(ids_of_text(adding, "hi")) == 1
    assert bos(ids_of_text(adding, "hi", add_special_tokens=False)) == 0
    rendered = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids_of_text(adding, rendered) == ids_of_text(adding, rendered, add_special_tokens=False)
    assert bos(ids_of_text(adding, rendered)) == 1
    assert ids_of_text(adding, rendered) == ids_of_chat(adding)
    assert bos(ids_of_text(adding, ["hi", "<s>hi"][1:])) == 1
    assert adding.post("/tokenize", prompt="hi").json()["tokens"] == ids_of_text(adding, "hi")


def test_tpl04_ids_are_taken_as_they_are(adding):
    for ids in ([5, 6], [BOS, 5], [BOS, BOS, 5]):
        assert ids_of_text(adding, ids) == ids


@pytest.mark.parametrize(("template", "count"), [(WRITES_BOS, 1), (WRITES_NONE, 0)])
def test_tpl04_a_tokenizer_that_adds_none_gives_what_the_template_writes(template, count):
    path = checkpoints.tiny_llama(adds_bos=False)
    with live(path, num_kv_blocks=64, num_threads=1, chat_template=template) as server:
        assert bos(ids_of_chat(server)) == count
        assert bos(ids_of_text(server, "hi")) == 0
        assert bos(ids_of_text(server, "<s>hi")) == 1


@pytest.mark.parametrize("template", [WRITES_BOS, WRITES_NONE])
def test_tpl04_python_gives_the_same_ids(template):
    with LLM(str(checkpoints.tiny_llama()), num_kv_blocks=64, num_threads=1, chat_template=template) as llm:
        params = SamplingParams(max_tokens=1, temperature=0)
        chat = list(llm.chat([USER], params)[0].prompt_token_ids)
        rendered = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        hi, text = llm.generate(["hi", rendered], params)
        assert bos(chat) == 1
        assert bos(list(hi.prompt_token_ids)) == 1
        assert list(text.prompt_token_ids) == chat
        (given,) = llm.generate({"prompt_token_ids": [BOS, BOS, 7]}, params)
        assert list(given.prompt_token_ids) == [BOS, BOS, 7]


def test_tpl04_the_real_model_adds_none(chat135m):
    ids = ids_of_chat(chat135m)
    assert ids[0] != ids[1]
    assert chat135m.post("/tokenize", messages=[USER]).json()["tokens"] == ids
    assert ids_of_text(chat135m, "hi") == ids_of_text(chat135m, "hi", add_special_tokens=False)
