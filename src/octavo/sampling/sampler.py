"""Logits in, one token a row out, exactly as the parameters say.

Promises: the stations run in the order of OUT-2; a row's token depends on that row alone; a row that cannot
be sampled becomes a `RowError` and the others go on; ids from `vocab_limit` on are never chosen.
Does not know: requests, plans, or how logits were made.

    1 raw log-probabilities are set aside   5 greedy result          9 draw
    2 float32                               6 temperature           10 per row: greedy or drawn
    3 masks (grammar)                       7 min-p                 11 log-probabilities are gathered
    4 allowed, bad words, min tokens,       8 top-k, top-p
      bias, penalties, processors
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.base.step import LogprobArrays, RowError
from octavo.sampling import draw, penalties, truncation
from octavo.sampling.logprobs import LogprobsMode, Scores, empty_lines, score
from octavo.sampling.processors import Processors
from octavo.sampling.rows import draw_row, possible_row
from octavo.sampling.state import NativeCounts, SamplingMetadata, SamplingRows, no_counts

Mask = Callable[[Tensor], None]  # station 3: forbids tokens of float32 logits [N, V] in place

NO_ROWS: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
NOT_FINITE = "the model gave logits that are NaN or infinite for this request"
NOTHING_LEFT = (
    "no token is left to choose from: allowed_token_ids, bad_words, min_tokens or the grammar forbid every one"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What the sampler chose. Rows named in `errors` have no valid token and no valid log-probabilities."""

    tokens: npt.NDArray[np.int32] | npt.NDArray[np.int64]  # [N]
    logprobs: LogprobArrays | None = None
    errors: tuple[RowError, ...] = ()


class TokenSampler(Protocol):
    """What chooses tokens: `Sampler`, or the native one (see `choice`)."""

    def make_counts(self, with_prompt: bool) -> NativeCounts | None:
        """For `SamplingState`: what the sampler counts a request's tokens in."""

    def sample(self, logits: Tensor, rows: SamplingRows, masks: Sequence[Mask] = ()) -> SampledTokens:
        """Choose one token for each row of `logits` [N, V], which may be overwritten."""

    def score(self, logits: Tensor, chosen: npt.NDArray[np.int64], columns: int) -> Scores:
        """`logprobs.score` of tokens [N] that were not drawn."""


class Sampler:
    """Chooses tokens with torch and numpy, on any device. Keeps nothing of a batch (OUT-1).

    Owns: nothing.
    """

    def __init__(
        self,
        *,
        vocab_limit: int,
        processors: Processors | None = None,
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        self._vocab_limit = vocab_limit
        self._mode = mode
        self.make_counts = no_counts
        self._processors = Processors() if processors is None else processors

    def sample(self, logits: Tensor, rows: SamplingRows, masks: Sequence[Mask] = ()) -> SampledTokens:
        """Choose one token for each row of `logits` [N, V], which may be overwritten."""
        with np.errstate(all="ignore"):  # infinities are what forbidden tokens are made of
            return self._sample(logits, rows, masks)

    def _sample(self, logits: Tensor, rows: SamplingRows, masks: Sequence[Mask]) -> SampledTokens:
        if logits.shape[0] == 0:
            return SampledTokens(tokens=NO_ROWS)
        meta = rows.metadata
        raw = None if self._mode.processed else self._set_aside(logits, meta)
        x = logits[:, : self._vocab_limit].float()
        for mask in masks:
            mask(x)
        raised: tuple[RowError, ...] = ()
        if not meta.plain or self._processors:
            raised = self._edit(x, rows)
        tokens, peaks = _peaks(x)
        errors, failed = _failures(peaks)
        if failed.size:
            x[torch.from_numpy(failed).to(x.device)] = 0.0  # a harmless row, so that the stations below hold
            peaks[torch.from_numpy(failed).to(x.device)] = 0.0
        if self._mode.processed and meta.scored.size:
            raw = self._possible(x, peaks, rows)
        if meta.drawn.size:
            raised += self._draw(x, peaks, rows, tokens)
        chosen = tokens.cpu().numpy()
        lines = None if raw is None else self._score(raw, meta, chosen)
        return SampledTokens(tokens=chosen, logprobs=lines, errors=_once(raised + errors))

    def score(self, logits: Tensor, chosen: npt.NDArray[np.int64], columns: int) -> Scores:
        """`logprobs.score` of tokens [N] that were not drawn."""
        return score(logits, chosen, columns, self._vocab_limit, as_logits=self._mode.as_logits)

    def _set_aside(self, logits: Tensor, meta: SamplingMetadata) -> Tensor | None:
        """Station 1. A copy of the rows that want log-probabilities, since later stations overwrite."""
        if not meta.scored.size:
            return None
        return logits[torch.from_numpy(meta.scored).to(logits.device)]

    def _score(self, logits: Tensor, meta: SamplingMetadata, chosen: npt.NDArray[np.int64]) -> LogprobArrays:
        """Station 11, from the logits [n, V] of the rows that asked."""
        lines, rows = empty_lines(meta.width, meta.columns), meta.scored
        lines.token_ids[rows], lines.logprobs[rows], lines.ranks[rows] = self.score(logits, chosen[rows], meta.columns)
        return lines

    def _possible(self, x: Tensor, peaks: Tensor, rows: SamplingRows) -> Tensor:
        """What is left of the rows that want processed log-probabilities when their tokens are drawn."""
        meta = rows.metadata
        out = x[torch.from_numpy(meta.scored).to(x.device)]
        for line, row in enumerate(meta.scored.tolist()):
            q = meta.params[row]
            if q["greedy"]:
                continue
            z = truncation.scaled(
                out[line : line + 1], peaks[row : row + 1], torch.tensor([q["temperature"]]).to(x.device)
            )
            self._processors.apply(z, rows, np.asarray([row]), keep_argmax=True)  # an error is told of when it draws
            left = possible_row(z[0].cpu().numpy(), int(q["top_k"]), q["top_p"], q["min_p"])
            out[line] = torch.from_numpy(left).to(x.device)
            if self._mode.as_logits:
                out[line] += peaks[row] / float(q["temperature"])
        return out

    def _edit(self, x: Tensor, rows: SamplingRows) -> tuple[RowError, ...]:
        """Station 4; the errors are of rows whose custom processor failed."""
        meta, positions = rows.metadata, rows.positions
        for row, ids in meta.allowed:
            penalties.allow_only(x, row, ids)
        banned = [(row, t) for row, words in meta.bad_words for t in penalties.forbidden_ends(words, rows.known(row))]
        banned += [(row, t) for row, least, ids in meta.ends if positions[row] < least for t in ids.tolist()]
        if banned:
            pairs = np.asarray(banned, dtype=np.int64)
            penalties.mask_tokens(x, pairs[:, 0].copy(), pairs[:, 1].copy())
        if meta.bias[0].size:
            penalties.add_bias(x, *meta.bias)
        if meta.counts:
            at, p = meta.penalized, meta.params[meta.penalized]
            for row, counts in zip(at.tolist(), meta.counts, strict=True):
                counts.update(rows.known(row), int(meta.params["num_prompt"][row]))
            penalties.penalize(x, at, meta.counts, p["repetition"], p["frequency"], p["presence"])
        return self._processors.apply(x, rows, np.arange(x.shape[0]), keep_argmax=False)

    def _draw(self, x: Tensor, peaks: Tensor, rows: SamplingRows, tokens: Tensor) -> tuple[RowError, ...]:
        """Stations 6 to 10: overwrite `tokens` of the rows that are not greedy."""
        drawn = rows.metadata.drawn
        p = rows.metadata.params[drawn]
        uniforms = draw.uniforms(p["seed"], p["sample_index"], rows.positions[drawn])
        if x.device.type == "cpu" and not self._processors:
            host, tops = x.numpy(), peaks.numpy()
            for row, q, uniform in zip(drawn.tolist(), p, uniforms.tolist(), strict=True):
                tokens[row] = draw_row(
                    host[row], tops[row], q["temperature"], int(q["top_k"]), q["top_p"], q["min_p"], uniform
                )
            return ()
        return self._draw_together(x, peaks, rows, torch.from_numpy(uniforms), tokens)

    def _draw_together(
        self, x: Tensor, peaks: Tensor, rows: SamplingRows, uniforms: Tensor, tokens: Tensor
    ) -> tuple[RowError, ...]:
        """The same for all rows at once, on any device."""
        drawn = rows.metadata.drawn
        p = rows.metadata.params[drawn]
        index = torch.from_numpy(drawn).to(x.device)
        if len(drawn) < x.shape[0]:
            x, peaks = x.index_select(0, index), peaks.index_select(0, index)
        z = truncation.scaled(x, peaks, torch.from_numpy(p["temperature"].copy()).to(x.device))
        errors = self._processors.apply(z, rows, drawn, keep_argmax=True)
        uniforms = uniforms.to(x.device)
        for part in truncation.candidates(z, p["top_k"], p["top_p"], p["min_p"]):
            mine = torch.from_numpy(part.rows).to(x.device)
            column = draw.invert(part.weights, uniforms[mine])
            chosen = column if part.ids is None else part.ids.gather(1, column.unsqueeze(1)).squeeze(1)
            tokens[index[mine]] = chosen
        return errors


def _once(errors: tuple[RowError, ...]) -> tuple[RowError, ...]:
    """The first error of each row, by row."""
    if len(errors) < 2:
        return errors
    first = {error.row: error for error in reversed(errors)}
    return tuple(first[row] for row in sorted(first))


def _peaks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy tokens [N] (the lowest id among equals; NaN counts as largest) and their logits [N]."""
    if x.device.type == "cpu":  # numpy's argmax is several times faster here, and its first-wins rule documented
        values = x.numpy()
        best = values.argmax(axis=1)
        return torch.from_numpy(best), torch.from_numpy(values[np.arange(len(best)), best])
    peaks, tokens = x.max(dim=1)
    return tokens, peaks


def _failures(peaks: Tensor) -> tuple[tuple[RowError, ...], npt.NDArray[np.int64]]:
    """Rows whose largest logit is no number to go by: NaN, +inf, or -inf when nothing is left."""
    host = peaks.cpu().numpy()
    finite = np.isfinite(host)
    if finite.all():
        return (), NO_ROWS
    failed = np.flatnonzero(~finite)
    errors = tuple(RowError(int(r), NOTHING_LEFT if host[r] == -np.inf else NOT_FINITE) for r in failed)
    return errors, failed
