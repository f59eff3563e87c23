"""What the machine itself would allow: read bandwidth and arithmetic, and how near a figure comes to them.

Promises: the limit is measured in the same run, between rounds; the same bytes and operations are counted for every
engine of one width, those that no engine can avoid.
Does not know: engines.

Counted are the bits of the weights alone (16, 8 or 4, no scales) with the output head but without the embedding's
rows, keys and values in 16 bits, and two operations a multiplication with a weight. A step of decoding can be no
faster than reading its bytes, nor than its arithmetic; a prompt no faster than its arithmetic.
"""

import subprocess
from collections.abc import Sequence

import msgspec

from octavo.base.interpreter import module_command
from octavo.bench.peers.api import ModelShape

BITS = {"bf16": 16, "int8": 8, "int4": 4}
PROBE_TIMEOUT_S = 120.0


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's limits on all cores. Anything the probe does not know is None."""

    read_gb_s: float | None = None
    bf16_gflop_s: float | None = None
    int8_gop_s: float | None = None

    def operations_s(self, width: str) -> float | None:
        """Operations a second of the instruction that a width computes with: int4 is computed as int8."""
        found = self.bf16_gflop_s if width == "bf16" else self.int8_gop_s
        return None if found is None else found * 1e9


def probe(command: Sequence[str] = module_command("octavo.ops.probe")) -> Roof | None:
    """Run the probe in a process of its own (it computes; this one must not); None when there is none or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=True)
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Roof)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError, IndexError):
        return None


def limit(key: str, shape: ModelShape, width: str, roof: Roof) -> float | None:
    """The best value a figure could have on this machine; None where none is defined or the probe lacks a part."""
    if roof.read_gb_s is None:
        return None
    if key == "decode_tok_s":
        return 1 / _step_s(shape, width, roof, rows=1, context=192)
    if roof.operations_s(width) is None:
        return None
    if key == "prompt_tok_s":
        return 2048 / _prompt_s(shape, width, roof, tokens=2048, earlier=0)
    if key == "output_tok_s":
        prompts_s = 32 * _prompt_s(shape, width, roof, tokens=256, earlier=0)
        return 32 * 128 / (prompts_s + 127 * _step_s(shape, width, roof, rows=32, context=320))
    if key == "wall_s":
        prefix_s = _prompt_s(shape, width, roof, tokens=1024, earlier=0)
        own_s = 32 * _prompt_s(shape, width, roof, tokens=32, earlier=1024)
        return prefix_s + own_s + 63 * _step_s(shape, width, roof, rows=32, context=64, shared=1024)
    return None


def share(value: float, best: float, *, higher_is_better: bool) -> float:
    """How near a value comes to the limit, 0..1."""
    return value / best if higher_is_better else best / value


def _step_s(shape: ModelShape, width: str, roof: Roof, *, rows: int, context: int, shared: int = 0) -> float:
    """Shortest time of one decoding step: `rows` sequences of `context` tokens each, after `shared` that are the same."""
    weights = shape.layer_weights + shape.head_weights
    read = weights * BITS[width] / 8 + (rows * context + shared) * shape.kv_bytes_per_token
    read_s = read / ((roof.read_gb_s or 1) * 1e9)
    operations_s = roof.operations_s(width)
    return max(read_s, 2 * rows * weights / operations_s) if operations_s else read_s


def _prompt_s(shape: ModelShape, width: str, roof: Roof, *, tokens: int, earlier: int) -> float:
    """Shortest time to compute `tokens` new tokens after `earlier` ones, and the logits of the last."""
    operations_s = roof.operations_s(width) or 1
    pairs = tokens * earlier + tokens * (tokens + 1) // 2  # causal attention
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    attention_s = attention / (roof.bf16_gflop_s * 1e9) if roof.bf16_gflop_s else 0.0
    return 2 * (tokens * shape.layer_weights + shape.head_weights) / operations_s + attention_s
