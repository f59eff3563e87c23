"""How much may run: the configured limits, the fair share of long prompts, and the built-in constraints.

Promises: limits are values; the share is a pure function; each constraint is one rule.
Does not know: the queues or the blocks.

The context length is no constraint here: `Request.max_total_tokens` ends each request in time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.kvcache.hashing import BlockHash
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.request import Request
from octavo.scheduler.seams import Constraint, Wait
from octavo.scheduler.shared_prefix import SharedPrefix

# A prompt's chunk is never cut below this share of the step while others wait: a few prompts side by side let a
# short one through; many would only make all of them late.
MAX_PROMPTS_SIDE_BY_SIDE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Numbers that bound one step (SCH-2, SCH-3).

    Slots (`max_num_seqs`) are the worker's rows; how many run at once (`max_num_active_seqs`) may be fewer.
    Tokens in the batch exceed tokens scheduled only where drafts are added.
    `long_prefill_token_threshold` 0 means no threshold but the fair share.
    """

    max_num_seqs: int
    max_num_active_seqs: int
    max_num_scheduled_tokens: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True

    @property
    def max_running(self) -> int:
        """Most requests that run at once."""
        return min(self.max_num_seqs, self.max_num_active_seqs)

    @property
    def min_prefill_chunk(self) -> int:
        """A prompt that has others beside it may always take this many tokens in a step."""
        return self.long_prefill_token_threshold or max(1, self.max_num_scheduled_tokens // MAX_PROMPTS_SIDE_BY_SIDE)


def fair_prefill_chunk(needs: Sequence[int], tokens: int) -> int:
    """Largest chunk c so that everybody may take min(need, c) out of `tokens` (max-min fairness); at least 0.

    With the needs 1900 and 10 and 60 tokens it is 50: the short one gets all it needs, the long one the rest.
    """
    rest = tokens
    ordered = sorted(needs)
    for i, need in enumerate(ordered):
        share = rest // (len(ordered) - i)
        if need > share:
            return max(0, share)
        rest -= need
    return max(0, tokens)


def fair_needs(waiting: Sequence[Request], is_findable: Callable[[BlockHash], bool]) -> list[int]:
    """Tokens that waiting requests want, of those only who may run in this step.

    Of those who begin alike one computes the beginning, unless it can be found already.
    """
    needs: list[int] = []
    crowds: set[BlockHash] = set()
    for req in waiting:
        alike = {crowd for rule in req.constraints if (crowd := rule.crowd(req)) is not None}
        if not any(crowd in crowds and not is_findable(crowd) for crowd in alike):
            needs.append(req.num_pending_tokens)
        crowds |= alike
    return needs


class _Family:
    """Samples of one prompt.

    Owns: who computes the prompt for all of them, how many are alive, and whether the prompt is done. It is what the
    others wait for.
    """

    __slots__ = ("done", "leader", "members")

    def __init__(self) -> None:
        self.leader: Request | None = None
        self.members = 0
        self.done = False

    def over(self) -> bool:
        """The prompt is computed, or nobody computes it any more."""
        leader = self.leader
        self.done = self.done or (leader is not None and leader.num_output_tokens > 0)
        return self.done or leader is None or leader.finished


class SharedPrompt:
    """Samples of one prompt (n > 1) wait until the first has computed it, so that they hit its blocks (OUT-7).

    Owns: one record for each family with a living member.
    """

    rank = 0
    limits_decode = False

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def applies(self, req: Request) -> bool:
        """To siblings that may read the prefix cache."""
        parent = req.source.parent_id
        if parent is None or not req.reads_prefix_cache:
            return False
        self._families.setdefault(parent, _Family()).members += 1
        return True

    def wait(self, req: Request) -> Wait | None:
        """The first asked leads; the others follow once it has output, or take over when it ended without."""
        family = self._family(req)
        if family.over() and not family.done:
            family.leader = req
        return None if family.done or family.leader is req else family

    def crowd(self, req: Request) -> BlockHash | None:
        """Who may be looked at may run."""
        return None

    def admits(self, req: Request, builder: PlanBuilder) -> bool:
        """Those who are held are not asked."""
        return True

    def cap(self, req: Request, n: int, builder: PlanBuilder) -> int:
        """No limit once admitted."""
        return n

    def commit(self, req: Request, n: int, builder: PlanBuilder) -> None:
        """Nothing is counted."""

    def undo(self, req: Request, builder: PlanBuilder) -> None:
        """Nothing was counted."""

    def forget(self, req: Request) -> None:
        """The last member takes the record with it."""
        family = self._family(req)
        family.members -= 1
        if not family.members:
            del self._families[req.source.parent_id or ""]

    def _family(self, req: Request) -> _Family:
        return self._families[req.source.parent_id or ""]


def builtin_constraints(limits: SchedulerLimits, hash_block_size: int) -> tuple[Constraint, ...]:
    """The rules every engine has; without a prefix cache nobody has anything to wait for."""
    return (SharedPrompt(), SharedPrefix(hash_block_size)) if limits.enable_prefix_caching else ()
