"""The sampler again, slowly: plain Python, one row and one token id at a time, written from the definitions.

Float32 only where the sampler's own result depends on it (scaled logits); sums are Python floats.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from octavo.base.params import SamplingParams

M32 = 0xFFFFFFFF


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & M32, (p0 >> 32) ^ c[3] ^ k[1], p0 & M32]
        k = [(k[0] + 0x9E3779B9) & M32, (k[1] + 0xBB67AE85) & M32]
    return c


def uniform(seed: int, sample_index: int, position: int) -> float:
    words = philox([position, 0, sample_index & M32, sample_index >> 32], [seed & M32, seed >> 32])
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


@dataclass
class Row:
    """One row's question."""

    logits: list[float]
    prompt: list[int]
    output: list[int]
    params: SamplingParams
    seed: int
    sample_index: int = 0
    eos: list[int] = field(default_factory=list)
    bad_words: list[tuple[int, ...]] = field(default_factory=list)


def f32(value: float) -> float:
    return float(np.float32(value))


def edited(row: Row, vocab_limit: int) -> list[float]:
    """Station 4, in its order: allowed, bad words, min tokens, bias, penalties."""
    p, x = row.params, [f32(v) for v in row.logits[:vocab_limit]]
    known = row.prompt + row.output
    if p.allowed_token_ids is not None:
        x = [v if i in p.allowed_token_ids else -math.inf for i, v in enumerate(x)]
    for word in row.bad_words:
        head = list(word[:-1])
        if word[-1] < vocab_limit and known[len(known) - len(head) :] == head:
            x[word[-1]] = -math.inf
    if len(row.output) < p.min_tokens:
        for t in [*([] if p.ignore_eos else row.eos), *p.stop_token_ids]:
            if 0 <= t < vocab_limit:
                x[t] = -math.inf
    for t, bias in (p.logit_bias or {}).items():
        if 0 <= t < vocab_limit:
            x[t] = f32(x[t] + f32(bias))
    for t in range(vocab_limit):
        if t in known and p.repetition_penalty != 1.0:
            r = f32(p.repetition_penalty)
            x[t] = f32(x[t] / r) if x[t] > 0 else f32(x[t] * r)
        count = row.output.count(t)
        fixed = f32(f32(f32(p.frequency_penalty) * count) + (f32(p.presence_penalty) if count else 0.0))
        x[t] = f32(x[t] - fixed)
    return x


def kept(x: list[float], p: SamplingParams) -> dict[int, float]:
    """Stations 6 to 8: the ids that stay and their weights."""
    peak, t = max(x), np.float32(p.temperature)
    z = [float((np.float32(v) - np.float32(peak)) / t) for v in x]
    w = [float(np.exp(np.float32(v))) for v in z]
    order = sorted((i for i in range(len(z)) if w[i] > 0), key=lambda i: (-z[i], i))
    if p.min_p > 0:
        order = [i for i in order if z[i] >= f32(math.log(p.min_p))]
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p < 1:
        total, before, stay = math.fsum(w[i] for i in order), 0.0, []
        for i in order:
            if before < p.top_p * total:
                stay.append(i)
            before += w[i]
        order = stay
    return {i: w[i] for i in sorted(order)}


def choose(row: Row, vocab_limit: int) -> int | None:
    """The token, or None where nothing can be chosen."""
    x = edited(row, vocab_limit)
    if any(math.isnan(v) or v == math.inf for v in x) or max(x) == -math.inf:
        return None
    if row.params.temperature < 1e-5:
        return x.index(max(x))
    weights = kept(x, row.params)
    target, running = uniform(row.seed, row.sample_index, len(row.output)) * sum(weights.values()), 0.0
    for i, w in weights.items():
        running += w
        if running > target:
            return i
    return max(weights)
