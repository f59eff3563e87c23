"""The control halves of a hand-over layer by layer: what is saved when, and when a step reads what it computes with
(PDX-2, PDX-3, PDX-4)."""

from types import SimpleNamespace

import pytest

from octavo.base.errors import ClientError
from octavo.base.step import StepTimings
from octavo.base.types import FinishReason
from octavo.features.transfer.control.consumer import OnFailure
from octavo.features.transfer.control.disagg import DisaggControl
from octavo.features.transfer.control.producer import Producer
from octavo.features.transfer.disagg import DisaggReport, LeaseEvent, LeaseNews, read_hint
from octavo.features.transfer.plan import JobReport
from octavo.scheduler.seams import Match, Retry
from tests.features.transfer.test_disagg import LEASE_S, Clock, make_consumer, make_producer, offered, request

TABLE = (11, 12, 13, 14, 15, 16, 17)


def saving_producer(blocks=(TABLE,), sizes=(16,)):
    names = iter(f"lease{i}" for i in range(10**6))
    return Producer(
        address="file:///x", lease_s=LEASE_S, blocks_of=lambda _: blocks, clock=Clock(), new_id=lambda: next(names),
        block_sizes=sizes,
    )  # fmt: skip


def step(req, start, end):
    req.num_computed_tokens = end
    return SimpleNamespace(rows=[req], num_computed_tokens=[start], seq=1)


def asked(**more):
    return request(data={"do_remote_decode": True}, **more)


def test_each_step_saves_the_blocks_that_it_completes_and_the_last_one_the_rest():
    producer, req = saving_producer(), asked()
    producer.arrive(req)
    saves = [producer.saves(step(req, a, b)) for a, b in ((0, 40), (40, 47), (47, 100), (100, 101))]
    places = [[save.places for save in each] for each in saves]
    assert places == [[((0, 1),)], [((),)], [((2, 3, 4, 5, 6),)], []]
    assert saves[2][0].blocks == (TABLE[2:],) and len({save.lease for each in saves for save in each}) == 1
    req.finish_reason = FinishReason.LENGTH
    hint = read_hint(producer.offer(req).parts[0].data)
    assert hint.lease == saves[0][0].lease and producer.forgets() == ()
    assert producer.take()[0][0].blocks == (TABLE,) and producer.stats()["tokens_saved_early"] == 100


def test_groups_of_other_block_sizes_and_blocks_that_a_window_has_passed():
    producer, req = saving_producer(((1, 2, 3, 4, 5, 6, 7), (0, 9, 10, 11)), (16, 32)), asked()
    producer.arrive(req)
    first, last = producer.saves(step(req, 0, 64))[0], producer.saves(step(req, 64, 100))[0]
    assert (first.places, first.blocks) == (((0, 1, 2, 3), (1,)), ((1, 2, 3, 4), (9,)))
    assert (last.places, last.blocks) == (((4, 5, 6), (2, 3)), ((5, 6, 7), (10, 11)))


@pytest.mark.parametrize("how", ["preempted", "aborted", "held by somebody else"])
def test_what_was_saved_for_a_prompt_that_is_not_kept_is_forgotten(how):
    producer, req = saving_producer(), asked()
    producer.arrive(req)
    (first,) = producer.saves(step(req, 0, 40))
    if how == "preempted":
        producer.preempted(req)
        (again,) = producer.saves(step(req, 0, 40))
        assert again.lease != first.lease and again.places == first.places
    elif how == "aborted":
        req.finish_reason = FinishReason.ABORT
        assert not producer.offer(req).holds_blocks
    else:
        producer.left(req)
    assert producer.has_news and producer.forgets() == (first.lease,) and producer.forgets() == ()


def test_nothing_is_saved_of_a_prompt_that_nobody_asked_to_keep_or_without_the_option():
    producer, req = saving_producer(), request()
    producer.arrive(req)
    assert producer.saves(step(req, 0, 40)) == ()
    producer, req = make_producer(), asked()
    producer.arrive(req)
    assert producer.saves(step(req, 0, 40)) == ()


def consumer(policy=OnFailure.RECOMPUTE):
    return make_consumer(policy, by_layer=True)


def arrived(side, **more):
    req = request("d", data={**offered(make_producer()), **more})
    side.arrive(req)
    return req


def test_a_step_reads_what_it_computes_with_once_all_of_it_is_there():
    side = consumer()
    req = arrived(side)
    part = DisaggControl(Clock(), None, side)
    assert side.match(req, 0) == Retry() and part.next_deadline() is not None
    lease = side.take()[0][0].lease
    part.absorb(_result(LeaseEvent(lease, LeaseNews.THERE)))
    assert side.match(req, 32) == Match(tokens=99, wait=False, source="remote")
    req.num_computed_tokens = 100  # as the step that computes with it counts
    side.reserved(req, 99)
    (pull,) = side.take()[2]
    assert pull.in_step and pull.places == ((2, 3, 4, 5, 6),) and pull.blocks == ((3, 4, 5, 6, 7),)
    ready, _ = side.report(JobReport(job=pull.job, good=(True, False, True, True, True)))
    assert ready.num_tokens == 48, "less than was promised: the row is computed again"
    assert side.counts["in_step"] == side.counts["partly_fetched"] == 1


def test_no_step_is_held_up_for_a_fetch_while_somebody_else_runs():
    side = consumer()
    req, other = arrived(side), request("other")
    side.step(SimpleNamespace(rows=[other]))
    assert side.match(req, 0) == Match(tokens=99, wait=True, source="remote")
    side.finish(other)
    assert side.match(req, 0) == Retry()


def test_a_prompt_that_does_not_come_is_computed():
    side = consumer()
    req = arrived(side)
    DisaggControl(Clock(), None, side).absorb(_result(LeaseEvent(side.take()[0][0].lease, LeaseNews.LOST)))
    assert side.match(req, 0) == Match() and not side.awaits_prompts


def _result(*events):
    report = DisaggReport(events=events)
    return SimpleNamespace(part=lambda kind: report if kind is DisaggReport else None, timings=StepTimings())


def test_a_hint_carries_what_the_producer_s_worker_offers_and_the_consumer_compares_it(caplog):
    """PDX-3: handshake metadata, from one data half to the other side's control half."""
    producer, req = make_producer(), asked(reason=FinishReason.LENGTH)
    DisaggControl(Clock(), producer, None).handshake({"weights": "aa", "a file holds": "one layer"})
    hint = producer.offer(req).parts[0].data
    for form, other in (({"weights": "aa", "a file holds": "one layer"}, 0), ({"weights": "bb"}, 1), ({}, 0)):
        side = make_consumer()
        DisaggControl(Clock(), None, side).handshake(form)
        taker = request("d", data=hint)
        side.arrive(taker)
        assert side.counts["other_form"] == other and (side.match(taker, 0) == Match()) is bool(other)
    assert "weights: aa there, bb here" in caplog.text
    side = make_consumer(OnFailure.FAIL)
    side.handshake({"weights": "bb"})
    with pytest.raises(
        ClientError, match=r"could not be fetched from tcp://10.0.0.1:7100: .*weights: aa there, bb here"
    ):
        side.arrive(request("d", data=hint))


@pytest.mark.parametrize("form", [{"a": 5}, {"a\nb": "c"}, {"a": "x" * 65}, {str(i): "" for i in range(40)}, "x"])
def test_a_form_that_makes_no_sense_is_refused(form):
    hint = offered(make_producer())
    with pytest.raises(ClientError, match="must be passed on as the prefill instance gave it"):
        read_hint({**hint, "form": form})
