"""A feature of somebody's own, as an installed package would bring it: no row gets its own last token again.

Tests copy this file into a package of its own; nothing in Octavo names it.
"""

from dataclasses import dataclass

from octavo.base.errors import ConfigError
from octavo.base.step import PlanPart
from octavo.config.schema import option
from octavo.plugins.features import Feature
from octavo.scheduler.seams import Late, NullControlPart
from octavo.worker.seams import NullDataPart


@dataclass(frozen=True, slots=True, kw_only=True)
class BanOptions:
    """Tokens that may not follow themselves."""

    ban_repeats: bool = option(False, "Never choose a token twice in a row.")
    ban_after: int = option(0, "Begin after so many tokens of an answer.", unit="tokens")


class BanRepeats(PlanPart, frozen=True):
    """The token that each sampling row must not get, in row order; -1: any."""

    tokens: tuple[int, ...]


class BanControl(NullControlPart):
    """Owns: the requests of plans in flight."""

    name = "ban"

    def __init__(self, after: int) -> None:
        self.rows: dict = {}
        self.after = after

    def plan(self, builder):
        self.rows[builder.seq] = list(builder.rows)
        return Late("BanRepeats")

    def supply(self, plan):
        rows = zip(self.rows.pop(plan.seq), plan.batch.num_sampled_tokens, strict=True)
        return BanRepeats(tuple(self._of(req) for req, count in rows if count))

    def _of(self, req) -> int:
        return int(req.tokens[-1]) if req.num_tokens - req.num_prompt_tokens >= self.after else -1


class BanData(NullDataPart):
    """Owns: nothing."""

    name = "ban"

    def mask(self, plan, batch, late):
        (part,) = (p for p in late if isinstance(p, BanRepeats))

        def forbid(logits):
            for row, token in enumerate(part.tokens):
                if token >= 0:
                    logits[row, token] = -float("inf")

        return forbid if part.tokens else None


class BanFeature(Feature):
    """Joins both halves, checks its options, and has a line in the start's summary."""

    name = "ban"
    options = BanOptions

    def check(self, options, config):
        if options.ban_after < 0:
            raise ConfigError(f"--ban-after must not be negative, got {options.ban_after}.")

    def is_on(self, options):
        return options.ban_repeats

    def control(self, options, context):
        return (BanControl(options.ban_after),)

    def data(self, options, context):
        return (BanData(),)

    def notes(self, options, layout, measured):
        return ("no token follows itself",)


FEATURE = BanFeature()
