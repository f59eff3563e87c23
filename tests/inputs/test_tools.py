"""Tool definitions are checked before a template prints them (F11)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ClientError
from octavo.inputs.tools import MAX_DEPTH, check_schema, check_tools

PLACE = "tools[0].function"


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def schema(**keywords: Any) -> dict[str, Any]:
    return tool(parameters={"type": "object", **keywords})


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("x", "tools"),
        ({"type": "function"}, "tools"),
        (["x"], "tools[0]"),
        ([{"type": "function"}], PLACE),
        ([{"type": "function", "function": 5}], PLACE),
        ([{"type": "function", "function": {}}], f"{PLACE}.name"),
        ([{"type": "function", "name": "f"}], PLACE),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
        ([tool(name="")], f"{PLACE}.name"),
        ([tool(name=5)], f"{PLACE}.name"),
        ([tool(name="get weather")], f"{PLACE}.name"),
        ([tool(name="a.b")], f"{PLACE}.name"),
        ([tool(name="wetter_für")], f"{PLACE}.name"),
        ([tool(name="a" * 65)], f"{PLACE}.name"),
        ([tool(description=5)], f"{PLACE}.description"),
        ([tool(strict="yes")], f"{PLACE}.strict"),
        ([tool(), tool(parameters=5)], "tools[1].function.parameters"),
        ([tool(parameters=[])], f"{PLACE}.parameters"),
        ([tool(parameters="{}")], f"{PLACE}.parameters"),
        ([tool(parameters={"type": "string"})], f"{PLACE}.parameters.type"),
        ([tool(parameters={"type": "dict"})], f"{PLACE}.parameters.type"),
        ([tool(parameters={"type": 5})], f"{PLACE}.parameters.type"),
        ([schema(properties=[])], f"{PLACE}.parameters.properties"),
        ([schema(properties={"city": "string"})], f"{PLACE}.parameters.properties.city"),
        ([schema(properties={"city": {"type": "str"}})], f"{PLACE}.parameters.properties.city.type"),
        ([schema(properties={"a": {"enum": "x"}})], f"{PLACE}.parameters.properties.a.enum"),
        ([schema(properties={"a": {"required": True}})], f"{PLACE}.parameters.properties.a.required"),
        ([schema(required="city")], f"{PLACE}.parameters.required"),
        ([schema(required=[1])], f"{PLACE}.parameters.required"),
        ([schema(properties={"a": {"type": "array", "items": "x"}})], f"{PLACE}.parameters.properties.a.items"),
        ([schema(properties={"a": {"minLength": -1}})], f"{PLACE}.parameters.properties.a.minLength"),
        ([schema(properties={"a": {"minimum": "0"}})], f"{PLACE}.parameters.properties.a.minimum"),
        ([schema(properties={"a": {"minimum": True}})], f"{PLACE}.parameters.properties.a.minimum"),
        ([schema(properties={"a": {"anyOf": {}}})], f"{PLACE}.parameters.properties.a.anyOf"),
        ([schema(properties={"a": {"anyOf": [5]}})], f"{PLACE}.parameters.properties.a.anyOf[0]"),
        ([schema(**{"$defs": {"a": 5}})], f"{PLACE}.parameters.$defs.a"),
        ([schema(additionalProperties="no")], f"{PLACE}.parameters.additionalProperties"),
    ],
)
def test_mistakes_are_named_with_their_place(tools: Any, param: str) -> None:
    with pytest.raises(ClientError) as caught:
        check_tools(tools)
    assert caught.value.param == param and param in caught.value.message and caught.value.status == 400


@pytest.mark.parametrize(
    "good",
    [
        tool(),
        tool(name="get_weather-2", description=None, strict=None, parameters=None),
        tool(parameters={}),
        tool(strict=True, parameters={"type": ["object", "null"]}),
        {"function": {"name": "f"}},
        schema(
            properties={
                "a": {"type": ["string", "null"], "enum": ["x", None], "default": 5, "minLength": 1.0},
                "b": {"type": "array", "items": {"$ref": "#/$defs/c"}, "uniqueItems": True, "maxItems": 3},
                "c": {"anyOf": [{"type": "number", "exclusiveMinimum": 0.5}, True]}, "d": True, "type": {"type": "null"},
            },
            required=["a", "b"], additionalProperties=False, title="T", unheard_of={"type": 7},
            **{"$defs": {"c": {"type": "object", "properties": {}}}, "$schema": "https://json-schema.org/draft/2020-12/schema"},
        ),
        schema(properties={"a": {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]}}),
    ],
)  # fmt: skip
def test_good_ones_come_back_as_they_are(good: dict[str, Any]) -> None:
    assert check_tools([good]) == [{"type": "function", **good}]
    assert check_tools(None) is None and check_tools([]) is None


def test_depth_has_an_end() -> None:
    deep: dict[str, Any] = {}
    for _ in range(600):
        deep = {"items": deep}
    with pytest.raises(ClientError, match=f"more than {MAX_DEPTH}"):
        check_schema(deep, "x")


names = st.sampled_from(
    ["type", "properties", "items", "enum", "required", "anyOf", "minimum", "name", "function", "$ref"]
)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=12))  # fmt: skip
def test_any_json_is_a_tool_or_a_clients_error(value: Any) -> None:
    for tools in ([value], value, [tool(parameters=value)], [{"type": "function", "function": value}]):
        try:
            check_tools(tools)
        except ClientError as error:
            assert error.param and error.param.startswith("tools")
