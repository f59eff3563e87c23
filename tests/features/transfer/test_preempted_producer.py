"""A producer's prompt that was preempted before its hand-over is computed again and handed over whole (SCH-33).

The scheduler, its KV cache and the producer are real; a toy worker writes down what every block holds, so that a hand-over
of blocks that a request no longer owns, or that hold other content, is seen.
"""

import pytest

from octavo.base.types import FinishReason
from octavo.features.transfer.control.disagg import DisaggControl
from octavo.features.transfer.control.producer import Producer
from octavo.features.transfer.disagg import (
    DisaggPlan,
    DisaggReport,
    LeaseEvent,
    LeaseNews,
    TransferHint,
    prompt_digest,
)
from tests.simulate.parts import DataHalf
from tests.simulate.toy import extend
from tests.simulate.world import Setup, World, full, window

ASKED = TransferHint({"do_remote_decode": True})


class Reader(DataHalf):
    """Looks at what was granted some steps later, as a consumer does, and then says that it has read it.

    Owns: the leases it is to read, and what it read.
    """

    def __init__(self, world, after):
        super().__init__(world.worker.memory)
        self._world, self._after = world, after
        self._granted, self._closing = [], []
        self.read = []

    def submit(self, plan):
        given = plan.part(DisaggPlan)
        for grant in () if given is None else given.grants:
            self._granted.append([self._after, grant])
        self._closing += () if given is None else given.revokes
        return super().submit(plan)

    def report(self):
        events = [LeaseEvent(lease, LeaseNews.CLOSED) for lease in self._closing]
        self._closing = []
        for waiting in self._granted:
            waiting[0] -= 1
        due = [grant for left, grant in self._granted if left <= 0]
        self._granted = [waiting for waiting in self._granted if waiting[0] > 0]
        for grant in due:
            self._check(grant)
            events.append(LeaseEvent(grant.lease, LeaseNews.DONE))
        return (*super().report(), DisaggReport(events=tuple(events)))

    def _check(self, grant):
        (told,) = [told for told in self._world.told.values() if grant.lease.endswith(prompt_digest(told.request))]
        prompt, chain = told.request.prompt_token_ids, []
        extend(chain, prompt)
        self._world.worker.memory.verify(grant.blocks, chain, len(prompt))
        self.read.append(told.request.request_id)


def make_world(setup, after):
    names = iter(f"lease-{i}-" for i in range(100))
    producer = Producer(
        address="tcp://10.0.0.1:7100",
        lease_s=1e6,
        blocks_of=lambda request_id: world.kv.blocks(request_id),
        clock=lambda: world.clock(),
        new_id=lambda: next(names),
    )
    world = World(setup, parts=(DisaggControl(lambda: world.clock(), producer),))
    world.data = Reader(world, after)
    return world


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("specs", [(full(),), (full(), window(20))])
@pytest.mark.parametrize("after", [1, 9])
@pytest.mark.parametrize("caching", [True, False])
def test_SCH_33_a_preempted_prompt_is_computed_again_and_handed_over_whole(depth, specs, after, caching):
    world = make_world(Setup(specs=specs, num_blocks=16, watermark=0, depth=depth, prefix_caching=caching), after)
    for i in range(5):
        world.add(tuple((7 * i + j) % 50 for j in range(9)), max_tokens=11, eos=False, parts=(ASKED,))
    world.drain()
    assert world.preempted, "memory was short"
    assert sorted(world.data.read) == sorted(world.told), "each prompt was handed over, once"
    assert {told.last.finish for told in world.told.values()} == {FinishReason.LENGTH}
