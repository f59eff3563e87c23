"""From one checked input to the requests that the engine gets: ids, samples, limits.

Promises: internal ids are unique and never made from what a client sent (REQ-5); nothing is sent from here,
so a request that is refused has left no trace; the `n` samples of a request differ in `sample_index` only.
Does not know: how requests travel or how answers come back.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from octavo.base.errors import ClientError
from octavo.base.params import SamplingParams, shown
from octavo.base.requests import AdapterRef, EngineRequest, RequestPart
from octavo.base.types import OutputKind
from octavo.outputs.assembler import ParserFactory, RequestOpening, no_parser
from octavo.serving.info import EngineInfo

if TYPE_CHECKING:
    from octavo.inputs.limits import RequestLimits
    from octavo.inputs.renderer import EngineInput

MAX_PRIORITY = 2**31 - 1


class RequestOptions(TypedDict, total=False):
    """What may come with a request beside its input and its sampling parameters."""

    client_id: str  # what the client calls it, for logs only
    priority: int  # lower is more urgent
    cache_salt: str | None
    trace_headers: dict[str, str] | None
    adapter: AdapterRef | None
    parts: tuple[RequestPart, ...]
    data_parallel_rank: int | None
    parsers: ParserFactory


class RequestIds:
    """Internal ids: a prefix that tells this front from others, and a number. Thread-safe.

    Owns: the counter.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers = itertools.count()  # next() on it is atomic

    def next(self) -> str:
        """An id that this object never gave before."""
        return f"{self._prefix}{next(self._numbers)}"


class PreparedRequest(NamedTuple):
    """One request, ready to be sent: what the assembler must expect and what the engine gets."""

    opening: RequestOpening
    requests: tuple[EngineRequest, ...]


class Intake:
    """Makes requests. Thread-safe.

    Owns: nothing but the id counter it was given.
    """

    def __init__(self, limits: "RequestLimits", info: EngineInfo, ids: RequestIds, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._info = info
        self._ids = ids
        self._clock = clock

    def prepare(
        self,
        input: "EngineInput",
        params: SamplingParams,
        options: RequestOptions,
        *,
        kind: OutputKind | None = None,
    ) -> PreparedRequest:
        """Check a request and make its samples; `kind` overrides the output kind it asks for.

        Raises `ClientError` when the model cannot serve it.
        """
        params = self._limits.check(input, params)
        _check_priority(options.get("priority", 0))
        if kind is not None and params.output_kind is not kind:
            params = params.replace(output_kind=kind)
        parent_id, arrival_s = self._ids.next(), self._clock()
        prompt = tuple(input.prompt_token_ids)
        ids = (parent_id,) if params.n == 1 else tuple(f"{parent_id}.{i}" for i in range(params.n))
        bad_words_ids = self._limits.bad_words_ids(params) if params.bad_words else ()
        _check_choice(params, bad_words_ids, self._info.eos_token_ids, self._limits.vocab_size)
        requests = tuple(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=_for_sample(params, i),
                eos_token_ids=self._info.eos_token_ids,
                bad_words_ids=bad_words_ids,
                client_id=options.get("client_id", ""),
                parent_id=parent_id if params.n > 1 else None,
                sample_index=i,
                priority=options.get("priority", 0),
                arrival_s=arrival_s,
                cache_salt=options.get("cache_salt"),
                adapter=options.get("adapter"),
                parts=options.get("parts", ()),
                data_parallel_rank=options.get("data_parallel_rank"),
                trace_headers=options.get("trace_headers"),
            )
            for i, request_id in enumerate(ids)
        )
        opening = RequestOpening(
            parent_id=parent_id,
            request_ids=ids,
            params=params,
            prompt=input.prompt,
            prompt_token_ids=prompt,
            arrived_s=arrival_s,
            parsers=options.get("parsers", no_parser),
        )
        return PreparedRequest(opening, requests)


def check_answers(num_prompts: int, n: int, most: int) -> None:
    """Raise `ClientError` for a request whose answers could never wait here at once, on an idle server either.

    `most` is how many may wait for their first token; more, when others wait too, is a matter of time (429).
    """
    if num_prompts * n <= most:
        return
    limit = f"this server lets at most {most} wait for their first token (--max-waiting-requests)"
    if num_prompts == 1:
        raise ClientError(f"n is {n}, but {limit}; send n of at most {most}", param="n")
    each = "" if n == 1 else f" with n {n}, {num_prompts * n} answers in all"
    raise ClientError(f"prompt holds {num_prompts} prompts{each}, but {limit}; send fewer at once", param="prompt")


def priority_warning(priority: int, info: EngineInfo) -> str | None:
    """What to say of a priority that changes nothing, since requests are served in the order they came."""
    if not priority or info.heeds_priority:
        return None
    return (
        f"priority {priority} changes nothing: requests are served first come, first served here "
        f"(--scheduling-policy priority)"
    )


def placed(error: ClientError, place: int, num_prompts: int) -> ClientError:
    """The same error; where several prompts were given its message says which of them was refused."""
    if num_prompts == 1:
        return error
    return type(error)(f"prompt {place}: {error.message}", param=error.param, code=error.code)


def _check_priority(priority: object) -> None:
    """The queue compares priorities: one that is no number would fail there."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise ClientError(
            f"priority must be an integer in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {shown(priority)}", param="priority"
        )


def _check_choice(
    params: SamplingParams, bad_words_ids: Sequence[tuple[int, ...]], eos_token_ids: Sequence[int], vocab_size: int
) -> None:
    """Raise `ClientError` when the very first token could not be chosen: the engine could only fail on it."""
    if not (params.allowed_token_ids or params.bad_words or params.min_tokens) or params.max_tokens == 0:
        return
    forbidden = {word[0] for word in bad_words_ids if len(word) == 1}
    if params.min_tokens:
        forbidden.update(params.stop_token_ids)
        forbidden.update(() if params.ignore_eos else eos_token_ids)
    if params.allowed_token_ids is not None:
        if not forbidden.issuperset(params.allowed_token_ids):
            return
    elif len(forbidden) < vocab_size:
        return
    raise ClientError(
        "no token is left to choose from: bad_words, and stop_token_ids and the end of text before min_tokens, forbid "
        "every token that may be chosen",
        param="min_tokens" if params.min_tokens else "bad_words",
    )


def _for_sample(params: SamplingParams, index: int) -> SamplingParams:
    """One sample's parameters: the prompt is scored once, by the first sample (OUT-7)."""
    if params.n == 1:
        return params
    if index and params.prompt_logprobs is not None and params.max_tokens != 0:
        return params.replace(n=1, prompt_logprobs=None)
    return params.replace(n=1)
