"""What a front door is given: the engine, the way in, the rules, and what can be said about them.

Promises: `Front` is the one bundle every door uses; it is constant after start-up.
Does not know: which door it is.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.serving.cache_feed import Feed, NoFeed
from octavo.serving.info import EngineInfo

if TYPE_CHECKING:
    from octavo.inputs.limits import Limits
    from octavo.inputs.renderer import Renderer
    from octavo.observe.stats import StatsBook
    from octavo.serving.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Everything a door needs; made by `serving.startup`."""

    engine: "AsyncEngine"
    renderer: "Renderer"
    limits: "Limits"
    stats: "StatsBook"
    info: EngineInfo
    feed: Feed = field(default_factory=NoFeed)
