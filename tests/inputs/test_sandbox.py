"""The language of chat templates, and what their text tells about them."""

from datetime import datetime

import pytest
from jinja2 import TemplateError, TemplateSyntaxError

from octavo.inputs.sandbox import CompiledTemplate, TemplateRefusal, make_environment

ENVIRONMENT = make_environment(lambda: datetime(2024, 7, 26, 12, 0))


def render(source: str, **variables: object) -> str:
    return CompiledTemplate(source, ENVIRONMENT).render(**variables)


def test_blocks_are_trimmed() -> None:
    assert render("a\n   {% if true %}\nb\n   {% endif %}\nc") == "a\nb\nc"


def test_loop_controls() -> None:
    assert render("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "023"  # fmt: skip


def test_tojson_writes_characters_as_they_are() -> None:
    value = {"b": "naïve <&> '", "a": [1, None, True]}
    assert render("{{ v | tojson }}", v=value) == '{"b": "naïve <&> \'", "a": [1, null, true]}'
    assert render("{{ v | tojson(indent=2) }}", v={"a": 1}) == '{\n  "a": 1\n}'
    assert render("{{ v | tojson(sort_keys=true, separators=(',', ':')) }}", v={"b": 1, "a": 2}) == '{"a":2,"b":1}'
    assert render("{{ v | tojson(ensure_ascii=true) }}", v="é") == '"\\u00e9"'


def test_the_date_comes_from_the_injected_clock() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


def test_raise_exception_carries_its_text() -> None:
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_the_generation_tag_gives_its_body_and_keeps_its_names_to_itself() -> None:
    assert render("{% generation %}{% set x = 1 %}{{ 'a' ~ x }}{% endgeneration %}{{ x is defined }}") == "a1False"
    assert render("{% for m in ms %}{% generation %}{{ m }}{% endgeneration %}{% endfor %}", ms="ab") == "ab"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ raise_exception.__globals__.os }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises((TemplateError, OverflowError)):
        render(source, messages=[])


def test_syntax_errors_show_when_compiling() -> None:
    with pytest.raises(TemplateSyntaxError):
        CompiledTemplate("{% if %}", ENVIRONMENT)


@pytest.mark.parametrize(
    ("source", "iterates"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% macro show(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}", True),
        ("{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}", True),
        ("{% for p in m.content[1:] %}{{ p.text }}{% endfor %}", True),
        ("{% for line in m.content.split('\\n') %}{{ line }}{% endfor %}", False),
        ("{% for d in m.documents %}{{ d.content }}{% endfor %}", False),
    ],
)
def test_what_a_template_wants_as_content_is_found_in_its_text(source: str, iterates: bool) -> None:
    """INP-12."""
    assert CompiledTemplate(source, ENVIRONMENT).iterates_content is iterates


def test_tests_on_content_and_roles_are_seen() -> None:
    template = CompiledTemplate("{% if m.content is string %}{% endif %}{% if m['content'] is not none %}{% endif %}", ENVIRONMENT)  # fmt: skip
    assert template.tests_content_type and template.tests_content_none and not template.knows_developer
    other = CompiledTemplate("{% if m.role in ['developer', 'system'] %}{{ m.content }}{% endif %}", ENVIRONMENT)
    assert not other.tests_content_type and not other.tests_content_none and other.knows_developer
