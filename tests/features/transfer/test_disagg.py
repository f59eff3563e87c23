"""The control halves of a hand-over: rules one by one, and both sides with a fence between them at random (PDX-2, PDX-4,
PDX-5, PDX-8, PDX-9, SCH-33)."""

import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from octavo.base.errors import ClientError, ConfigError
from octavo.base.params import SamplingParams
from octavo.base.requests import AdapterRef, EngineRequest
from octavo.base.step import StepTimings
from octavo.base.types import FinishReason
from octavo.features.transfer.control.consumer import Consumer, OnFailure
from octavo.features.transfer.control.disagg import DisaggControl, producer_address
from octavo.features.transfer.control.producer import Producer
from octavo.features.transfer.data.guard import LeaseGuard
from octavo.features.transfer.disagg import (
    DisaggPlan,
    DisaggReport,
    LeaseEvent,
    LeaseNews,
    PullJob,
    TransferHint,
    good_tokens,
    prompt_digest,
    read_hint,
)
from octavo.features.transfer.plan import JobReport
from octavo.features.transfer.wishes import check_params
from octavo.scheduler.seams import Match

LEASE_S = 30.0


def source(name="r", tokens=range(100), data=None, **more):
    parts = () if data is None else (TransferHint(data),)
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(tokens), sampling=SamplingParams(max_tokens=4), parts=parts, **more
    )


def request(name="r", tokens=range(100), data=None, reason=None, computed=0, **more):
    """What the scheduler's record of a request shows to a part."""
    req = source(name, tokens, data, **more)
    return SimpleNamespace(
        request_id=name,
        source=req,
        num_prompt_tokens=len(req.prompt_token_ids),
        num_tokens=len(req.prompt_token_ids),
        num_computed_tokens=computed,
        finish_reason=reason,
    )


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make_producer(clock=None, blocks=((1, 2, 3, 4, 5, 6, 7),)):
    names = iter(f"lease-{i}" for i in range(10**6))
    return Producer(
        address="tcp://10.0.0.1:7100",
        lease_s=LEASE_S,
        blocks_of=lambda _: blocks,
        clock=clock or Clock(),
        new_id=lambda: next(names),
    )


def make_consumer(on_failure=OnFailure.RECOMPUTE, tables=None, **more):
    """Blocks are 1 to 7 for everybody, or as in `tables`."""
    blocks_of = (lambda _: (tuple(range(1, 8)),)) if tables is None else tables.__getitem__
    return Consumer([16], on_failure, blocks_of=blocks_of, **more)


def offered(producer, name="r", tokens=range(100), **more):
    """The hint of a prompt that was asked to be kept."""
    held = producer.offer(request(name, tokens, {"do_remote_decode": True}, FinishReason.LENGTH, **more))
    assert held.holds_blocks
    return held.parts[0].data


# ---- the producer -----------------------------------------------------------------------------


def test_a_prompt_that_was_asked_to_be_kept_is_held_until_nothing_reads_it():
    producer = make_producer()
    hint = read_hint(offered(producer))
    assert (hint.address, hint.num_tokens, hint.lease_s) == ("tcp://10.0.0.1:7100", 100, LEASE_S)
    grants, revokes = producer.take()
    assert [g.lease for g in grants] == [hint.lease] and not revokes and grants[0].blocks == ((1, 2, 3, 4, 5, 6, 7),)
    assert producer.hear(LeaseEvent(hint.lease, LeaseNews.DONE)) is None  # the fence has not closed
    assert producer.take() == ((), (hint.lease,)) and producer.take() == ((), ())
    assert producer.hear(LeaseEvent(hint.lease, LeaseNews.CLOSED)) == "r"
    assert len(producer) == 0 and producer.stats()["leases_done"] == 1
    assert producer.hear(LeaseEvent(hint.lease, LeaseNews.CLOSED)) is None


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.IGNORED])
def test_a_prompt_that_did_not_end_well_is_not_kept(reason):
    producer = make_producer()
    assert not producer.offer(request(data={"do_remote_decode": True}, reason=reason)).holds_blocks
    assert not producer.offer(request(reason=FinishReason.STOP)).holds_blocks  # nobody asked
    assert not producer.offer(request(data={"do_remote_decode": False}, reason=FinishReason.STOP)).holds_blocks


def test_silence_ends_a_lease_and_heartbeats_do_not():
    clock = Clock()
    producer = make_producer(clock)
    quiet, loud = read_hint(offered(producer, "a")), read_hint(offered(producer, "b"))
    producer.take()
    for _ in range(4):
        clock.now += 10
        producer.hear(LeaseEvent(loud.lease, LeaseNews.HEARTBEAT))
    assert producer.take() == ((), (quiet.lease,))
    assert producer.hear(LeaseEvent(quiet.lease, LeaseNews.CLOSED)) == "a"
    assert producer.stats()["leases_expired"] == 1 and producer.stats()["leases"] == 1


# ---- hints ------------------------------------------------------------------------------------


def test_a_hint_says_what_is_wrong_with_it():
    good = offered(make_producer())
    assert read_hint({}) is None and read_hint({"do_remote_prefill": False}) is None
    for change in ({"address": 5}, {"lease": 5}, {"address": "x"}, {"lease_s": -1}, {"lease": "x" * 600}):
        with pytest.raises(ClientError, match="kv_transfer_params must be passed on as the prefill instance gave it"):
            read_hint({**good, **change})
    with pytest.raises(ClientError, match="missing required field `address`"):
        read_hint({k: v for k, v in good.items() if k != "address"})


@pytest.mark.parametrize(
    ("params", "role", "answers", "error"),
    [
        ({"do_remote_decode": True}, None, 1, "started without --kv-role; it takes producer or both"),
        ({"do_remote_decode": True}, "consumer", 1, "started with --kv-role consumer; it takes producer or both"),
        ({"do_remote_prefill": True}, "producer", 1, "started with --kv-role producer; it takes consumer or both"),
        ({"do_remote_decode": True}, "both", 2, "is for one prompt with one answer"),
        ({"do_remote_prefill": True}, "both", 1, "must be passed on as the prefill instance gave it"),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_anything_runs(params, role, answers, error):
    with pytest.raises(ClientError, match=error) as caught:
        check_params(params, role=role, num_answers=answers)
    assert caught.value.param.startswith("kv_transfer_params")
    check_params({"do_remote_decode": True}, role="producer")
    check_params({}, role=None, num_answers=5)


def test_prompts_whose_kv_differs_have_other_digests():
    plain = prompt_digest(source())
    adapter = AdapterRef("a", "/a", "1")
    others = [source(tokens=range(101)), source(cache_salt="s"), source(adapter=adapter), source(tokens=range(1, 101))]
    digests = [prompt_digest(each) for each in others]
    assert len({plain, *digests}) == 5 and prompt_digest(source("another")) == plain


@pytest.mark.parametrize(
    ("listen", "advertise", "said"),
    [
        (None, None, "give --kv-listen host:port"),
        ("0.0.0.0:7100", None, "say with --kv-advertise"),
        ("127.0.0.1:0", None, "give one above 0"),
        ("nowhere", None, "give host and port"),
    ],
)
def test_a_producer_that_nobody_could_reach_does_not_start(listen, advertise, said):
    with pytest.raises(ConfigError, match=said):
        producer_address("producer", "tcp", listen, advertise)
    assert producer_address("both", "tcp", "0.0.0.0:7100", "node-3") == "tcp://node-3:7100"
    assert producer_address("both", "tcp", "0.0.0.0:7100", "node-3:9") == "tcp://node-3:9"
    assert producer_address("both", "file:///shared", None, None) == "file:///shared"


def test_only_tokens_before_the_first_bad_block_of_any_group_count():
    pull = PullJob(job=1, lease="x", places=((1, 2, 3), (0, 1)), blocks=((5, 6, 7), (8, 9)))
    assert good_tokens(pull, (True,) * 5, (16, 32), 60) == 60
    assert good_tokens(pull, (True, False, True, True, True), (16, 32), 60) == 32
    assert good_tokens(pull, (True, True, False, True, False), (16, 32), 60) == 32
    assert good_tokens(pull, (True, True, True, False, True), (16, 32), 60) == 0
    assert good_tokens(pull, (True,) * 4, (16, 32), 60) == 0  # a report that does not fit


# ---- the consumer -----------------------------------------------------------------------------


def waiting(consumer, name="d", tokens=range(100), local=0, **changes):
    """A request with a hint, parked for its fetch; and the fetch."""
    req = request(name, tokens, {**offered(make_producer(), tokens=tokens), **changes}, computed=local)
    consumer.arrive(req)
    match = consumer.match(req, local)
    assert match == Match(tokens=len(tokens) - 1, wait=True, source="remote")
    consumer.reserved(req, match.tokens)
    watches, drops, (pull,) = consumer.take()
    assert [w.lease for w in watches] == [pull.lease] and not drops
    return req, pull


def test_everything_beyond_what_is_here_is_fetched_and_the_lease_returned():
    consumer = make_consumer()
    req, pull = waiting(consumer, local=32)
    assert pull.places == ((2, 3, 4, 5, 6),) and pull.blocks == ((3, 4, 5, 6, 7),)
    ready, freed = consumer.report(JobReport(job=pull.job, good=(True,) * 5))
    assert ready.num_tokens == 99 and freed is None
    assert [(d.lease, d.done) for d in consumer.take()[1]] == [(pull.lease, True)]
    assert consumer.match(req, 0) == Match()  # preempted later: computed again
    assert not consumer.finish(req).holds_blocks and len(consumer) == 0
    assert consumer.report(JobReport(job=pull.job, good=(True,) * 5)) == (None, None)  # said twice


def test_what_did_not_come_is_computed_here():
    consumer = make_consumer()
    _, pull = waiting(consumer)
    ready, _ = consumer.report(JobReport(job=pull.job, good=(True, True, False, True, True, True, True)))
    assert ready.num_tokens == 32 and ready.error is None and consumer.counts["partly_fetched"] == 1
    assert consumer.take()[1][0].done is False


def test_what_was_here_is_not_counted_as_fetched():
    consumer = make_consumer()
    _, nothing = waiting(consumer, "a", local=32)
    consumer.report(JobReport(job=nothing.job, good=(False,) * 5))
    consumer.take()
    _, all_of_it = waiting(consumer, "b", local=32)
    consumer.report(JobReport(job=all_of_it.job, good=(True,) * 5))
    assert (consumer.counts["failed"], consumer.counts["partly_fetched"], consumer.counts["fetched"]) == (1, 0, 1)
    assert consumer.num_tokens == 99 - 32


def test_or_ends_the_request_where_that_was_asked_for():
    consumer = make_consumer(OnFailure.FAIL)
    _, pull = waiting(consumer)
    ready, _ = consumer.report(JobReport(job=pull.job, good=(False,) * 7, error="connection refused"))
    assert ready.error == (
        "the KV of this prompt could not be fetched from tcp://10.0.0.1:7100: connection refused; send it again"
    )


def test_also_when_the_lease_is_over_before_the_request_has_its_turn():
    for policy, errors in ((OnFailure.RECOMPUTE, []), (OnFailure.FAIL, ["d"])):
        consumer = make_consumer(policy)
        data = offered(make_producer())
        req = request("d", data=data)
        consumer.arrive(req)
        part = DisaggControl(Clock(), None, consumer)
        report = DisaggReport(events=(LeaseEvent(data["lease"], LeaseNews.LOST),))
        ready = part.absorb(SimpleNamespace(part=lambda _, report=report: report, timings=StepTimings())).ready
        assert [each.request_id for each in ready] == errors and consumer.match(req, 0) == Match()
        assert all(each.error.endswith("10.0.0.1:7100: its lease there is over; send it again") for each in ready)


def test_a_request_that_ends_while_its_blocks_are_filled_keeps_them_until_that_has_ended():
    consumer = make_consumer()
    req, pull = waiting(consumer)
    assert consumer.finish(req).holds_blocks
    assert consumer.report(JobReport(job=pull.job, good=(True,) * 7)) == (None, "d")


def test_a_lease_that_is_not_needed_is_returned():
    consumer = make_consumer()
    data = offered(make_producer())
    found_here = request("a", data=data, computed=99)
    consumer.arrive(found_here)
    assert consumer.match(found_here, 99) == Match()
    consumer.reserved(found_here, 0)
    left_early = request("b", data=data)
    consumer.arrive(left_early)
    consumer.finish(left_early)
    another_prompt = request("c", range(5, 105), data)
    consumer.arrive(another_prompt)
    assert consumer.match(another_prompt, 0) == Match() and consumer.counts["not_ours"] == 1
    gone = request("d", data=data)
    consumer.arrive(gone)
    consumer.lost(data["lease"])
    assert consumer.match(gone, 0) == Match() and consumer.counts["lost"] == 1
    assert [d.done for d in consumer.take()[1]] == [True, False, False, False]


def test_a_lease_cannot_be_put_beside_another_prompt():
    producer = make_producer()
    mine, other = offered(producer, "a"), offered(producer, "b", range(5, 105))
    consumer = make_consumer()
    forged = request(data={**mine, "lease": other["lease"]})  # an honest hint, but for the name of the lease
    consumer.arrive(forged)
    assert consumer.match(forged, 0) == Match() and consumer.counts["not_ours"] == 1


@pytest.mark.parametrize(
    "address",
    [
        "tcp://:7100",
        "tcp://[]:7100",
        "tcp://10.0.0.1:",
        "tcp://10.0.0.1:0",
        "tcp://10.0.0.1:\u00b2",
        "tcp://",
        "udp://10.0.0.1:7",
    ],
)
def test_an_address_that_is_none_reaches_no_transport(address):
    consumer = make_consumer()
    req = request(data={**offered(make_producer()), "address": address})
    consumer.arrive(req)
    assert consumer.take() == ((), (), ()) and consumer.match(req, 0) == Match()
    assert consumer.counts["not_allowed"] == 1


def test_only_hosts_that_were_named_are_fetched_from():
    consumer = make_consumer(allow=("10.0.0.1", "::1"))
    hosts = {"10.0.0.1": True, "[::1]": True, "10.0.0.2": False, "10.0.0.1.evil": False}
    for host, allowed in hosts.items():
        consumer.arrive(request(host, data={**offered(make_producer()), "address": f"tcp://{host}:7100"}))
        assert bool(consumer.take()[0]) is allowed


def test_an_idle_engine_keeps_ticking_while_leases_or_fetches_are_under_way():
    clock = Clock()
    part = DisaggControl(clock, make_producer(clock), make_consumer())
    idle = SimpleNamespace(rows=[], seq=1)
    assert part.next_deadline() is None and part.settled() and part.plan(idle) is None
    part.on_finish(request(data={"do_remote_decode": True}, reason=FinishReason.STOP))
    assert not part.settled() and part.next_deadline() is not None
    plan = part.plan(idle)
    assert isinstance(plan, DisaggPlan) and len(plan.grants) == 1
    assert part.plan(idle) is None  # not due yet
    clock.now = part.next_deadline()
    assert part.plan(idle) == DisaggPlan()  # for the reports
    (lease,) = (grant.lease for grant in plan.grants)
    report = DisaggReport(events=(LeaseEvent(lease, LeaseNews.ABORTED),))
    result = SimpleNamespace(part=lambda kind: report if kind is DisaggReport else None, timings=StepTimings())
    assert part.absorb(result).release == ()
    assert part.plan(idle).revokes == (lease,)
    report = DisaggReport(events=(LeaseEvent(lease, LeaseNews.CLOSED),))
    assert part.absorb(result).release == ("r",) and part.settled()


def test_requests_that_wait_for_room_which_their_own_leases_hold_go_on():
    clock = Clock()
    part = DisaggControl(clock, make_producer(clock), make_consumer())
    idle, busy = SimpleNamespace(rows=[], seq=1), SimpleNamespace(rows=["x"], seq=2)
    leases = []
    for name in "ab":
        held = part.on_finish(request(name, data={"do_remote_decode": True}, reason=FinishReason.STOP))
        leases.append(held.parts[0].data["lease"])
        part.on_arrival(request(f"waits for {name}", data=held.parts[0].data))

    def revoked(seconds, builder=idle):
        out, end = [], clock.now + seconds
        while clock.now < end:
            clock.now += 0.05
            for lease in leases:  # they wait, and so they keep them alive
                part.producer.hear(LeaseEvent(lease, LeaseNews.HEARTBEAT))
            plan = part.plan(builder)
            out += [] if plan is None else plan.revokes
        return out

    assert not revoked(60, busy) and not revoked(2)
    assert not revoked(1, busy) and not revoked(2)
    assert revoked(1.2) == leases[:1]
    assert revoked(1) == leases[1:]


# ---- both, at random --------------------------------------------------------------------------


@dataclass
class Fetch:
    """A fetch under way on the consumer's data side."""

    pull: PullJob
    stack: ExitStack = field(default_factory=ExitStack)
    tables: tuple | None = None
    at: int = 0
    good: list = field(default_factory=list)


class World:
    """A producer with its fence, and a consumer that may die, stall, repeat itself and come late.

    Owns: who holds each block of the producer, what is in it, and what everybody has been told and not yet heard.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.clock = Clock()
        self.free = list(range(1, 41))
        self.content = {}  # block -> (request, place)
        self.held = {}  # request -> blocks
        self.names = 0
        ids = iter(range(10**9))
        self.producer = Producer(
            address="tcp://p:1",
            lease_s=LEASE_S,
            blocks_of=lambda request_id: (self.held[request_id],),
            clock=self.clock,
            new_id=lambda: f"lease-{next(ids)}",
        )
        self.guard = LeaseGuard(patience_s=0.0)
        self.plans = []  # producer's control -> its fence
        self.owner = {}  # lease -> request
        self.hints = []
        self.reborn()

    def reborn(self):
        """A consumer that knows nothing of what was before."""
        for fetch in getattr(self, "fetches", []):
            fetch.stack.close()
        self.tables = {}
        self.consumer = make_consumer(tables=self.tables)
        self.watched, self.fetches, self.reports, self.alive, self.notices = set(), [], [], {}, []

    def step(self):
        actions = (
            self.prefill, self.prefill, self.decode, self.decode, self.decode, self.producer_plans, self.producer_plans,
            self.fence, self.fence, self.consumer_plans, self.consumer_plans, self.copy, self.copy, self.copy,
            self.copy, self.report, self.report, self.heartbeat, self.notice, self.notice, self.time, self.abort, self.crash,
        )  # fmt: skip
        self.random.choice(actions)()

    def prefill(self):
        count = self.random.randint(1, 8)
        if len(self.free) < count:
            return
        self.names += 1
        name = f"p{self.names}"
        blocks = tuple(self.free.pop() for _ in range(count))
        self.held[name] = blocks
        for place, block in enumerate(blocks):
            self.content[block] = (name, place)
        data = offered(self.producer, name, range(count * 16))
        self.owner[data["lease"]] = name
        if self.random.random() < 0.8:  # else the router lost it
            self.hints += [data] * self.random.choice((1, 1, 1, 2))

    def decode(self):
        if not self.hints:
            return
        data = self.hints.pop(self.random.randrange(len(self.hints)))
        self.names += 1
        req = request(f"d{self.names}", range(data["num_tokens"]), data)
        self.consumer.arrive(req)
        self.alive[req.request_id] = req
        if self.random.random() < 0.7:
            self.admit(req)

    def admit(self, req):
        match = self.consumer.match(req, 0)
        self.tables[req.request_id] = (tuple(100 + place for place in range(-(-req.num_tokens // 16))),)
        self.consumer.reserved(req, match.tokens)

    def abort(self):
        if self.alive:
            req = self.alive.pop(self.random.choice(sorted(self.alive)))
            self.consumer.finish(req)

    def consumer_plans(self):
        for req in list(self.alive.values()):
            if self.random.random() < 0.3 and req.request_id not in self.tables:
                self.admit(req)
        watches, drops, pulls = self.consumer.take()
        self.watched |= {w.lease for w in watches}
        self.fetches += [Fetch(pull) for pull in pulls]
        for drop in drops:
            self.watched.discard(drop.lease)
            news = LeaseNews.DONE if drop.done else LeaseNews.ABORTED
            self.notices += [(drop.lease, news)] * self.random.choice((0, 1, 1, 1, 2))

    def copy(self):
        """A piece of a fetch: the fence is asked for each block, as the real one is, or once for all (one-sided)."""
        if not self.fetches:
            return
        fetch = self.random.choice(self.fetches)
        if fetch.at == len(fetch.pull.places[0]) or self.random.random() < 0.05:
            fetch.stack.close()
            self.fetches.remove(fetch)
            good = (*fetch.good, *[False] * (len(fetch.pull.places[0]) - len(fetch.good)))
            self.reports += [JobReport(job=fetch.pull.job, good=good)] * self.random.choice((1, 1, 2))
            return
        if self.random.random() < 0.5:
            fetch.stack.close()
            fetch.tables = fetch.stack.enter_context(self.guard.reading(fetch.pull.lease))
        elif fetch.tables is None:
            fetch.tables = fetch.stack.enter_context(self.guard.reading(fetch.pull.lease))
        place = fetch.pull.places[0][fetch.at]
        fetch.at += 1
        if fetch.tables is None:
            fetch.good.append(False)
            return
        block = fetch.tables[0][place]
        assert self.content[block] == (self.owner[fetch.pull.lease], place), "a block was read that is somebody else's"
        fetch.good.append(True)

    def report(self):
        if self.reports:
            job = self.reports.pop(self.random.randrange(len(self.reports)))
            ready, _ = self.consumer.report(job)
            if ready is not None:
                assert ready.error is None
                req = self.alive.pop(ready.request_id)
                self.consumer.finish(req)

    def heartbeat(self):
        for lease in self.watched:
            if self.random.random() < 0.7:
                self.notices.append((lease, LeaseNews.HEARTBEAT))

    def notice(self):
        """One notice arrives, in any order; it may come again."""
        if self.notices:
            place = self.random.randrange(len(self.notices))
            lease, news = self.notices[place]
            if self.random.random() < 0.9:
                self.notices.pop(place)
            if self.guard.tell((lease,), news) != (True,) and news is LeaseNews.HEARTBEAT:
                self.consumer.lost(lease)

    def producer_plans(self):
        grants, revokes = self.producer.take()
        self.plans.append((grants, revokes))

    def fence(self):
        if self.plans:
            grants, revokes = self.plans.pop(0)
            for grant in grants:
                self.guard.open(grant.lease, grant.blocks)
            for lease in revokes:
                self.guard.close(lease)
        for event in self.guard.news():
            freed = self.producer.hear(event)
            if freed is not None:
                blocks = self.held.pop(freed)
                assert not set(blocks) & set(self.free), "a block was freed twice"
                self.free += blocks
                for block in blocks:
                    self.content[block] = ("nobody", 0)

    def time(self):
        self.clock.now += self.random.choice((0.1, 1, 5, 20))

    def crash(self):
        if self.random.random() < 0.1:
            self.reborn()

    def end(self):
        """Everybody leaves: whatever happened before, all blocks come back and every request has ended."""
        for _ in range(200):
            self.copy()
            self.report()
            self.consumer_plans()
        assert not self.fetches and not self.reports
        for req in list(self.alive.values()):
            self.consumer.finish(req)
        self.consumer_plans()
        assert len(self.consumer) == 0 and not self.consumer.under_way
        self.reborn()
        self.clock.now += 2 * LEASE_S
        for _ in range(len(self.plans) + 3):
            self.producer_plans()
            self.fence()
        assert sorted(self.free) == list(range(1, 41)) and len(self.producer) == 0 and not self.held


def play(seed, steps):
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.end()
    return world


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_no_block_is_read_that_is_somebody_else_s_and_all_come_back(seed):
    play(seed, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_the_same_for_a_hundred_thousand_steps(seed):
    world = play(seed, 5000)
    assert world.producer.num_granted > 50


@pytest.mark.parametrize(
    ("transport", "allow", "address", "may"),
    [
        ("tcp", (), "tcp://10.0.0.1:7100", True),
        ("tcp", ("10.0.0.1",), "tcp://10.0.0.1:7100", True),
        ("tcp", ("10.0.0.2",), "tcp://10.0.0.1:7100", False),
        ("tcp", (), "file:///etc", False),
        ("tcp", (), "tcp://10.0.0.1", False),
        ("tcp", (), "tcp://10.0.0.1:99999", False),
        ("file:///shared", (), "file:///shared", True),
        ("file:///shared", (), "file:///etc", False),
        ("file:///shared", (), "tcp://10.0.0.1:7100", False),
    ],
)
def test_a_hint_cannot_lead_a_consumer_anywhere(transport, allow, address, may):
    consumer = make_consumer(transport=transport, allow=allow)
    req = request(data={**offered(make_producer()), "address": address})
    consumer.arrive(req)
    assert (consumer.match(req, 0).tokens > 0) is may and consumer.counts["not_allowed"] == (not may)
    assert bool(consumer.take()[0]) is may
