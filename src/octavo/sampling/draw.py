"""One uniform number per token from a counter, and the inversion that turns it into a token.

Promises: the number is a function of (seed, sample index, output position) and of nothing else, so a request
draws the same numbers alone, in any batch, after a preemption and after a restart (OUT-4, OUT-30); a token
of weight zero is never drawn.
Does not know: logits, parameters, or who asks.

The generator is Philox-4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). Key: the seed's low and high word. Counter: (output position, stream, sample index low, high).
Published test vectors (counter; key; result):
    0 0 0 0; 0 0                                              6627e8d5 e169c58d bc57ac4c 9b00dbd8
    243f6a88 85a308d3 13198a2e 03707344; a4093822 299f31d0    d16cfe09 94fdcceb 5001e420 24126ea1
    ffffffff (x 4); ffffffff (x 2)                            408f276d 41c83b0e a20bc7c6 6d5451fd
"""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TOKEN_STREAM = 0  # the draw of a token; other streams are free for other uses (verification of drafts)

_ROUNDS = 10
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Words = npt.NDArray[np.uint64]  # every value is below 2**32


def philox(counter: Words, key: Words) -> Words:
    """Philox-4x32-10 of `counter` [N, 4] under `key` [N, 2]: four words [N, 4]."""
    c0, c1, c2, c3 = (counter[:, i] for i in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(
    seeds: npt.NDArray[np.uint64],
    sample_indices: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    *,
    stream: int = TOKEN_STREAM,
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each row, with 53 random bits. All arguments are [N]."""
    index = sample_indices.astype(np.uint64)
    counter = np.empty((len(seeds), 4), dtype=np.uint64)
    counter[:, 0] = positions.astype(np.uint64) & _LOW
    counter[:, 1] = stream
    counter[:, 2] = index & _LOW
    counter[:, 3] = index >> _SHIFT
    key = np.stack((seeds & _LOW, seeds >> _SHIFT), axis=1)
    words = philox(counter, key)
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)  # 27 and 26 bits
    return (high.astype(np.float64) * 67108864.0 + low.astype(np.float64)) / 9007199254740992.0


def seed_word(seed: int) -> int:
    """A request's seed, negative ones included, as 64 unsigned bits."""
    return seed & 0xFFFF_FFFF_FFFF_FFFF


def derived_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that brings none: 64 bits from the engine's seed and the request's id."""
    data = seed_word(engine_seed).to_bytes(8, "little") + request_id.encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Column of each row at which the cumulative weight first exceeds `uniform` times the row's total.

    `weights` [N, K] are not negative and need no normalization; `uniform` [N] is float64 in [0, 1).
    The sums are float64, so that rounding can neither pick a column of weight zero nor run past the end.
    A row without any weight gives column 0. Returns [N] int64.
    """
    cumulative = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    target = uniform.unsqueeze(1) * total
    found = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, total)  # the last column with weight
    return torch.minimum(found, last).squeeze(1)
