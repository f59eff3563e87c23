"""What enters the engine: one request, an abort, an administrative call.

Promises: frozen messages; everything the core needs to serve a request is in `EngineRequest`.
Does not know: text. Strings were rendered to token ids before this point.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from octavo.base.params import SamplingParams


class AdapterRef(msgspec.Struct, frozen=True):
    """Which LoRA adapter a request uses; `digest` names its content in cache keys (REU-2)."""

    name: str
    path: str
    digest: str = ""


class RequestPart(msgspec.Struct, frozen=True, tag=True):
    """One feature's share of a request (grammar, media, pooling). Features subclass it."""


P = TypeVar("P", bound=RequestPart)

if TYPE_CHECKING:
    RequestParts = tuple[RequestPart, ...]
else:  # decoded loosely; `base.codec` revives them by tag, so that features can add their own
    RequestParts = tuple[Any, ...]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """One prompt and how to continue it, as the core sees it (REQ-1).

    `request_id` is internal and unique; `client_id` is what the client sent and is for logs only.
    `sampling.max_tokens` has been resolved to a number, and `sampling.n` is 1: samples of one
    request are siblings that share `parent_id` and differ in `sample_index` (OUT-7).
    `bad_words_ids` and `eos_token_ids` are `sampling.bad_words` and the model's EOS as ids.
    `arrival_s` is on the engine machine's monotonic clock.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    client_id: str = ""
    parent_id: str | None = None
    sample_index: int = 0
    priority: int = 0  # lower is more urgent
    arrival_s: float = 0.0
    cache_salt: str | None = None
    adapter: AdapterRef | None = None
    parts: RequestParts = ()
    client_index: int = 0
    data_parallel_rank: int | None = None
    trace_headers: dict[str, str] | None = None

    def part(self, kind: type[P]) -> P | None:
        """The part of this type, if the request has one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Requests to add, in order."""

    requests: tuple[EngineRequest, ...]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop these requests; ids that are unknown or finished are ignored."""

    request_ids: tuple[str, ...]


class Admin(msgspec.Struct, frozen=True, tag=True):
    """An administrative call on the engine core; the answer carries the same `call_id`."""

    call_id: int
    method: str
    args: dict[str, Any] = {}


class AdminReply(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Admin`: a value, or the error's text."""

    call_id: int
    value: Any = None
    error: str | None = None
