"""Which sampler serves.

Promises: the native one where the core is there and the logits lie in a CPU's memory; the general one otherwise, and for
the rows that a custom processor changes, since those change torch tensors between the stations.
Does not know: how either works.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.base.step import LogprobArrays, RowError
from octavo.plugins.registry import load_target
from octavo.sampling.bitmask import TokenBitmask
from octavo.sampling.logprobs import LogprobsMode, empty_lines
from octavo.sampling.processors import Processors
from octavo.sampling.sampler import Mask, SampledTokens, Sampler, TokenSampler
from octavo.sampling.state import SamplingRows

NATIVE = "octavo.sampling.native:NativeSampler"


def make_sampler(
    *,
    vocab_limit: int,
    processors: Processors | None = None,
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    native: bool = True,
) -> TokenSampler:
    """The quickest sampler that can serve; `native` False: never the native one."""
    general = Sampler(vocab_limit=vocab_limit, processors=processors, mode=mode)
    if not native:
        return general
    try:
        quick = cast(TokenSampler, load_target(NATIVE)(vocab_limit=vocab_limit, mode=mode))
    except ImportError:  # the package was built without the core
        return general
    return SplitSampler(quick, general, processors) if processors else quick


class SplitSampler:
    """The general sampler for rows that a custom processor changes, the quick one for all others.

    Owns: nothing.
    """

    def __init__(self, quick: TokenSampler, general: TokenSampler, processors: Processors) -> None:
        self._quick, self._general, self._processors = quick, general, processors
        self.make_counts = quick.make_counts
        self.score = quick.score

    def sample(self, logits: Tensor, rows: SamplingRows, masks: Sequence[Mask] = ()) -> SampledTokens:
        """Choose one token for each row of `logits` [N, V], which may be overwritten."""
        touched = self._processors.touched(rows.metadata.slots)
        if not touched.any():
            return self._quick.sample(logits, rows, masks)
        if touched.all():
            return self._general.sample(logits, rows, masks)
        tokens = np.zeros(len(touched), dtype=np.int64)
        meta, errors = rows.metadata, []
        lines = empty_lines(meta.width, meta.columns) if meta.columns else None
        for sampler, index in ((self._general, np.flatnonzero(touched)), (self._quick, np.flatnonzero(~touched))):
            mine = [_rows_of(mask, index, len(touched)) for mask in masks]
            out = sampler.sample(logits[index], rows.take(index), mine)
            tokens[index] = out.tokens
            errors += [RowError(int(index[error.row]), error.message) for error in out.errors]
            if lines is not None and out.logprobs is not None:
                _put(lines, index, out.logprobs)
        return SampledTokens(tokens=tokens, logprobs=lines, errors=tuple(sorted(errors, key=lambda error: error.row)))


def _rows_of(mask: Mask, index: npt.NDArray[np.int64], count: int) -> Mask:
    """The part of a mask of `count` rows that concerns the rows `index`."""
    if isinstance(mask, TokenBitmask):
        return mask.take(index)

    def part(x: Tensor) -> None:
        whole = x.new_zeros(count, x.shape[1])
        mask(whole)
        x += whole[index]

    return part


def _put(lines: LogprobArrays, index: npt.NDArray[np.int64], part: LogprobArrays) -> None:
    """The lines of some rows among those of all; a part has as many columns as the widest of its rows."""
    columns = part.token_ids.shape[1]
    lines.token_ids[index, :columns] = part.token_ids
    lines.logprobs[index, :columns] = part.logprobs
    lines.ranks[index] = part.ranks
