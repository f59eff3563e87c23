"""What leaves the engine: deltas of token ids inside, finished shapes for people outside.

Promises: one shape for streaming and for the end; public results have the names offline users know.
Does not know: how text is made (see `outputs`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.base.step import LogprobArrays, PromptLogprobs
from octavo.base.types import FinishReason


class OutputPart(msgspec.Struct, frozen=True, tag=True):
    """One feature's share of a request's output (where its KV waits, pooled vectors)."""


if TYPE_CHECKING:
    OutputParts = tuple[OutputPart, ...]
else:  # decoded loosely; `base.codec` revives them by tag, so that features can add their own
    OutputParts = tuple[Any, ...]


class RequestTimes(msgspec.Struct, frozen=True):
    """Moments of one request on the engine's monotonic clock, in seconds; 0 means 'not yet' (REQ-6)."""

    arrived_s: float = 0.0
    queued_s: float = 0.0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0


class RequestDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step added to one request.

    `logprobs` has one line for each id in `new_token_ids` when they were asked for.
    `stop_reason` is the stop token id that ended it, or None for EOS and every other reason.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: LogprobArrays | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    num_cached_tokens: int = 0
    cached_by_source: dict[str, int] | None = None
    num_preemptions: int = 0
    error: str | None = None
    times: RequestTimes | None = None  # with the first token and with the finish
    parts: OutputParts = ()


class StatsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges of one engine after one step. Counters only grow."""

    seq: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks_total: int = 0
    num_blocks_used: int = 0
    kv_usage: float = 0.0  # share of blocks held by live requests, 0..1
    prefix_queries: int = 0  # tokens of prompts that were looked up, each prompt once
    prefix_hits: int = 0  # those of them that were found
    prefix_resumed: int = 0  # tokens that preempted requests found again
    prefix_shared: int = 0  # tokens that further answers to a prompt took from the first
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: dict[str, int] = {}  # by finish reason
    step_tokens: int = 0
    step_rows: int = 0
    step_s: float = 0.0
    parts: dict[str, dict[str, float]] = {}  # by feature


class CacheChanges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the blocks that can be found changed (SCH-27): first all were forgotten if `cleared`, then some went and some
    came, by hash; no hash is in both."""

    cleared: bool = False
    removed: tuple[bytes, ...] = ()
    stored: tuple[bytes, ...] = ()


class EngineOutputs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything one step gives to the front. `cache` is there only where changes are recorded and there were some."""

    deltas: tuple[RequestDelta, ...] = ()
    stats: StatsSnapshot | None = None
    cache: CacheChanges | None = None


# ---- public results -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = Mapping[int, Logprob]  # token id -> its entry; the chosen token comes first


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` answers to a prompt.

    `text` and `token_ids` are the whole answer so far, or what is new since the last output when
    the request's output kind is DELTA. `stop_reason` is the stop string or stop token id, if any.
    `num_hidden` is how many of the last ids are no part of the text because they ended it (EOS, a stop token or string);
    it is counted in the last output, when log-probabilities were asked for.
    `parts` are what a stream parser made of the new text since the last output (reasoning, tool calls).
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    parts: tuple[Any, ...] = ()
    num_hidden: int = 0

    @property
    def finished(self) -> bool:
        """True once this answer has ended."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt, in the order of `index`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # over all answers, every token generated so far
    cached_by_source: dict[str, int] | None = None
    num_preemptions: int = 0
    times: RequestTimes | None = None
    error: str | None = None
    parts: tuple[Any, ...] = ()
