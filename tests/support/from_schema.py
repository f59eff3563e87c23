"""Values made from a JSON schema, and answers held against one: a small fuzzer for the OpenAPI document.

Promises: what `value` makes obeys the schema, as far as the schema uses what the document uses.
Does not know: HTTP.
"""

import random
import re
from typing import Any

from jsonschema import Draft202012Validator

WORDS = ("a", "hi", "the end", "\u00e9\u6b6a", " ", "x" * 30, "{}", "\n")


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """The schema itself, behind references."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    return schema


def value(schema: dict[str, Any], document: dict[str, Any], rng: random.Random) -> Any:
    """One value that obeys the schema; small ones more often."""
    schema = resolved(schema, document)
    for key in ("const", "enum"):
        if key in schema:
            return schema["const"] if key == "const" else rng.choice(schema["enum"])
    if "anyOf" in schema:
        return value(rng.choice(schema["anyOf"]), document, rng)
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        return _object(schema, document, rng)
    if kind == "array":
        least = schema.get("minItems", 0)
        count = min(least + rng.choice((0, 0, 1, 2, 5)), schema.get("maxItems", 100))
        return [value(schema.get("items", {}), document, rng) for _ in range(count)]
    if kind == "string":
        return _string(schema, rng)
    if kind in ("integer", "number"):
        return _number(schema, kind, rng)
    return None if kind == "null" else rng.random() < 0.5


def _object(schema: dict[str, Any], document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    required = list(schema.get("required", ()))
    if "oneOf" in schema:
        chosen = rng.choice(schema["oneOf"])["required"]
        others = {name for one in schema["oneOf"] for name in one["required"]} - set(chosen)
        required += chosen
    else:
        others = set()
    properties = schema.get("properties", {})
    wanted = [name for name in properties if name not in others and (name in required or rng.random() < 0.12)]
    made = {name: value(properties[name], document, rng) for name in wanted}
    for name in required:
        while made[name] is None:
            made[name] = value(properties[name], document, rng)
    for name, needs in schema.get("dependentSchemas", {}).items():
        if name in made:
            made |= {other: each["const"] for other, each in needs["properties"].items()}
    if "propertyNames" in schema and rng.random() < 0.5:
        made["5"] = value(schema["additionalProperties"], document, rng)
    return made


def _string(schema: dict[str, Any], rng: random.Random) -> str:
    if "pattern" in schema:
        return next(word for word in (f"f{rng.randrange(99)}", "1") if re.search(schema["pattern"], word))
    least, most = schema.get("minLength", 0), schema.get("maxLength", 100)
    text = rng.choice(WORDS)
    return (text if len(text) >= least else "word")[:most]


def _number(schema: dict[str, Any], kind: str, rng: random.Random) -> float:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -100))
    most = schema.get("maximum", 100)
    if kind == "integer":
        return rng.choice((least, min(least + 1, most), min(least + 7, most)))
    inner = least + (most - least) * rng.random()
    return rng.choice((most, inner, least if "minimum" in schema else most))


def faults(schema: dict[str, Any], document: dict[str, Any], told: Any) -> list[str]:
    """Where `told` does not obey the schema."""
    whole = {**schema, "components": document["components"]}
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(whole).iter_errors(told)]
