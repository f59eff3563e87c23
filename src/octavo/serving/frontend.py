"""What a front door is given: the engine, the way in, the rules, and what can be said about them.

Promises: `Frontend` is the one bundle every door uses; it is constant after start-up.
Does not know: which door it is.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.serving.cache_feed import Feed, NoFeed
from octavo.serving.info import EngineInfo

if TYPE_CHECKING:
    from octavo.inputs.limits import RequestLimits
    from octavo.inputs.renderer import Renderer
    from octavo.observe.stats import StatsLog
    from octavo.serving.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """Everything a door needs; made by `serving.startup`."""

    engine: "AsyncEngine"
    renderer: "Renderer"
    limits: "RequestLimits"
    stats: "StatsLog"
    info: EngineInfo
    feed: Feed = field(default_factory=NoFeed)
