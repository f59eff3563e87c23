"""Scheduler, applier and KV manager with a fake worker and a fake clock, and everything that must hold (SCH-40)."""

import random
from collections import deque
from dataclasses import dataclass, field

from octavo.base.kvspec import FullAttentionSpec, KVGroup, KVLayout, KVSpec, LayerPlace, SlidingWindowSpec
from octavo.base.outputs import EngineOutputs, RequestDelta
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest, RequestPart
from octavo.base.step import StepPlan
from octavo.base.types import FinishReason
from octavo.kvcache.hashing import make_hasher
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.apply import ResultApplier
from octavo.scheduler.limits import SchedulerLimits, SharedPrompt
from octavo.scheduler.order import make_order
from octavo.scheduler.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.seams import Constraint, ControlPart
from octavo.scheduler.shared_prefix import SharedPrefix
from tests.simulate.parts import DataHalf, ScriptedPart
from tests.simulate.toy import EOS, VOCAB, Broken, ToyWorker, run_alone


class Clock:
    """Time that passes when it is told to.

    Owns: the time.
    """

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def make_layout(specs: tuple[KVSpec, ...], num_blocks: int) -> KVLayout:
    """One layer a group."""
    groups = tuple(KVGroup(index=i, spec=spec, layers=(i,)) for i, spec in enumerate(specs))
    places = tuple(LayerPlace(layer=i, group=i, offset=0, block_stride=64) for i in range(len(specs)))
    return KVLayout(groups=groups, places=places, num_blocks=num_blocks, block_bytes=64, total_bytes=64 * num_blocks)


def full(block_size: int = 4) -> KVSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype="float32")


def window(size: int, block_size: int = 4) -> KVSpec:
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype="float32", window=size)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One world's knobs."""

    specs: tuple[KVSpec, ...] = (full(),)
    num_blocks: int = 40  # the null block included
    max_num_seqs: int = 6
    max_num_active_seqs: int = 6
    max_tokens: int = 24  # to schedule in a step
    spare: int = 0  # more tokens in the batch, for drafts
    max_model_len: int = 60
    threshold: int = 0
    policy: str = "fcfs"
    aging_s: float = 0.0
    depth: int = 1
    prefix_caching: bool = True
    watermark: int = 1
    shared_prefix: int = 12  # tokens; a beginning at least this long is computed once
    scripted: bool = False
    draft_len: int = 0
    seed: int = 0


@dataclass
class Told:
    """What a client has heard of one request."""

    request: EngineRequest
    added_at: int  # step
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    last: RequestDelta | None = None
    first: RequestDelta | None = None


class World:
    """Drives the scheduler as the engine does, at any depth, and checks each step."""

    def __init__(
        self, setup: Setup, *, parts: tuple[ControlPart, ...] = (), constraints: tuple[Constraint, ...] = ()
    ) -> None:
        self.setup = setup
        self.rng = random.Random(setup.seed)
        self.clock = Clock()
        layout = make_layout(setup.specs, setup.num_blocks)
        hash_block = min(spec.block_size for spec in setup.specs)
        self.limits = SchedulerLimits(
            max_num_seqs=setup.max_num_seqs,
            max_num_active_seqs=setup.max_num_active_seqs,
            max_num_scheduled_tokens=setup.max_tokens,
            max_num_batched_tokens=setup.max_tokens + setup.spare,
            max_model_len=setup.max_model_len,
            long_prefill_token_threshold=setup.threshold,
            enable_prefix_caching=setup.prefix_caching,
        )
        self.kv = KVCacheManager(
            layout,
            hasher_block_size=hash_block,
            enable_prefix_caching=setup.prefix_caching,
            watermark_blocks=setup.watermark,
            max_model_len=setup.max_model_len,
            max_batched_tokens=setup.max_tokens + setup.spare,
        )
        self.worker = ToyWorker(layout, num_slots=setup.max_num_seqs, draft_len=setup.draft_len)
        self.data = DataHalf(self.worker.memory)
        self.part = ScriptedPart(self.rng, self.kv, self.worker.memory) if setup.scripted else None
        self.scheduler = Scheduler(
            limits=self.limits,
            kv=self.kv,
            order=make_order(setup.policy, aging_s=setup.aging_s, clock=self.clock),
            parts=(*parts, self.part) if self.part is not None else parts,
            constraints=(SharedPrompt(), SharedPrefix(hash_block, setup.shared_prefix), *constraints)
            if setup.prefix_caching
            else constraints,
            hasher=make_hasher("sha256"),
            hash_block_size=hash_block,
            num_groups=len(setup.specs),
            clock=self.clock,
            debug=True,
        )
        self.applier = ResultApplier(self.scheduler)
        self.flight: deque[tuple[StepPlan, frozenset[str]]] = deque()
        self.told: dict[str, Told] = {}
        self.aborted: set[str] = set()
        self.may_fail: set[str] = set()
        self.steps = 0
        self.idle = 0
        self.preempted: set[str] = set()
        self.plans: list[StepPlan] = []

    # ---- what happens -----------------------------------------------------------------------

    def add(self, prompt: tuple[int, ...], *, parent_id: str | None = None, sample_index: int = 0, priority: int = 0, eos: bool = True, parts: tuple[RequestPart, ...] = (), **params: object) -> str:  # fmt: skip
        """A request arrives; its id."""
        request_id = f"r{len(self.told)}"
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(**{"max_tokens": 8, "ignore_eos": not eos, **params}),  # type: ignore[arg-type]
            eos_token_ids=(EOS,),
            parent_id=parent_id,
            sample_index=sample_index,
            priority=priority,
            arrival_s=self.clock(),
            parts=parts,
        )
        self.told[request_id] = Told(request, self.steps)
        self.scheduler.add(request)
        return request_id

    def abort(self, request_id: str) -> None:
        """Its client goes away."""
        self.aborted.add(request_id)
        self.scheduler.abort([request_id, "unknown"])

    def request(self, request_id: str) -> Request:
        """The scheduler's record of a living request."""
        return self.scheduler.ledger.requests[request_id]

    @property
    def alive(self) -> list[str]:
        """Requests that have not been told to have ended."""
        return [i for i, told in self.told.items() if told.last is None]

    def step(self) -> EngineOutputs | None:
        """One turn of the engine's loop."""
        self.steps += 1
        self.clock.now += 0.01
        while len(self.flight) < self.setup.depth:
            plan = self.scheduler.schedule()
            self.scheduler.ledger.check()
            if plan is None:
                break
            self._check_plan(plan)
            self.plans.append(plan)
            self.flight.append((plan, self.data.submit(plan)))
        if not self.flight:
            self.idle += 1
            outputs = self.applier.flush()
        else:
            plan, poisoned = self.flight.popleft()
            result = self.worker.run(plan, poisoned, self.data.report())
            outputs = self.applier.apply(plan, result)
        self.scheduler.ledger.check()
        if outputs is not None:
            self._hear(outputs)
        return outputs

    def drain(self, most: int = 3000) -> None:
        """Step until everybody has ended, and see that nothing is left behind."""
        start = self.steps
        while self.alive or self.flight or self.scheduler.ledger.held:
            self.step()
            if self.steps - start > most:
                raise Broken(f"still alive after {most} steps: {list(self.scheduler.ledger.requests.values())}")
        self.check_empty()

    # ---- what must hold ---------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        batch, limits = plan.batch, self.limits
        drafts = int(batch.num_draft_tokens.sum())
        if batch.num_tokens > limits.max_num_batched_tokens:
            raise Broken(f"{batch.num_tokens} tokens in the batch")
        if batch.num_tokens - drafts > limits.max_num_scheduled_tokens:
            raise Broken(f"{batch.num_tokens - drafts} tokens scheduled")
        if self.scheduler.num_running > limits.max_running or batch.num_rows > limits.max_num_seqs:
            raise Broken(f"{self.scheduler.num_running} run")
        if not batch.num_rows and not plan.parts:
            raise Broken("a plan with nothing in it")
        for array in (
            batch.slots,
            batch.num_computed_tokens,
            batch.num_scheduled_tokens,
            batch.num_sampled_tokens,
            batch.num_draft_tokens,
        ):
            if array.flags.writeable or len(array) != batch.num_rows:
                raise Broken("an array of the plan is writable or of another length")

    def _hear(self, outputs: EngineOutputs) -> None:
        for delta in outputs.deltas:
            told = self.told[delta.request_id]
            if told.last is not None:
                raise Broken(f"{delta.request_id} goes on after its end")
            told.tokens.extend(delta.new_token_ids)
            if delta.logprobs is not None:
                told.logprobs.extend(delta.logprobs.logprobs[:, 0].tolist())
                if len(delta.logprobs.ranks) != len(delta.new_token_ids):
                    raise Broken("not one line of logprobs for each token")
            for scores in delta.prompt_logprobs:
                told.scored.extend(range(scores.start, scores.start + len(scores.ranks)))
            if delta.new_token_ids and told.first is None:
                told.first = delta
                if delta.times is None or not delta.times.first_token_s:
                    raise Broken("the first token has no times")
            if delta.num_preemptions:
                self.preempted.add(delta.request_id)
            if delta.finish is not None:
                told.last = delta
                self._check_end(told, delta)

    def _check_end(self, told: Told, delta: RequestDelta) -> None:
        expected, reason = run_alone(told.request, self.setup.max_model_len)
        name = delta.request_id
        if told.tokens != expected[: len(told.tokens)]:
            raise Broken(f"{name} got {told.tokens}, alone it gets {expected}")
        if told.request.sampling.logprobs is not None and told.logprobs != [-float(t) for t in told.tokens]:
            raise Broken(f"{name}: logprobs do not go with the tokens")
        if delta.finish in (FinishReason.STOP, FinishReason.LENGTH):
            if told.tokens != expected or delta.finish.value != reason:
                raise Broken(f"{name} ended by {delta.finish} with {told.tokens}; alone: {reason}, {expected}")
            if told.request.sampling.prompt_logprobs is not None:
                wanted = list(range(1, len(told.request.prompt_token_ids)))
                if told.scored != wanted:
                    raise Broken(f"{name}: prompt positions {told.scored} were scored, not {wanted}")
        elif delta.finish is FinishReason.ABORT:
            if name not in self.aborted:
                raise Broken(f"{name} was aborted by nobody")
        elif name not in self.may_fail and "tier broke" not in (delta.error or ""):
            raise Broken(f"{name} failed: {delta.error}")
        if delta.times is None or delta.times.finished_s < delta.times.arrived_s:
            raise Broken(f"{name} ended without times")

    def check_empty(self) -> None:
        """Nobody is there: nothing is held."""
        ledger = self.scheduler.ledger
        if self.kv.num_free_blocks != self.kv.num_total_blocks:
            raise Broken(f"{self.kv.num_total_blocks - self.kv.num_free_blocks} blocks are leaked")
        if len(ledger.free_slots) != self.setup.max_num_seqs or ledger.requests or ledger.flights or ledger.in_prompt:
            raise Broken("slots, requests or flights are left")
        if self.part is not None and (self.part.alive or self.part.holds):
            raise Broken("the part still knows somebody")


# ---- random clients -------------------------------------------------------------------------

PREFIXES = tuple(tuple((7 * i + 3 * j) % VOCAB for j in range(30)) for i in range(3))


def random_request(world: World, rng: random.Random) -> None:
    """A client with one request, or with several samples of one prompt; many prompts share a beginning."""
    longest = world.setup.max_model_len
    prompt = rng.choice(PREFIXES)[: rng.randint(0, 24)] + tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))
    prompt = prompt[: longest - 2]
    params: dict[str, object] = {"max_tokens": rng.choice((1, 2, 5, 12, 30))}
    kind = rng.random()
    if kind < 0.15:
        params["logprobs"] = 0
    elif kind < 0.25:
        params["prompt_logprobs"] = 0
        params["max_tokens"] = rng.choice((0, 1, 6))
    elif kind < 0.35:
        params["stop_token_ids"] = (3, 11)
        params["min_tokens"] = min(3, int(str(params["max_tokens"])))
    eos, priority = rng.random() < 0.8, rng.randrange(3)
    if rng.random() < 0.15:
        parent = f"p{len(world.told)}"
        for i in range(3):
            world.add(prompt, parent_id=parent, sample_index=i, priority=priority, eos=eos, **params)
    else:
        world.add(prompt, priority=priority, eos=eos, **params)


def random_step(world: World, rng: random.Random, *, crowd: int = 10) -> None:
    """One step of a random life."""
    if len(world.alive) < crowd and rng.random() < 0.4:
        random_request(world, rng)
    if rng.random() < 0.03 and world.alive:
        world.abort(rng.choice(world.alive))
    if rng.random() < 0.01 and world.alive:
        name = rng.choice(world.alive)
        world.may_fail.add(name)
        world.worker.fail_next.add(name)
    if rng.random() < 0.01:
        world.scheduler.reset_prefix_cache()
    if rng.random() < 0.02:
        world.scheduler.pause()
    elif rng.random() < 0.2:
        world.scheduler.resume()
    world.step()
