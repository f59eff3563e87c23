"""What each kind of cache keeps, may forget, and needs for a hit: one policy a spec class (REQ-16).

Promises: a policy is a pure value made from a spec; the longest common hit of several is exact (SCH-26).
Does not know: the pool, requests, or which block has which hash (it is given a way to ask).
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from octavo.base.kvspec import FullAttentionSpec, KVSpec, SlidingWindowSpec
from octavo.kvcache.hashing import BlockHash
from octavo.plugins.registry import Registry

PLUGIN_GROUP: Final = "octavo.block_policies"  # entry points: a spec class's name, and what makes its policy
NULL_BLOCK = 0
NEVER = 1 << 62  # tokens: a count that no request reaches

Find = Callable[[BlockHash], int | None]


class BlockPolicy(Protocol):
    """How one group's block table grows and shrinks. Counts are tokens, indices are the group's blocks."""

    block_size: int

    def blocks_for(self, num_tokens: int) -> int:
        """Length of a block table that covers `num_tokens`."""

    def most_blocks(self, num_tokens: int, max_batched_tokens: int) -> int:
        """Most blocks that one request of `num_tokens` holds at one moment."""

    def expired(self, num_computed_tokens: int) -> range:
        """Blocks that no later query needs. The start is constant and the stop never falls as the count grows."""

    def expires_at(self, stop: int) -> int:
        """Smallest count at which `expired` ends after `stop`; `NEVER` if there is none."""

    def longest_hit(self, hashes: Sequence[BlockHash], find: Find) -> tuple[int, ...]:
        """The longest table start that can go on after these blocks, null blocks where they have expired.

        `hashes` are this group's blocks in order; the answer is at most as long.
        """


class FullAttention:
    """Every block is kept, and a hit needs all of them.

    Owns: nothing that changes.
    """

    def __init__(self, spec: KVSpec) -> None:
        self._spec = spec
        self.block_size = spec.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Whole blocks, the last one partly filled."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, max_batched_tokens: int) -> int:
        """The spec's own figure."""
        return self._spec.max_blocks(num_tokens, max_batched_tokens)

    def expired(self, num_computed_tokens: int) -> range:
        """None."""
        return range(0)

    def expires_at(self, stop: int) -> int:
        """Never."""
        return NEVER

    def longest_hit(self, hashes: Sequence[BlockHash], find: Find) -> tuple[int, ...]:
        """From the start up to the first block that is missing."""
        blocks: list[int] = []
        for h in hashes:
            block = find(h)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)


class SlidingWindow:
    """Blocks behind the window go, and a hit needs only what the next query sees.

    A query at position p sees keys p - window + 1 .. p, so after n computed tokens the positions below
    n - window + 1 are never read again.

    Owns: nothing that changes.
    """

    def __init__(self, spec: KVSpec) -> None:
        if not isinstance(spec, SlidingWindowSpec):
            raise ValueError(f"the sliding-window policy needs a SlidingWindowSpec, not {type(spec).__name__}")
        if spec.window < 1:
            raise ValueError(f"a sliding window of {spec.window} tokens is impossible; it must be at least 1")
        self._spec = spec
        self._window = spec.window
        self.block_size = spec.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Whole blocks, the last one partly filled; those behind the window stand as null blocks."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, max_batched_tokens: int) -> int:
        """The spec's own figure."""
        return self._spec.max_blocks(num_tokens, max_batched_tokens)

    def expired(self, num_computed_tokens: int) -> range:
        """All blocks that end before the next query's window begins."""
        return range(max(0, num_computed_tokens - self._window + 1) // self.block_size)

    def expires_at(self, stop: int) -> int:
        """When the window's start passes the end of block `stop`."""
        return (stop + 1) * self.block_size + self._window - 1

    def longest_hit(self, hashes: Sequence[BlockHash], find: Find) -> tuple[int, ...]:
        """Walk back from the end until an unbroken run of found blocks fills the window before its own end."""
        run: list[int] = []  # found blocks, last first
        end = len(hashes)
        first = self.expired(end * self.block_size).stop
        index = end
        while index > first:
            index -= 1
            block = find(hashes[index])
            if block is None:
                run.clear()
                end = index
                first = self.expired(end * self.block_size).stop
            else:
                run.append(block)
        return (NULL_BLOCK,) * (end - len(run)) + tuple(reversed(run))


PolicyFactory = Callable[[KVSpec], BlockPolicy]


class PolicyRegistry:
    """Spec class to policy, looked up along the spec class's own ancestors (REQ-16).

    `named` are those of installed packages, by the name of the spec's class; they win over what is registered for the
    same class, and one is imported when a model has such a spec.

    Owns: the registered factories.
    """

    def __init__(self, named: Registry[PolicyFactory] | None = None) -> None:
        self._factories: dict[type[KVSpec], PolicyFactory] = {}
        self._named: Registry[PolicyFactory] = Registry("block policy") if named is None else named

    def register(self, spec_class: type[KVSpec], factory: PolicyFactory) -> None:
        """Serve `spec_class` and what derives from it; replaces an earlier registration of the same class."""
        self._factories[spec_class] = factory

    def policy(self, spec: KVSpec) -> BlockPolicy:
        """The policy for `spec`; raises `ValueError` when neither its class nor an ancestor is registered.

        Raises `ConfigError` for a package's policy that cannot be imported.
        """
        for ancestor in type(spec).__mro__:
            name = ancestor.__name__
            factory = self._named.load(name) if name in self._named else self._factories.get(ancestor)
            if factory is not None:
                return factory(spec)
        known = ", ".join(sorted({*(c.__name__ for c in self._factories), *self._named.names()})) or "none"
        raise ValueError(
            f"no block policy is registered for {type(spec).__name__}; register one for it (entry points of "
            f"{PLUGIN_GROUP}, by the name of the class) or derive it from: {known}"
        )

    def check(self, specs: Sequence[KVSpec]) -> None:
        """Raise `ValueError` unless every layer's spec has a policy; to be called at start-up."""
        for spec in specs:
            self.policy(spec)


def block_policies(plugins: tuple[str, ...] | None = ()) -> PolicyRegistry:
    """A new registry with what Octavo brings, and what installed packages do; `plugins` are those in use, None: all."""
    named: Registry[PolicyFactory] = Registry("block policy")
    named.discover(PLUGIN_GROUP, plugins)
    registry = PolicyRegistry(named)
    registry.register(FullAttentionSpec, FullAttention)
    registry.register(SlidingWindowSpec, SlidingWindow)
    return registry


def longest_common_hit(
    policies: Sequence[BlockPolicy], strides: Sequence[int], hashes: Sequence[BlockHash], find: Callable[[BlockHash, int], int | None], limit: int
) -> tuple[int, tuple[tuple[int, ...], ...]]:  # fmt: skip
    """The longest prefix of at most `limit` tokens that every group can go on from (SCH-26): tokens, tables.

    `strides[g]` is how many hash-chain blocks make one block of group g, whose hash is that of the last
    of them (REU-4). Each group in turn lowers the bound to its own longest hit until all agree: since
    the longest hit never rises when the bound falls, that fixed point is the longest common one.
    """
    blocks: list[tuple[int, ...]] = [()] * len(policies)
    agreed = 0
    turn = 0
    while agreed < len(policies):
        policy, stride = policies[turn], strides[turn]
        count = limit // policy.block_size
        group = turn

        def find_here(h: BlockHash, group: int = group) -> int | None:
            return find(h, group)

        blocks[turn] = policy.longest_hit(hashes[stride - 1 : count * stride : stride], find_here)
        length = len(blocks[turn]) * policy.block_size
        agreed = agreed + 1 if length == limit else 1
        limit = length
        turn = (turn + 1) % len(policies)
    return limit, tuple(blocks)
