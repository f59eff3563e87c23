"""Fields of requests and answers that belong to features.

Promises: what this server cannot do with one is a `ClientError` before anything runs.
Does not know: any feature, or what its field means.
"""

from collections.abc import Sequence
from typing import Any

from octavo.base.outputs import RequestOutput
from octavo.base.requests import RequestPart
from octavo.entrypoints.http.schemas import GenerateRequest
from octavo.plugins.features import Active


def request_parts(req: GenerateRequest, features: Sequence[Active], num_answers: int) -> tuple[RequestPart, ...]:
    """What the engine gets. Raises `ClientError`."""
    found = []
    for each in features:
        value = None if each.feature.request_field is None else getattr(req, each.feature.request_field)
        if value is not None:
            found.append(each.feature.request(value, each.options, num_answers))
    return tuple(part for part in found if part is not None)


def response_fields(outputs: Sequence[RequestOutput], features: Sequence[Active]) -> dict[str, Any]:
    """What features add to an answer, once it ended; nothing for those that have nothing to say."""
    parts = [part for out in outputs for part in out.parts]
    if not parts:
        return {}
    found = {each.feature.request_field: each.feature.response(parts) for each in features}
    return {name: value for name, value in found.items() if name is not None and value}
