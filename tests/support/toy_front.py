"""What stands before a toy engine: a real tokenizer and real limits, no model.

Promises: `frontend()` and `offline()` are complete and cheap; their engines are deterministic.
Does not know: HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.base.types import UsageContext
from octavo.inputs.limits import RequestLimits
from octavo.inputs.renderer import EngineInput
from octavo.inputs.tokenizer_fast import FastTokenizer
from octavo.observe.stats import StatsLog
from octavo.serving.async_engine import AsyncEngine
from octavo.serving.info import EngineInfo
from octavo.serving.sync_engine import SyncEngine
from tests.support.decoders import tokenizer
from tests.support.toy_engine import ToyClient

TEXT = tokenizer("byte-bpe")
MAX_LEN = 256


def info(**changes: Any) -> EngineInfo:
    """Facts of the toy model."""
    given = {
        "model": "toy", "served_names": ("toy",), "max_model_len": MAX_LEN, "vocab_size": TEXT.vocab_size,
        "eos_token_ids": (1,), "usage": UsageContext.TEST,
    }  # fmt: skip
    return EngineInfo(**{**given, **changes})


def limits() -> RequestLimits:
    """Limits of the toy model."""
    return RequestLimits(max_model_len=MAX_LEN, vocab_size=TEXT.vocab_size, tokenizer=TEXT)


def prompt(text: str) -> EngineInput:
    """A prompt as the renderer would make it."""
    return EngineInput(tuple(TEXT.encode(text)), text)


def async_engine(client: ToyClient, *, stats: StatsLog | None = None, **changes: Any) -> AsyncEngine:
    """An engine for an event loop."""
    return AsyncEngine(client, TEXT, limits(), info(**changes), stats=stats)


def sync_engine(client: ToyClient) -> SyncEngine:
    """An engine for a script."""
    return SyncEngine(client, TEXT, limits(), info())


class ToyRenderer:
    """The renderer's shape, with a chat template of one line.

    Owns: what `chat` was asked.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.tokenizer: FastTokenizer = TEXT

    def text(self, text: str) -> EngineInput:
        return prompt(text)

    def tokens(self, ids: Any) -> EngineInput:
        return EngineInput(tuple(ids), None)

    def chat(self, messages: list[Mapping[str, Any]], **options: Any) -> EngineInput:
        self.asked.append(options)
        return prompt("".join(f"{m['role']}: {m['content']}\n" for m in messages))


@dataclass
class ToyOffline:
    """What `open_offline` would give."""

    engine: SyncEngine
    renderer: Any
    limits: RequestLimits
    info: EngineInfo
    num_closed: int = 0

    def close(self) -> None:
        self.num_closed += 1
        self.engine.close()


def offline(client: ToyClient, **changes: Any) -> ToyOffline:
    """A front for the `LLM` class."""
    return ToyOffline(sync_engine(client), ToyRenderer(), limits(), info(**changes))
