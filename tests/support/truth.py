"""Octavo's tokens against Transformers': one teacher-forced forward per prompt checks every token.

Promises: `check_tokens` accepts a token only if it is the reference's argmax or within `TIE` of its best logit;
`check_same` lets two runs differ only from such a near tie on.
Does not know: how the tokens were made.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

TIE = 1e-3  # logits this close may fall either way in float32


class Reference:
    """A Transformers model in float32.

    Owns: the model, and the logits of sequences it has seen.
    """

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._seen: dict[tuple[int, ...], np.ndarray] = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], start: int) -> np.ndarray:
        """Logits [len(tokens) - start, V]: line i predicts the token at position start + i."""
        key = (start, *tokens)
        if key not in self._seen:
            out = self._model(torch.tensor([list(tokens)])).logits[0]
            self._seen[key] = out[start - 1 : len(tokens) - 1].float().numpy()
        return self._seen[key]

    def check_tokens(self, prompt: Sequence[int], output: Sequence[int], allowed: int | None = None) -> int:
        """Every output token is the reference's choice or nearly tied with it; the number of ties."""
        logits = self.logits([*prompt, *output], len(prompt))[:, :allowed]
        best = logits.max(axis=1)
        chosen = logits[np.arange(len(output)), list(output)]
        gap = best - chosen
        assert gap.max(initial=0.0) <= TIE, f"token {int(gap.argmax())}: reference prefers another by {gap.max():.2e}"
        return int((gap > 0).sum())

    def check_same(self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> None:
        """Two runs agree up to a near tie, if there is one."""
        assert len(plain) == len(other)
        for i, (a, b) in enumerate(zip(plain, other, strict=True)):
            if a != b:
                line = self.logits([*prompt, *plain], len(prompt))[i]
                gap = abs(float(line[a] - line[b]))
                assert gap <= TIE, f"runs part at token {i} ({a} or {b}) without a tie: {gap:.2e}"
                return

    def logprob_errors(self, prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[dict]) -> np.ndarray:
        """Absolute differences of all log-probabilities given for these tokens."""
        logits = torch.from_numpy(self.logits([*prompt, *output], len(prompt)))
        truth = torch.log_softmax(logits.double(), dim=-1).numpy()
        return np.array(
            [abs(truth[i, token] - entry.logprob) for i, line in enumerate(logprobs) for token, entry in line.items()]
        )
