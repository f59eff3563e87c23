"""The sampler on the native core: one call a batch, for logits that lie in a CPU's memory.

Promises: every station of `Sampler` in the same order with the same tokens, but for draws that fall within about 1e-6
of a border between two tokens or of a nucleus's edge, where the last bits of `exp` and of sums decide; the same bits
for a row alone and in any batch, whatever the number of threads. Masks that are `TokenBitmask`s cost next to nothing.
Does not know: custom processors (see `choice`), or what a token is worth to anybody.
Importing this raises `ImportError` where the package was built without the core.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.base.step import LogprobArrays, RowError
from octavo.ops.native import DTYPES, core
from octavo.sampling.bitmask import TokenBitmask
from octavo.sampling.logprobs import LogprobsMode, Scores, empty_lines
from octavo.sampling.sampler import NOT_FINITE, NOTHING_LEFT, Mask, SampledTokens
from octavo.sampling.state import NativeCounts, SamplingMetadata, SamplingRows

MODES = {mode: i for i, mode in enumerate(LogprobsMode)}  # as octavo/sampling.h numbers them
READABLE = (torch.float32, torch.bfloat16)
MESSAGES = {1: NOT_FINITE, 2: NOTHING_LEFT}  # as octavo/sampling.h numbers failures


class NativeSampler:
    """Chooses tokens natively. What it keeps are places to write to, nothing of a batch (OUT-1).

    Owns: the buffers of lengths, tokens and failures, and the addresses of what it was given last.
    """

    def __init__(self, *, vocab_limit: int, mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS) -> None:
        self._vocab_limit = vocab_limit
        self._mode = mode
        self._meta: SamplingMetadata | None = None
        self._token_ids: npt.NDArray[np.int32] | None = None
        self._grow(1)

    def make_counts(self, with_prompt: bool) -> NativeCounts:
        """What a request's tokens are counted in."""
        counts: NativeCounts = core.TokenCounts(with_prompt)
        return counts

    def sample(self, logits: Tensor, rows: SamplingRows, masks: Sequence[Mask] = ()) -> SampledTokens:
        """Choose one token for each row of `logits` [N, V], which may be overwritten where there are masks."""
        meta = rows.metadata
        count = len(meta.slots)
        if not count:
            return SampledTokens(tokens=self._tokens[:0].copy())
        self._point_at(meta, rows.token_ids)
        self._lengths[:count] = rows.lengths
        lines = empty_lines(meta.width, meta.columns) if meta.columns else None
        raw, words = None, None
        if masks:
            words = _bitmask(masks)
            if words is None:
                raw = logits.clone() if lines and not self._mode.processed else None
                logits = _masked(logits, self._vocab_limit, masks)
        failed = self._run(logits, count, words, None if raw is not None else lines)
        tokens = self._tokens[:count].copy()
        if raw is not None and lines is not None:
            scores = self.score(raw, tokens.astype(np.int64), meta.columns)
            lines = LogprobArrays(*scores, meta.width)
        return SampledTokens(tokens=tokens, logprobs=lines, errors=self._errors(count) if failed else ())

    def score(self, logits: Tensor, chosen: npt.NDArray[np.int64], columns: int) -> Scores:
        """`logprobs.score` of tokens [N] that were not drawn."""
        logits = _readable(logits)
        lines = empty_lines(np.zeros(len(chosen), dtype=np.int32), columns)
        count, vocab = logits.shape
        core.score(
            logits.data_ptr(), DTYPES[logits.dtype], count, vocab, min(vocab, self._vocab_limit), logits.stride(0),
            np.ascontiguousarray(chosen).ctypes.data, *_addresses(lines), columns, MODES[self._mode.of_prompts],
        )  # fmt: skip
        return lines.token_ids, lines.logprobs, lines.ranks

    # ---- inside ---------------------------------------------------------------------------------

    def _run(self, logits: Tensor, count: int, words: npt.NDArray[np.int32] | None, lines: LogprobArrays | None) -> int:
        """The native call: how many rows failed."""
        logits = _readable(logits)
        vocab = logits.size(1)
        failed: int = core.sample(
            logits.data_ptr(), DTYPES[logits.dtype], count, vocab, min(vocab, self._vocab_limit), logits.stride(0),
            self._params_at, self._token_ids_at, self._token_stride, self._slots_at, self._lengths_at,
            0 if words is None else words.ctypes.data, 0 if words is None else words.shape[1],
            self._tokens_at, self._failures_at,
            *((0, 0, 0, 0) if lines is None else (*_addresses(lines), lines.token_ids.shape[1])), MODES[self._mode],
        )  # fmt: skip
        return failed

    def _point_at(self, meta: SamplingMetadata, token_ids: npt.NDArray[np.int32]) -> None:
        """Addresses, found out only when they may have changed: a batch's metadata lasts many steps."""
        if meta is not self._meta:
            self._meta = meta
            self._params_at, self._slots_at = meta.params.ctypes.data, meta.slots.ctypes.data
            if len(meta.slots) > len(self._lengths):
                self._grow(len(meta.slots))
        if token_ids is not self._token_ids:
            self._token_ids = token_ids
            self._token_ids_at, self._token_stride = token_ids.ctypes.data, token_ids.strides[0] // token_ids.itemsize

    def _grow(self, count: int) -> None:
        self._lengths = np.zeros(count, dtype=np.int64)
        self._tokens = np.zeros(count, dtype=np.int32)
        self._failures = np.zeros(count, dtype=np.uint8)
        self._lengths_at, self._tokens_at = self._lengths.ctypes.data, self._tokens.ctypes.data
        self._failures_at = self._failures.ctypes.data

    def _errors(self, count: int) -> tuple[RowError, ...]:
        failures = self._failures[:count]
        return tuple(RowError(row, MESSAGES[int(failures[row])]) for row in np.flatnonzero(failures).tolist())


def _addresses(lines: LogprobArrays) -> tuple[int, int, int]:
    arrays: tuple[npt.NDArray[Any], ...] = (lines.token_ids, lines.logprobs, lines.ranks)
    first, second, third = (a.ctypes.data for a in arrays)
    return first, second, third


def _readable(logits: Tensor) -> Tensor:
    if logits.dtype not in READABLE:
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _bitmask(masks: Sequence[Mask]) -> npt.NDArray[np.int32] | None:
    """The words of bitmasks, several joined; None when there are other masks too."""
    words = None
    for mask in masks:
        if not isinstance(mask, TokenBitmask):
            return None
        words = mask.words if words is None else words & mask.words
    return words


def _masked(logits: Tensor, vocab_limit: int, masks: Sequence[Mask]) -> Tensor:
    x = logits[:, :vocab_limit].float()
    for mask in masks:
        mask(x)
    return x
