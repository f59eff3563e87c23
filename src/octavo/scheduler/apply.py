"""Turn what a step brought back into request state and outputs.

Promises: whatever goes wrong with one row ends that row's request and no other; results of steps that were planned
before their request was preempted or ended are dropped; full blocks become findable here, when their content is
certain.
Does not know: how the step was chosen, or text.
"""

import logging

from octavo.base.outputs import EngineOutputs, RequestDelta
from octavo.base.step import LogprobArrays, PromptLogprobs, StepPlan, StepResult
from octavo.base.types import FinishReason
from octavo.scheduler.ledger import Ledger
from octavo.scheduler.records import Flight
from octavo.scheduler.request import Request
from octavo.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


class _StepRows:
    """The rows of one step, read out of the arrays once.

    Owns: nothing that changes.
    """

    __slots__ = ("drafts", "ends", "errors", "offsets", "plain", "result", "samples", "values")

    def __init__(self, plan: StepPlan, result: StepResult) -> None:
        batch = plan.batch
        self.result = result
        self.ends: list[int] = (batch.num_computed_tokens + batch.num_scheduled_tokens).tolist()
        self.samples: list[int] = batch.num_sampled_tokens.tolist()
        self.drafts: list[int] = batch.num_draft_tokens.tolist()
        self.offsets: list[int] = result.tokens.offsets.tolist()
        self.values: list[int] = result.tokens.values.tolist()
        self.errors = {error.row: error.message for error in result.errors}
        # Nothing but one token a row: no drafts, no prompt scores, no errors.
        extras = self.errors or result.prompt_logprobs or result.drafts is not None
        self.plain = not extras and not any(self.drafts)
        if len(self.offsets) != len(self.ends) + 1:
            raise RuntimeError(
                f"step {plan.seq} has {len(self.ends)} rows, but its result has {len(self.offsets) - 1}; "
                "the worker broke the step contract"
            )


class ResultApplier:
    """Applies results in the order of their plans, each once.

    Owns: nothing; requests and counters are the ledger's.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._ledger = scheduler.ledger

    def apply(self, plan: StepPlan, result: StepResult) -> EngineOutputs:
        """What step `plan` gave to its requests, and the deltas of those that ended otherwise meanwhile."""
        ledger = self._ledger
        flight = ledger.retire(plan.seq)
        # Parts first: a load that failed makes the row computed on it stale before its blocks become findable.
        self._absorb(result)
        deltas = ledger.take_deltas()
        if flight.rows:
            self._apply_rows(plan.seq, _StepRows(plan, result), flight.rows, deltas)
        self._count(plan, result, flight, deltas)
        return EngineOutputs(deltas=tuple(deltas), stats=ledger.stats())

    def flush(self) -> EngineOutputs | None:
        """Deltas that wait while no step is in flight, such as those of aborted requests; None when there are none."""
        if not self._ledger.deltas:
            return None
        return EngineOutputs(deltas=tuple(self._ledger.take_deltas()), stats=self._ledger.stats())

    def _absorb(self, result: StepResult) -> None:
        ledger = self._ledger
        for part in ledger.parts:
            absorbed = part.absorb(result)
            for ready in absorbed.ready:
                ledger.wake(ready, part)
            for request_id in absorbed.release:
                ledger.let_go(request_id, part)

    def _apply_rows(self, seq: int, step: _StepRows, rows: list[Request], deltas: list[RequestDelta]) -> None:
        ledger = self._ledger
        plain, samples, offsets, values, ends = step.plain, step.samples, step.offsets, step.values, step.ends
        for row, req in enumerate(rows):
            if seq < req.valid_from:
                continue  # stale: preempted or ended since
            try:
                at = offsets[row]
                if (
                    plain
                    and samples[row] == 1
                    and offsets[row + 1] - at == 1
                    and not req.wants_logprobs
                    and req.num_tokens > req.num_prompt_tokens
                ):
                    deltas.append(_next_token(ledger, req, ends[row], values[at]))
                else:
                    delta = _any_row(ledger, req, step, row)
                    if delta is not None:
                        deltas.append(delta)
            except Exception as error:  # the border between one request and everybody else's
                log.exception("request %s failed while its result was applied", req.request_id)
                deltas.append(_fail(ledger, req, error))

    def _count(self, plan: StepPlan, result: StepResult, flight: Flight, deltas: list[RequestDelta]) -> None:
        counters, timings = self._ledger.counters, result.timings
        measured = timings.prepare_s + timings.forward_s + timings.sample_s
        counters.step_done(
            rows=len(flight.rows),
            tokens=plan.batch.num_tokens,
            outputs=sum([len(delta.new_token_ids) for delta in deltas]),
            seconds=measured or self._ledger.clock() - flight.made_s,
        )


def _next_token(ledger: Ledger, req: Request, end: int, token: int) -> RequestDelta:
    """The hot path: one more output token and nothing else."""
    req.accept(token)
    if end >= req.next_commit:
        ledger.commit(req, end)
        req.committed(end)
    if req.num_tokens >= req.max_total_tokens or token in req.stop_ids:
        return _delta(ledger, req, (token,), _why_ended(req, token))
    return RequestDelta(
        request_id=req.request_id,
        new_token_ids=(token,),
        num_cached_tokens=req.num_cached_tokens,
        num_preemptions=req.num_preemptions,
    )


def _any_row(ledger: Ledger, req: Request, step: _StepRows, row: int) -> RequestDelta | None:
    """A row of any kind: a prompt chunk, a first token, drafts, log-probabilities, an error."""
    if row in step.errors:
        return ledger.finish(req, FinishReason.ERROR, error=step.errors[row])
    scores = _prompt_scores(req, step.result.prompt_logprobs)
    tokens = step.values[step.offsets[row] : step.offsets[row + 1]]
    if not step.samples[row]:
        return _chunk_done(ledger, req, step.ends[row], tokens, scores)
    if not 1 <= len(tokens) <= 1 + step.drafts[row]:
        raise RuntimeError(f"the worker returned {len(tokens)} tokens for a row that drafts {step.drafts[row]}")
    reason, accepted = None, 0
    for token in tokens:
        req.append(token)
        accepted += 1
        if (reason := _why_ended(req, token)) is not None:
            break
    rejected = 1 + step.drafts[row] - len(tokens)
    req.resolve(rejected)
    ledger.commit(req, step.ends[row] - rejected)
    req.committed(step.ends[row] - rejected)
    if step.result.drafts is not None and not req.num_placeholders:
        req.propose(len(step.result.drafts.row(row)))
    logprobs = None
    if req.wants_logprobs and step.result.logprobs is not None:
        logprobs = _lines(step.result.logprobs, step.offsets[row], accepted)
    return _delta(ledger, req, tuple(tokens[:accepted]), reason, logprobs, scores)


def _chunk_done(
    ledger: Ledger, req: Request, end: int, tokens: list[int], scores: tuple[PromptLogprobs, ...]
) -> RequestDelta | None:
    """A prompt chunk that samples nothing; the last one of a request that wants no tokens ends it."""
    if tokens:
        raise RuntimeError(f"the worker returned {len(tokens)} tokens for a row that samples none")
    ledger.commit(req, end)
    req.committed(end)
    if end >= req.num_tokens >= req.max_total_tokens:
        return _delta(ledger, req, (), FinishReason.LENGTH, None, scores)
    return _delta(ledger, req, (), None, None, scores) if scores else None


def _why_ended(req: Request, token: int) -> FinishReason | None:
    """Whether `token`, just appended, ends the request; never before `min_tokens`."""
    if token in req.stop_ids and req.num_tokens >= req.min_total_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if req.num_tokens >= req.max_total_tokens else None


def _delta(
    ledger: Ledger,
    req: Request,
    tokens: tuple[int, ...],
    reason: FinishReason | None,
    logprobs: LogprobArrays | None = None,
    scores: tuple[PromptLogprobs, ...] = (),
) -> RequestDelta:
    """What this step added to the request, and its end if it ended."""
    first = not req.times.first_token_s and (bool(tokens) or reason is not None)
    if first and not req.source.sample_index:  # the answers to one prompt have one prompt
        ledger.counters.prompt_done(req.num_prompt_tokens)
    if first and tokens:
        req.note_first_token(ledger.clock())
    if reason is not None:
        stop_reason = req.stop_ids[tokens[-1]] if reason is FinishReason.STOP else None
        return ledger.finish(
            req, reason, new_token_ids=tokens, stop_reason=stop_reason, logprobs=logprobs, prompt_logprobs=scores
        )
    return RequestDelta(
        request_id=req.request_id,
        new_token_ids=tokens,
        logprobs=logprobs,
        prompt_logprobs=scores,
        num_cached_tokens=req.num_cached_tokens,
        cached_by_source=req.cached_by_source if first else None,
        num_preemptions=req.num_preemptions,
        times=req.times.snapshot() if first else None,
    )


def _fail(ledger: Ledger, req: Request, error: Exception) -> RequestDelta:
    text = f"the request failed inside the engine: {error}"
    if req.finished:  # its end itself failed half-way
        return RequestDelta(request_id=req.request_id, finish=FinishReason.ERROR, error=text)
    return ledger.finish(req, FinishReason.ERROR, error=text)


def _lines(arrays: LogprobArrays, first: int, count: int) -> LogprobArrays:
    """One request's lines, in the width it asked for."""
    lines = slice(first, first + count)
    width = int(arrays.width[first]) if count else 0
    return LogprobArrays(
        token_ids=arrays.token_ids[lines, :width],
        logprobs=arrays.logprobs[lines, :width],
        ranks=arrays.ranks[lines],
        width=arrays.width[lines],
    )


def _prompt_scores(req: Request, scores: tuple[PromptLogprobs, ...]) -> tuple[PromptLogprobs, ...]:
    """This request's prompt scores, without positions that were delivered before a preemption."""
    fresh = []
    for part in scores:
        if part.slot != req.slot:
            continue
        end = part.start + len(part.ranks)
        old = max(0, req.num_prompt_scored - part.start)
        if end <= req.num_prompt_scored:
            continue
        req.scored(end)
        if old:
            part = PromptLogprobs(
                slot=part.slot,
                start=part.start + old,
                token_ids=part.token_ids[old:],
                logprobs=part.logprobs[old:],
                ranks=part.ranks[old:],
            )
        fresh.append(part)
    return tuple(fresh)
