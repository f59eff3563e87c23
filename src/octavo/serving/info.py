"""What can be said of a running engine.

Promises: constant after start-up.
Does not know: how the engine is reached.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.base.types import UsageContext
from octavo.plugins.features import Active
from octavo.plugins.registry import Explained


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about the running engine that doors show or need.

    `default_sampling` holds what the model's author recommends (INP-22); a request's own values win.
    """

    model: str
    served_names: tuple[str, ...]
    max_model_len: int  # tokens
    vocab_size: int  # ids the tokenizer knows; larger ids are never sampled
    eos_token_ids: tuple[int, ...]
    block_size: int = 0  # tokens
    num_kv_blocks: int = 0
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    created_s: int = 0  # Unix seconds
    engine_seed: int = 0
    usage: UsageContext = UsageContext.API_SERVER
    max_waiting_requests: int = 2048
    hang_timeout_s: float = 0.0  # after which an engine without a sign of life is given up; 0: never
    features: tuple[Active, ...] = ()  # all that are here, those without options too
    heeds_priority: bool = True  # False: first come, first served
    plugins: tuple[Explained, ...] = ()  # that are installed, with their states in the front
