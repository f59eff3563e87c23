"""Chat templates: choice, roles, content formats, errors in the template's words (INP-12, INP-16, TPL-01)."""

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.base.errors import ClientError, ConfigError
from octavo.inputs.chat import ChatOptions, ChatTemplate, load_chat_template

ECHO = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[assistant|{% endif %}"
USER = {"role": "user", "content": "hi"}
CALLED: dict[str, Any] = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}


def apply(source: str, messages: Any, **options: Any) -> str:
    return ChatTemplate({"default": source}, variables={"bos_token": "<s>"}).apply(messages, **options)


def test_messages_tools_documents_and_variables_reach_the_template() -> None:
    source = "{{ bos_token }}{{ tools[0].function.name }}{{ documents[0].text }}{{ flag }}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert apply(source, [USER], tools=tools, documents=[{"text": "d"}], flag=3) == "<s>fd3hi"


def test_without_tools_templates_see_none() -> None:
    assert apply("{{ tools is none }}{{ documents is none }}", [USER], tools=[], documents=[]) == "TrueTrue"


def test_a_requests_variables_win_over_the_special_tokens() -> None:
    assert apply("{{ bos_token }}", [USER], bos_token="x") == "x"


def test_generation_prompt() -> None:
    assert apply(ECHO, [USER]) == "[user|hi][assistant|"
    assert apply(ECHO, [USER], add_generation_prompt=False) == "[user|hi]"


class TestContinue:
    CHAT = (USER, {"role": "assistant", "content": "The sky is "})

    def apply(self, source: str, messages: Any) -> str:
        return apply(source, messages, add_generation_prompt=False, continue_final_message=True)

    def test_the_text_ends_where_the_message_ends(self) -> None:
        assert self.apply(ECHO, self.CHAT) == "[user|hi][assistant|The sky is "

    def test_a_template_that_trims_gives_trimmed_text(self) -> None:
        assert self.apply(ECHO.replace("m.content", "m.content | trim"), self.CHAT) == "[user|hi][assistant|The sky is"

    def test_the_last_part_is_continued(self) -> None:
        source = "{% for m in messages %}[{% for p in m.content %}{{ p.text }};{% endfor %}]{% endfor %}"
        assert self.apply(source, [USER, {"role": "assistant", "content": ["a", "b"]}]) == "[hi;][a;b"

    def test_equal_earlier_text_does_not_confuse_it(self) -> None:
        assert self.apply(ECHO, [USER, {"role": "assistant", "content": "hi"}]) == "[user|hi][assistant|hi"

    def test_both_directions_at_once_are_refused(self) -> None:
        with pytest.raises(ClientError, match="add_generation_prompt must be false") as caught:
            apply(ECHO, self.CHAT, continue_final_message=True)
        assert caught.value.param == "continue_final_message"

    @pytest.mark.parametrize(
        "last", [{"role": "assistant", "content": None, **CALLED}, {"role": "assistant", **CALLED}]
    )
    def test_there_must_be_something_to_continue(self, last: dict[str, Any]) -> None:
        with pytest.raises(ClientError, match="needs a final message with content"):
            self.apply(ECHO, [USER, last])

    def test_a_template_that_drops_the_message_is_named(self) -> None:
        with pytest.raises(ClientError, match="leaves out or changes the final message"):
            self.apply("{{ messages[0].content }}", self.CHAT)


class TestErrors:
    """TPL-01: 400 with the template's message, and never a stack."""

    ALTERNATE = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
    )

    @pytest.mark.parametrize(
        "chat", [[USER, USER], [{"role": "system", "content": "s"}, USER], [{"role": "assistant", "content": "a"}]]
    )
    def test_a_refusal_keeps_the_templates_words(self, chat: Any) -> None:  # fmt: skip
        with pytest.raises(ClientError, match=r"chat template refused.*roles must alternate user/assistant") as caught:
            apply(self.ALTERNATE, chat)
        assert caught.value.status == 400 and caught.value.param == "messages"

    @pytest.mark.parametrize(
        "source",
        [
            "{{ undefined.attr }}",
            "{{ messages[0].nothing.more }}",
            "{{ 1 / 0 }}",
            "{{ 'a' + 1 }}",
            "{{ ''.__class__.__mro__ }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% include 'x' %}",
            "{% for i in range(99999999) %}{% endfor %}",
        ],
    )
    def test_a_broken_template_is_called_so_in_one_line(self, source: str, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING), pytest.raises(ClientError, match="chat template") as caught:
            apply(source, [USER])
        assert caught.value.code == "chat_template_error"
        assert "\n" not in caught.value.message and "Traceback" not in caught.value.message
        assert len(caplog.records) == 1 and caplog.records[0].exc_info is None

    def test_long_messages_are_cut(self) -> None:
        with pytest.raises(ClientError) as caught:
            apply("{{ raise_exception('x' * 100000) }}", [USER])
        assert len(caught.value.message) < 700

    def test_unknown_roles_are_refused_before_the_template(self) -> None:
        with pytest.raises(ClientError, match="banana"):
            apply(ECHO, [{"role": "banana", "content": "x"}])

    def test_a_name_does_no_harm(self) -> None:
        assert apply(ECHO, [{**USER, "name": "Ada"}]) == "[user|hi][assistant|"

    def test_reserved_variables_are_refused(self) -> None:
        template = ChatTemplate({"default": ECHO})
        with pytest.raises(ClientError, match="messages") as caught:
            template.render([USER], ChatOptions(variables={"messages": []}))
        assert caught.value.param == "chat_template_kwargs"

    def test_a_model_without_a_template_says_so(self) -> None:
        template = ChatTemplate({})
        assert not template
        with pytest.raises(ClientError, match=r"no chat template.*--chat-template") as caught:
            template.apply([USER])
        assert caught.value.code == "no_chat_template"

    def test_a_requests_template_that_does_not_compile_is_its_own_mistake(self) -> None:
        template = ChatTemplate({"default": ECHO})
        with pytest.raises(ClientError, match="chat template does not compile") as caught:
            template.render([USER], ChatOptions(chat_template="{% if %}"))
        assert caught.value.param == "chat_template"


class TestContent:
    PARTS = "{% for m in messages %}{% for p in m.content %}({{ p.type }}:{{ p.text }}){% endfor %}{% endfor %}"
    BOTH = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"  # fmt: skip
    LIST = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]  # noqa: RUF012

    def test_each_template_gets_the_format_it_wants(self) -> None:
        assert apply(ECHO, self.LIST, add_generation_prompt=False) == "[user|a\nb]"
        assert apply(self.PARTS, self.LIST) == "(text:a)(text:b)"
        assert apply(self.PARTS, [USER]) == "(text:hi)"
        assert apply(self.BOTH, self.LIST) == "(a)(b)"
        assert apply(self.BOTH, [USER]) == "hi"
        assert ChatTemplate({"default": ECHO}).content_format() == "string"
        assert ChatTemplate({"default": self.PARTS}).content_format() == "openai"

    def test_the_format_can_be_set_by_hand(self) -> None:
        forced = ChatTemplate({"default": self.BOTH}, content_format="string")
        assert forced.apply(self.LIST) == "a\nb"
        with pytest.raises(ConfigError, match="auto, string, openai"):
            ChatTemplate({"default": self.BOTH}, content_format="xml")

    def test_turns_without_content_look_as_the_template_expects(self) -> None:
        turn = [USER, {"role": "assistant", "content": None, **CALLED}]
        assert apply("{% for m in messages %}{{ m.content is defined }}{% endfor %}", turn) == "TrueFalse"
        assert apply("{% for m in messages %}{{ m.content is none }}{% endfor %}", turn) == "FalseTrue"
        assert apply("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}", turn) == "xhix"


class TestRoles:
    def test_developer_becomes_system_unless_the_template_knows_it(self) -> None:
        chat = [{"role": "developer", "content": "d"}]
        assert apply(ECHO, chat, add_generation_prompt=False) == "[system|d]"
        knows = "{% if messages[0].role in ('developer', 'system') %}" + ECHO + "{% endif %}"
        assert apply(knows, chat, add_generation_prompt=False) == "[developer|d]"

    def test_tool_arguments_are_objects_or_text_as_the_template_needs(self) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
        chat = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        loop = "{% for m in messages %}{% for c in m.tool_calls %}<%s>{% endfor %}{% endfor %}"
        for body in ("{{ c.function.arguments | tojson }}", "{{ 'x' + c.function.arguments }}", "{{ 'x' ~ c.function.arguments }}", "{{ c.function.arguments }}"):  # fmt: skip
            assert '{"a": "é"}>' in apply(loop.replace("%s", body), chat)
        assert apply(loop.replace("%s", "{{ c.function.arguments.a }}"), chat) == "<é>"


class TestNamed:
    def test_tools_choose_the_template_for_tools(self) -> None:
        template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "rag"})
        tool = {"type": "function", "function": {"name": "f"}}
        assert template.apply([USER]) == "plain"
        assert template.apply([USER], tools=[tool]) == "1 tools"
        assert template.render([USER], ChatOptions(chat_template="rag")) == "rag"
        assert template.render([USER], ChatOptions(chat_template="{{ messages[0].content }}")) == "hi"
        assert template.names == ("default", "tool_use", "rag")

    def test_a_single_named_template_is_the_default(self) -> None:
        assert ChatTemplate({"chat": "only"}).apply([USER]) == "only"


class TestLoading:
    def folder(self, path: Path, **config: Any) -> Path:
        (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<b>"}, **config}))
        return path

    def test_the_models_own_template_with_its_special_tokens(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, chat_template="{{ bos_token }}{{ strftime_now('%Y') }}")
        template = load_chat_template(str(folder), now=lambda: datetime(1999, 1, 1))
        assert template.apply([USER]) == "<b>1999"

    def test_an_override_may_be_a_file_a_text_or_a_name(self, tmp_path: Path) -> None:
        folder = self.folder(
            tmp_path, chat_template=[{"name": "default", "template": "a"}, {"name": "other", "template": "b"}]
        )
        (tmp_path / "mine.jinja").write_text("c{{ bos_token }}")
        for override, text in [(None, "a"), (str(tmp_path / "mine.jinja"), "c<b>"), ("{{ messages[0].content }}", "hi"), ("other", "b")]:  # fmt: skip
            assert load_chat_template(str(folder), override).apply([USER]) == text

    @pytest.mark.parametrize(
        ("override", "words"), [("nowhere.jinja", "no file 'nowhere.jinja'"), ("{% if %}", "does not compile")]
    )
    def test_a_wrong_override_ends_the_start(self, override: str, words: str, tmp_path: Path) -> None:  # fmt: skip
        with pytest.raises(ConfigError, match=f"--chat-template.*{words}"):
            load_chat_template(str(self.folder(tmp_path)), override)

    def test_a_very_long_override_is_a_text(self, tmp_path: Path) -> None:
        text = "{# " + "x" * 10_000 + " #}{{ messages[0].content }}"
        assert load_chat_template(str(self.folder(tmp_path)), text).apply([USER]) == "hi"

    def test_a_broken_template_of_the_model_is_logged_and_refuses_chats(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        template = load_chat_template(str(self.folder(tmp_path, chat_template="{% for %}")))
        assert "does not compile" in caplog.text
        with pytest.raises(ClientError, match="chat template does not compile"):
            template.apply([USER])

    def test_a_model_without_one_loads(self, tmp_path: Path) -> None:
        assert not load_chat_template(str(tmp_path))
