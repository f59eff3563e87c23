"""What a peer is: an engine that can be started as an HTTP server on this machine (OPS-9).

Promises: a peer only says what to run; starting, watching and stopping is the same for all (see `process`).
Does not know: which work is measured, or how.

Widths are the number formats of the weights: bf16, int8 and int4. Engines quantize differently, so one width
compares formats of about the same size, not the same numbers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from octavo.base.errors import ConfigError

WIDTHS = ("bf16", "int8", "int4")
GGUF_TYPES = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
KV_BYTES_PER_VALUE = 2
KV_ROOM = 1.25  # engines round up to blocks and keep some free


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that decide what a step must read and compute. Sizes in values, not bytes."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices, without embedding and head."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Weights of the output head."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, 16 bits a value."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * KV_BYTES_PER_VALUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint in the forms that peers read: a Hugging Face folder, and a GGUF file for each width."""

    name: str
    folder: Path
    gguf: Mapping[str, Path]  # width -> file
    shape: ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNeed:
    """What one server must hold: `slots` requests at once, each of up to `tokens_per_slot` tokens.

    `shared_tokens` of them are the same in all requests; they still count in `tokens_per_slot`.
    """

    slots: int
    tokens_per_slot: int
    shared_tokens: int = 0

    def kv_bytes(self, shape: ModelShape) -> int:
        """KV memory that holds all slots full, with room for rounding, in whole MiB."""
        exact = self.slots * self.tokens_per_slot * shape.kv_bytes_per_token
        return -(-int(exact * KV_ROOM) // 2**20) * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start a server: its command and environment, and how to ask it.

    `extra` goes into every request body.
    """

    command: tuple[str, ...]
    port: int
    model: str
    env: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    cwd: Path | None = None


class Peer(Protocol):
    """An engine. `works` are the works it can run (None: all); `widths` those it has."""

    name: str
    widths: frozenset[str]
    works: frozenset[str] | None

    def available(self) -> str | None:
        """None, or why it cannot run on this machine and what to do about it."""

    def files(self, model: Checkpoint, width: str) -> tuple[Path, ...]:
        """The files it reads for this model at this width; without one of them it cannot run it."""

    def version_command(self) -> tuple[str, ...]:
        """A command whose output tells the version."""

    def launch(self, model: Checkpoint, width: str, need: ServerNeed, port: int) -> Launch:
        """How to start it for this need."""


def folder_files(folder: Path) -> tuple[Path, ...]:
    """What a Hugging Face folder must have, and its weights."""
    return (folder / "config.json", folder / "tokenizer.json", *sorted(folder.glob("*.safetensors")))


def lacking(peer: Peer, model: Checkpoint, width: str) -> str | None:
    """None, or why the peer cannot run this model at this width."""
    if width not in peer.widths:
        return f"{peer.name} has no {width}"
    missing = [path for path in peer.files(model, width) if not path.exists()]
    return f"{missing[0]} is missing; scripts/peers/ makes it" if missing else None


def read_shape(folder: Path) -> ModelShape:
    """The shape from a folder's `config.json`; raises `ConfigError` when it cannot be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelShape(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(config["vocab_size"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not describe a dense decoder ({type(error).__name__}: {error}).") from None
