"""The OpenAPI document is valid, and true: bodies made from it are answered as it says (F92)."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate

from octavo.config.schema import ServerConfig
from tests.entrypoints.http.toy_server import MODEL, Served, toy_server
from tests.support import checkpoints
from tests.support.from_schema import faults, resolved, value
from tests.support.live import live

JSON = "application/json"
BODIES = ["/v1/completions", "/v1/chat/completions", "/v1/completions/render", "/v1/chat/completions/render", "/tokenize",
          "/detokenize"]  # fmt: skip
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools }}"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with toy_server(template=TEMPLATE, max_model_len=4096) as served:
        yield served


@pytest.fixture(scope="module")
def document(server: Served) -> dict[str, Any]:
    return server.http.get("/openapi.json").json()


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    """F92: by the validator of the OpenAPI project, and no reference leads nowhere."""
    validate(document)
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}:
        assert name in document["components"]["schemas"]


def test_every_route_is_in_it_with_its_parameters_answers_and_errors(server: Served, document: dict[str, Any]) -> None:
    """F92."""
    served = {route.path.replace(":path", "") for route in server.app.routes if hasattr(route, "endpoint")}
    assert set(document["paths"]) == served - {"/openapi.json"}
    for path, item in document["paths"].items():
        for name, operation in item.items():
            if name == "parameters":
                continue
            assert operation["responses"]["200"]["content"] and "503" in operation["responses"], path
            assert all(
                one["content"][JSON]["schema"] for status, one in operation["responses"].items() if status != "200"
            )
    (parameter,) = document["paths"]["/v1/models/{model}"]["parameters"]
    assert parameter["in"] == "path" and parameter["required"]
    for path in BODIES[:2]:
        responses = document["paths"][path]["post"]["responses"]
        assert set(responses["200"]["content"]) == {JSON, "text/event-stream"} and "429" in responses
    assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}


def test_keys_are_in_it_where_they_are_asked_for() -> None:
    with toy_server(server=ServerConfig(api_key=("k",)), headers={"authorization": "Bearer k"}) as served:
        document = served.http.get("/openapi.json").json()
        validate(document)
        assert document["security"] and document["paths"]["/health"]["get"]["security"] == []


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/v1/plugins", "/health", "/ping", "/ready",
                                  "/version", "/load", "/metrics", "/v1/models/other"])  # fmt: skip
def test_answers_to_get_are_as_the_document_says(server: Served, document: dict[str, Any], path: str) -> None:
    """F92."""
    name = "/v1/models/{model}" if path.startswith("/v1/models/") else path
    check_answer(document, document["paths"][name]["get"], server.http.get(path))


def check_answer(document: dict[str, Any], operation: dict[str, Any], answer: httpx.Response) -> None:
    """Status, media type and content are among those of the operation."""
    assert answer.status_code < 500, answer.text
    response = operation["responses"][str(answer.status_code)]
    kind = answer.headers["content-type"].split(";")[0]
    assert kind in response["content"], kind
    if kind == JSON:
        assert faults(response["content"][kind]["schema"], document, answer.json()) == []
    elif kind == "text/event-stream":
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        for event in events[:-1]:
            assert faults(response["content"][kind]["x-event"], document, json.loads(event)) == []


def fuzz(http: httpx.Client, document: dict[str, Any], path: str, count: int, seed: int) -> Counter[int]:
    """Send bodies made from the document; how many answers had which status."""
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"][JSON]["schema"]
    rng, statuses = random.Random(seed), Counter[int]()
    for _ in range(count):
        body = value(schema, document, rng)
        assert faults(schema, document, body) == [], body  # the fuzzer itself
        answer = http.post(path, json=body)
        check_answer(document, operation, answer)
        statuses[answer.status_code] += 1
    return statuses


@pytest.mark.parametrize("path", BODIES)
def test_bodies_made_from_it_are_answered_with_200(server: Served, document: dict[str, Any], path: str) -> None:
    """F92: and every answer is one that it describes."""
    statuses = fuzz(server.http, document, path, 40, seed=1)
    assert set(statuses) <= {200, 400} and statuses[200] >= 32, statuses


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_many_bodies_to_a_real_engine(path: str) -> None:
    """F92: no 500 and no answer that the document does not describe."""
    with live(checkpoints.tiny_llama(), max_model_len=512, num_threads=1) as server:
        document = server.http.get("/openapi.json").json()
        statuses = fuzz(server.http, document, path, 400, seed=2)
    assert set(statuses) <= {200, 400} and statuses[200] >= 300, statuses


def test_a_wrong_body_is_found(document: dict[str, Any]) -> None:
    """F92: bounds and enums are in the document: what it forbids, and the server refuses, is seen."""
    schema = resolved({"$ref": "#/components/schemas/CompletionRequest"}, document)
    for wrong in ({}, {"prompt": "a", "top_p": 2}, {"prompt": "a", "n": 0}, {"prompt": "a", "logit_bias": {"x": 1}},
                  {"prompt": "a", "stop": [""]}, {"prompt": "a", "model": "other"}, {"prompt": []},
                  {"prompt": "a", "stream_options": {"include_usage": True}}):  # fmt: skip
        assert faults(schema, document, wrong), wrong
