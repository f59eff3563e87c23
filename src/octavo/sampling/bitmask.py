"""Which tokens a grammar allows, a bit a token.

Promises: the layout in which grammar libraries give it: int32 words, the lowest bit the lowest id, set means allowed
(OUT-12). It is a `Mask` like any other, so that every sampler can apply it; the native one reads the words themselves.
Does not know: grammars.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BITS = 32


class TokenBitmask:
    """`words` [N, W] int32, a row for each row of logits; -1 in every word allows all. W * 32 covers the vocabulary.

    Owns: nothing; it holds the caller's array.
    """

    def __init__(self, words: npt.NDArray[np.int32]) -> None:
        self.words = np.ascontiguousarray(words)

    def take(self, index: npt.NDArray[np.int64]) -> "TokenBitmask":
        """The mask of the rows `index`, in that order."""
        return TokenBitmask(self.words[index])

    def __call__(self, logits: Tensor) -> None:
        """Forbid in place what is not allowed in logits [N, V]."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
        logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)
