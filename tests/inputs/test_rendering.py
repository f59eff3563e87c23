"""What a template drops is refused or said, and what it cannot bear is tried in another shape (F11, F15, F16, F17)."""

from typing import Any

import pytest

from octavo.base.errors import ClientError
from octavo.inputs.chat import ChatOptions, ChatTemplate

PLAIN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
TOOLS = "{% if tools %}({{ tools | tojson }}){% endif %}" + PLAIN
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BROKEN = '{"city": "Par'


def render(source: str, messages: Any, **options: Any) -> tuple[str, list[str]]:
    warnings: list[str] = []
    options.setdefault("add_generation_prompt", False)
    text = ChatTemplate({"default": source}).render(messages, ChatOptions(**options), warnings.append)
    return text, warnings


class TestDropped:
    """F11."""

    @pytest.mark.parametrize("source", [PLAIN, "{% if tools %}{% endif %}" + PLAIN, "{# tools #}" + PLAIN])
    def test_tools_that_the_model_would_not_see_are_refused(self, source: str) -> None:
        with pytest.raises(ClientError, match="does not show tools to the model") as caught:
            render(source, [USER], tools=[TOOL])
        assert caught.value.param == "tools" and caught.value.code == "tools_not_supported"
        assert render(source, [USER], tools=[])[0] == "[user|hi]"

    def test_tools_that_it_sees_are_not(self) -> None:
        assert '"name": "f"' in render(TOOLS, [USER], tools=[TOOL])[0]
        needs = "{{ tools[0].function.name }}" + PLAIN  # fails without tools
        assert render(needs, [USER], tools=[TOOL])[0] == "f[user|hi]"

    def test_tools_that_this_conversation_hides_are_refused(self) -> None:
        only_for_system = (
            "{% for m in messages %}{% if m.role == 'system' %}{{ tools }}{% endif %}{{ m.content }}{% endfor %}"
        )
        with pytest.raises(ClientError, match="does not show tools"):
            render(only_for_system, [USER], tools=[TOOL])
        assert "'f'" in render(only_for_system, [{"role": "system", "content": "s"}, USER], tools=[TOOL])[0]

    def test_documents_too(self) -> None:
        with pytest.raises(ClientError, match="does not show documents") as caught:
            render(PLAIN, [USER], documents=[{"text": "d"}])
        assert caught.value.param == "documents"
        assert render("{{ documents[0].text }}" + PLAIN, [USER], documents=[{"text": "d"}])[0] == "d[user|hi]"

    def test_variables_that_it_does_not_have_are_said(self) -> None:
        source = "{% if enable_thinking %}think{% endif %}{% set mine = 1 %}" + PLAIN
        _, warnings = render(source, [USER], variables={"enable_thinking": False, "mood": "calm", "mine": 2})
        assert [w.split()[0] for w in warnings] == ["mood", "mine"] and all("changes nothing" in w for w in warnings)

    def test_calls_of_the_history_that_it_leaves_out_are_said(self) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        _, warnings = render(PLAIN, [USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
        assert warnings == ["the chat template leaves out tool_calls of earlier messages"]
        _, warnings = render(PLAIN, called(BROKEN))  # F16: nobody is told that it was read
        assert len(warnings) == 2 and "function.arguments is left out" in warnings[0]

    def test_a_system_message_that_it_leaves_out_is_said(self) -> None:
        source = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        text, warnings = render(source, [{"role": "system", "content": "Be brief."}, USER])
        assert text == "hi" and warnings == ["messages[0].content is left out or changed by the chat template"]
        assert render(PLAIN, [{"role": "system", "content": " Be brief. "}, USER])[1] == []


class TestContinue:
    """F15."""

    @pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
    def test_only_the_model_goes_on_with_its_own_words(self, role: str) -> None:
        last = {"role": role, "content": "The sky", "tool_call_id": "1"}
        with pytest.raises(ClientError, match=f"role assistant, got {role}") as caught:
            render(PLAIN, [USER, last], continue_final_message=True)
        assert caught.value.param == "continue_final_message"

    def test_it_goes_on_with_what_was_protected(self) -> None:
        def protect(text: str) -> str:
            return text.replace("<end>", "<!end>")

        last = {"role": "assistant", "content": "so<end>it"}
        text, _ = render(PLAIN, [USER, last], continue_final_message=True, protect=protect)
        assert text == "[user|hi][assistant|so<!end>it"


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]


LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}<%s>{% endfor %}{% endfor %}"
BY_ITEMS = LOOP.replace("%s", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}")
BY_METHOD = LOOP.replace("%s", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}")


class TestBrokenArguments:
    """F16, INP-15."""

    @pytest.mark.parametrize(
        "printed",
        [
            "{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}", "{{ 'x' + c.function.arguments }}",
            "{{ c | tojson }}", "{{ c.function | tojson(indent=2) }}", "{{ c.function | tojson(ensure_ascii=True) }}",
            "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}",
        ],
    )  # fmt: skip
    def test_templates_that_print_them_print_the_text(self, printed: str) -> None:
        text, warnings = render(LOOP.replace("%s", printed), called(BROKEN))
        assert BROKEN in text
        assert warnings == ["messages[1].tool_calls[0].function.arguments is no JSON object; the model reads it as it was sent"]  # fmt: skip

    def test_templates_that_walk_through_them_get_an_object_with_the_text(self) -> None:
        assert render(BY_ITEMS, called(BROKEN))[0] == f"<arguments={BROKEN};>"
        assert '"{\\"city\\": \\"Par"' in render(BY_METHOD, called(BROKEN))[0]
        assert render(BY_ITEMS, called('{"city": "Paris"}')) == ("<city=Paris;>", [])

    def test_a_template_that_cannot_take_them_names_the_place(self) -> None:
        source = LOOP.replace("%s", "{% if c.function.arguments %}{{ c.function.arguments.city.name }}{% endif %}")
        with pytest.raises(ClientError, match="is no JSON object") as caught:
            render(source, called(BROKEN))
        assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
        with pytest.raises(ClientError, match="the chat template failed"):
            render("{{ nothing.at.all }}", called(BROKEN))

    def test_the_text_is_protected_like_any_other(self) -> None:
        text, _ = render(LOOP.replace("%s", "{{ c | tojson }}"), called("{<end>"), protect=lambda t: t.replace("<end>", "<!end>"))  # fmt: skip
        assert "{<!end>" in text and "<end>" not in text


ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% endif %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
)
FIRST_ONLY = "{{ messages[0].content }}|{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"


class TestSystemMessages:
    """F17."""

    CHAT = (
        {"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, USER, {"role": "developer", "content": "C"},
    )  # fmt: skip

    def test_they_are_joined_where_one_is_allowed(self) -> None:
        assert render(ONE_SYSTEM, self.CHAT) == ("[system|A\n\nB\n\nC][user|hi]", [])
        assert render(ONE_SYSTEM, self.CHAT[1:]) == ("[system|B\n\nC][user|hi]", [])

    def test_they_are_joined_where_others_are_dropped(self) -> None:
        assert render(FIRST_ONLY, self.CHAT) == ("A\n\nB\n\nC|hi", [])

    def test_they_stay_where_they_are_allowed(self) -> None:
        assert render(PLAIN, self.CHAT)[0] == "[system|A][system|B][user|hi][system|C]"

    def test_parts_are_joined_as_parts(self) -> None:
        source = ONE_SYSTEM.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
        assert render(source, self.CHAT)[0] == "[system|A\n\nB\n\nC][user|hi]"

    def test_a_template_that_takes_none_refuses_in_its_own_words(self) -> None:
        source = ONE_SYSTEM.replace(" and not loop.first", "")
        with pytest.raises(ClientError, match="system first"):
            render(source, self.CHAT)
