"""The OpenAPI document: every route with its bodies, answers and errors, as this server takes and gives them (INP-24).

Promises: the document is valid, its bounds are those that are checked, and a body made from it is answered with 200 but
for what no schema can say (that prompt and answer fit the context together, or what a chat template refuses).
Does not know: how a request is served.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import octavo
from octavo.base.params import MAX_N
from octavo.config.schema import ServerConfig
from octavo.entrypoints.http import admin, render, wire
from octavo.entrypoints.http.schemas import (
    FEATURE_FIELDS,
    MOST_CHARS,
    MOST_ENTRIES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo.http.errors import ErrorBody
from octavo.inputs.limits import MAX_LOGPROBS
from octavo.serving.info import EngineInfo

Schema = dict[str, Any]
_REF: Final = "#/components/schemas/"
_ERRORS: Final = {
    400: "a field is wrong, or not served here; `param` names it",
    401: "a key is needed",
    404: "no such model",
    408: "the request came too slowly",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "too many requests wait; see Retry-After",
    431: "the headers are too large",
    500: "the request failed in the engine",
    503: "the server starts, stops, or has lost its engine",
}
_ANY: Final = (401, 408, 431, 500, 503)
_BODY: Final = (400, 404, 413, 415, *_ANY)


def openapi(info: EngineInfo, server: ServerConfig) -> Schema:
    """The document of a server of this model."""
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": octavo.__version__},
        "paths": _posts() | _gets(),
        "components": {"schemas": _answers() | _bodies(info, server)},
    }
    if server.api_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in ("/health", "/ping", "/ready"):
            document["paths"][path]["get"]["security"] = []
    return document


# ---- routes ---------------------------------------------------------------------------------


def _posts() -> dict[str, Schema]:
    whole: dict[str, tuple[type[BaseModel], type[msgspec.Struct], type[msgspec.Struct], str]] = {"/v1/completions": (CompletionRequest, wire.Completion, wire.Completion, "A completion."),
             "/v1/chat/completions": (ChatRequest, wire.ChatCompletion, wire.ChatChunk, "A chat's next message.")}  # fmt: skip
    paths: dict[str, Schema] = {}
    for path, (body, answer, chunk, text) in whole.items():
        content = _json(answer) | {
            "text/event-stream": {
                "schema": {"type": "string", "description": "Events; each `data:` is one object, the last one [DONE]."},
                "x-event": {"$ref": _REF + chunk.__name__},
            }
        }
        paths[path] = {"post": _operation(path, text, content, (*_BODY, 429), body)}
        paths[f"{path}/render"] = {
            "post": _operation(f"{path}/render", "The prompt; nothing runs.", _json(render.Rendered), _BODY, body)
        }
    rest: dict[str, tuple[str, type[BaseModel] | None, Schema]] = {
        "/tokenize": ("Text or a chat as token ids.", TokenizeRequest, _json(render.TokenizeAnswer)),
        "/detokenize": ("Token ids as text.", DetokenizeRequest, _json(render.DetokenizeAnswer)),
        "/reset_prefix_cache": ("Forget cached prefixes.", None, _object(success={"type": "boolean"})),
    }
    for path, (text, kind, content) in rest.items():
        paths[path] = {"post": _operation(path, text, content, _BODY if kind else _ANY, kind)}
    return paths


def _gets() -> dict[str, Schema]:
    status = _object(status={"type": "string"})
    routes = {
        "/v1/models": ("What is served.", _json(admin.ModelList), _ANY),
        "/v1/models/{model}": ("One served name.", _json(admin.ModelCard), (404, *_ANY)),
        "/v1/plugins": ("Installed plugins.", _object(object={"const": "list"}, data={"type": "array"}), _ANY),
        "/v1/kv/events": ("What the prefix cache holds.", {"text/event-stream": {"schema": {"type": "string"}}}, (404, *_ANY)),
        "/health": ("Whether the engine lives.", status, (408, 431, 503)),
        "/ping": ("Whether the engine lives.", status, (408, 431, 503)),
        "/ready": ("Whether requests are taken.", status, (408, 431, 503)),
        "/version": ("This server's version.", _object(version={"type": "string"}), _ANY),
        "/load": ("How busy the server is.", _json(admin.Load), _ANY),
        "/metrics": ("Figures for Prometheus.", {"text/plain": {"schema": {"type": "string"}}}, _ANY),
    }  # fmt: skip
    paths: dict[str, Schema] = {}
    for path, (text, content, errors) in routes.items():
        paths[path] = {"get": _operation(path, text, content, errors)}
    paths["/v1/models/{model}"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    return paths


def _operation(
    path: str, text: str, content: Schema, errors: Sequence[int], body: type[BaseModel] | None = None
) -> Schema:
    answers = {"200": {"description": text, "content": content}}
    for status in sorted(errors):
        answers[str(status)] = {"description": _ERRORS[status], "content": _json(ErrorBody)}
    name = path.strip("/").replace("/", "_").replace("{model}", "one")
    out: Schema = {"operationId": name, "summary": text, "responses": answers}
    if body is not None:
        schema = {"$ref": _REF + body.__name__}
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return out


def _json(kind: type[msgspec.Struct]) -> Schema:
    return {"application/json": {"schema": {"$ref": _REF + kind.__name__}}}


def _object(**properties: Schema) -> Schema:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"application/json": {"schema": schema}}


# ---- schemas --------------------------------------------------------------------------------


def _answers() -> dict[str, Schema]:
    kinds = (wire.Completion, wire.ChatCompletion, wire.ChatChunk, admin.ModelList, admin.ModelCard, admin.Load,
             render.Rendered, render.TokenizeAnswer, render.DetokenizeAnswer, ErrorBody)  # fmt: skip
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF + "{name}")
    return dict(components)


def _bodies(info: EngineInfo, server: ServerConfig) -> dict[str, Schema]:
    """The bodies' schemas, with the bounds that this model and this server add to the fields' types."""
    bodies: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    schemas: dict[str, Schema] = found["$defs"]
    bounds = _bounds(info)
    for body in bodies:
        properties = schemas[body.__name__]["properties"]
        for name in properties.keys() & bounds.keys():
            nullable = "anyOf" in properties[name] and {"type": "null"} in properties[name]["anyOf"]
            text = {key: properties[name][key] for key in ("description", "title") if key in properties[name]}
            properties[name] = text | ({"anyOf": [bounds[name], {"type": "null"}]} if nullable else bounds[name])
        for name in _left_out(info, server):
            properties.pop(name, None)
    schemas["CompletionRequest"]["properties"]["prompt"] = _prompt(info)
    schemas["CompletionRequest"]["properties"]["logprobs"] = _whole(0, MAX_LOGPROBS, null=True)
    for body in (CompletionRequest, ChatRequest):
        schemas[body.__name__]["dependentSchemas"] = {"stream_options": _needs("stream")}
    schemas["ChatRequest"]["dependentSchemas"]["top_logprobs"] = _needs("logprobs")
    schemas["StreamOptions"]["dependentSchemas"] = {"continuous_usage_stats": _needs("include_usage")}
    schemas["TokenizeRequest"]["oneOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("prompt", "messages")
    ]
    return schemas


def _left_out(info: EngineInfo, server: ServerConfig) -> list[str]:
    """Fields that this server takes only at the value they have without being sent."""
    names = ["best_of"]
    read = {each.feature.request_field for each in info.features if each.options is not None}
    names += [name for name in FEATURE_FIELDS if name not in read]
    if not server.trust_request_chat_template:
        names.append("chat_template")
    return names


def _bounds(info: EngineInfo) -> Mapping[str, Schema]:
    room, token = max(1, info.max_model_len - 1), _whole(0, info.vocab_size - 1)
    most_answers = min(MAX_N, info.max_waiting_requests)
    return {
        "model": {"type": "string", "enum": list(info.served_names)},
        "n": _whole(1, most_answers),
        "temperature": _number(0, 100),
        "top_p": _number(0, 1),
        "top_k": _whole(-1, 2**31 - 1),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
        "max_tokens": _whole(1, room) | {"description": "0 too with echo or prompt_logprobs."},
        "max_completion_tokens": _whole(1, room),
        "min_tokens": _whole(0, room) | {"description": "At most as many as the answer may have."},
        "stop": {"anyOf": [_text("stop"), {"type": "array", "items": _text("stop"), "maxItems": MOST_ENTRIES["stop"]}]},
        "stop_token_ids": _list(token, "stop_token_ids"),
        "bad_words": _list(_text("bad_words"), "bad_words"),
        "allowed_token_ids": _list(token, "allowed_token_ids") | {"minItems": 1},
        "logit_bias": {
            "type": "object", "maxProperties": MOST_ENTRIES["logit_bias"], "additionalProperties": _number(-100, 100),
            "propertyNames": {"pattern": "^[0-9]{1,19}$"}, "description": f"Token ids, 0 to {info.vocab_size - 1}.",
        },
        "prompt_logprobs": _whole(0, MAX_LOGPROBS),
        "top_logprobs": _whole(0, MAX_LOGPROBS),
        "response_format": _shape(type={"const": "text"}),
        "messages": _list(_message(), "messages") | {"minItems": 1},
        "tools": _list(_tool(), "tools"),
        "documents": _list({"type": "object"}, "documents"),
        "tool_choice": {"type": "string", "enum": ["none", "auto"]},
        "modalities": {"type": "array", "items": {"const": "text"}, "minItems": 1, "maxItems": 1},
        "chat_template_kwargs": {"type": "object", "maxProperties": MOST_ENTRIES["chat_template_kwargs"]},
        "tokens": _list(token, "tokens"),
    }  # fmt: skip


def _prompt(info: EngineInfo) -> Schema:
    text = {"type": "string", "minLength": 1}
    room = max(1, info.max_model_len - 1)
    ids = {"type": "array", "items": _whole(0, info.vocab_size - 1), "minItems": 1, "maxItems": room}
    several = [
        {"type": "array", "items": each, "minItems": 1, "maxItems": info.max_waiting_requests} for each in (text, ids)
    ]
    return {"anyOf": [text, ids, *several], "description": "A text, token ids, or a list of either."}


def _message() -> Schema:
    part = _shape(type={"const": "text"}, text={"type": "string"})
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    role = {"type": "string", "enum": ["system", "developer", "user", "assistant"]}
    of_tool = _shape(role={"const": "tool"}, content=content, tool_call_id={"type": "string", "minLength": 1})
    return {"anyOf": [_shape(role=role, content=content), of_tool]}


def _tool() -> Schema:
    function = _shape(name={"type": "string", "minLength": 1, "pattern": "^[a-zA-Z0-9_-]{1,64}$"})
    function["properties"] |= {"description": {"type": "string"}, "parameters": {"type": "object"}}
    return _shape(type={"const": "function"}, function=function)


def _shape(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _needs(name: str) -> Schema:
    return {"properties": {name: {"const": True}}, "required": [name]}


def _whole(least: int, most: int, *, null: bool = False) -> Schema:
    return {"type": ["integer", "null"] if null else "integer", "minimum": least, "maximum": most}


def _number(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


def _text(field: str) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": MOST_CHARS[field]}


def _list(items: Schema, field: str) -> Schema:
    return {"type": "array", "items": items, "maxItems": MOST_ENTRIES[field]}
