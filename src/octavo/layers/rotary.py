"""Rotary position embeddings: the variants as one table of functions.

Promises: cos and sin are computed and kept in float32; the table is filled in `finish`, so building works on the meta
device.
Does not know: attention, or how the rotation is applied (see `ops.reference.rotary`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from octavo.base.errors import LoadError
from octavo.config.facts import RopeFacts
from octavo.ops.registry import GatherRows
from octavo.quant.api import Piece, as_piece, check_shape

Frequencies = tuple[torch.Tensor, float]  # inverse frequencies [R / 2] float32, and a factor on cos and sin


@dataclass(frozen=True, slots=True)
class Turning:
    """What the frequencies depend on: the model's facts, and the length this engine serves."""

    rope: RopeFacts
    rotary_dim: int
    max_position: int  # the model's own length, tokens
    max_model_len: int  # this engine's, tokens

    @property
    def scaling(self) -> Mapping[str, Any]:
        return self.rope.scaling

    def waves(self, stretch: float = 1.0) -> torch.Tensor:
        """What the frequencies of the plain form are the inverse of, with theta times `stretch`."""
        steps = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        return (self.rope.theta * stretch) ** steps

    def base(self, stretch: float = 1.0) -> torch.Tensor:
        """Frequencies of the plain form, with theta times `stretch`."""
        return 1.0 / self.waves(stretch)


class RotaryTable(nn.Module):
    """cos and sin of every position up to the model's length.

    Owns: `table` [max_model_len, R], cos in the first half of the columns and sin in the second.
    """

    table: torch.Tensor

    def __init__(
        self, rope: RopeFacts, head_dim: int, max_position: int, max_model_len: int, *, gather: GatherRows
    ) -> None:
        super().__init__()
        if rope.kind not in KINDS:
            raise LoadError(
                f"the model's rotary scaling {rope.kind!r} is not supported; there are {', '.join(sorted(KINDS))}"
            )
        self.rotary_dim = head_dim if rope.kind == "proportional" else int(head_dim * rope.partial)
        self._turning = Turning(rope, self.rotary_dim, max_position, max_model_len)
        self._divisors: torch.Tensor | None = None
        self._gather = gather
        table = torch.empty(max_model_len, self.rotary_dim, dtype=torch.float32)
        self.register_buffer("table", table, persistent=False)

    def pieces(self) -> Mapping[str, tuple[str | None, ...]]:
        """Nothing must come: but a GGUF file may bring `frequency_divisors`."""
        return {}

    def expects(self, parameter: str, shard: str | None) -> tuple[int, ...]:
        return (self.rotary_dim // 2,)

    def check(self, parameter: str, shard: str | None, piece: Piece) -> None:
        if parameter != "frequency_divisors" or shard is not None:
            raise KeyError(parameter)
        check_shape(piece, self.expects(parameter, shard))

    def place(self, parameter: str, shard: str | None, piece: torch.Tensor | Piece) -> None:
        piece = as_piece(piece)
        self.check(parameter, shard, piece)
        self._divisors = piece.rows(0, self.rotary_dim // 2, torch.float32).clone()

    def state(self) -> Mapping[str, torch.Tensor]:
        """What a checkpoint brought; the table depends on this engine's length and is made anew."""
        return {} if self._divisors is None else {"frequency_divisors": self._divisors}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._divisors = state.get("frequency_divisors")
        self.finish()

    def finish(self) -> None:
        with torch.device("cpu"):
            frequencies, scale = inverse_frequencies(self._turning)
            if self._divisors is not None:
                frequencies = frequencies / self._divisors
            angles = torch.arange(self._turning.max_model_len, dtype=torch.float32)[:, None] * frequencies
            self.table.copy_(torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows of these positions: [T] int64 -> [T, R]. Once a step serves all layers."""
        return self._gather(self.table, positions)


def inverse_frequencies(t: Turning) -> Frequencies:
    """The frequencies of a model's rotary kind. Raises `LoadError` when a key it needs is missing."""
    try:
        return KINDS[t.rope.kind](t)
    except KeyError as missing:
        raise LoadError(f"the model's rotary scaling of kind {t.rope.kind!r} lacks the key {missing}") from None


def _plain(t: Turning) -> Frequencies:
    """Su et al., RoFormer, 2021."""
    return t.base(), 1.0


def _linear(t: Turning) -> Frequencies:
    """Position interpolation: Chen et al., 2023."""
    return t.base() / t.scaling["factor"], 1.0


def _dynamic(t: Turning) -> Frequencies:
    """NTK-aware scaling of the base, for the longest length this engine was started with.

    The published form changes the base as a sequence grows beyond the trained length, which would leave cached keys
    rotated by another one: `config.resolve` refuses to serve that far, and up to there the base is the unscaled one.
    """
    factor = t.scaling["factor"]
    stretch = factor * max(t.max_model_len, t.max_position) / t.max_position - (factor - 1)
    return t.base(stretch ** (t.rotary_dim / (t.rotary_dim - 2))), 1.0


def _llama3(t: Turning) -> Frequencies:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, and those between blended."""
    keys = t.scaling
    factor, low, high = keys["factor"], keys["low_freq_factor"], keys["high_freq_factor"]
    original = keys["original_max_position_embeddings"]
    frequencies = t.base()
    turns = original / (2 * math.pi / frequencies)  # over the original context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies, 1.0


def _yarn(t: Turning) -> Frequencies:
    """Peng et al., YaRN, 2023: interpolation and extrapolation blended by a ramp over the dimensions."""
    keys, dim = t.scaling, t.rotary_dim
    original = keys["original_max_position_embeddings"]
    factor = keys.get("factor") or t.max_position / original
    waves = t.waves()

    def dimension(num_turns: float) -> float:
        return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(t.rope.theta))

    low, high = dimension(keys.get("beta_fast") or 32), dimension(keys.get("beta_slow") or 1)
    if keys.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (factor * waves) * (1 - kept) + 1.0 / waves * kept, _yarn_scale(keys, factor)


def _yarn_scale(keys: Mapping[str, Any], factor: float) -> float:
    if keys.get("attention_factor") is not None:
        return float(keys["attention_factor"])

    def log_scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if keys.get("mscale") and keys.get("mscale_all_dim"):
        return log_scale(keys["mscale"]) / log_scale(keys["mscale_all_dim"])
    return log_scale(1.0)


def _longrope(t: Turning) -> Frequencies:
    """Ding et al., LongRoPE, 2024: a factor for each frequency; `config.resolve` keeps to those of short texts."""
    keys = t.scaling
    original = keys["original_max_position_embeddings"]
    name = "short_factor" if t.max_model_len <= original else "long_factor"
    factors = torch.tensor(keys[name], dtype=torch.float32)
    if len(factors) != t.rotary_dim // 2:
        raise LoadError(
            f"the model's {name} has {len(factors)} entries; its rotary embedding needs {t.rotary_dim // 2}"
        )
    factor, scale = keys.get("factor") or t.max_position / original, keys.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (factors * t.waves()), float(scale)


def _proportional(t: Turning) -> Frequencies:
    """Gemma 4's: the first share of the frequencies of a whole head, and the others stand still."""
    turning = int(t.rope.partial * t.rotary_dim // 2)
    frequencies = t.base()
    frequencies[turning:] = 0.0
    return frequencies / t.scaling.get("factor", 1.0), 1.0


KINDS: Final[Mapping[str, Callable[[Turning], Frequencies]]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
