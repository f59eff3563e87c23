"""The data half of a hand-over: what a plan says is given to a transport, what it answers becomes a report (PDX-3).

Promises: nothing here holds up a step; every fetch is reported once.
Does not know: leases' ends, requests, or how bytes move: transports are found by the kind in an address.
"""

from collections.abc import Mapping

import numpy as np

from octavo.base.step import ResultPart, StepPlan
from octavo.features.transfer.data.lane import Outbox
from octavo.features.transfer.data.peer_server import PeerDoor
from octavo.features.transfer.data.regions import KVRegion, regions_of
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.transport import Giving, Place, Pull, Taking, find_transport
from octavo.features.transfer.handover import HandoverPlan, HandoverReport, PullJob, Role
from octavo.features.transfer.plan import JobReport
from octavo.worker.batch import InputBatch
from octavo.worker.memory import KVMemory
from octavo.worker.seams import NullPart


class HandoverAgent(NullPart):
    """A part of the worker.

    Owns: both ends of the transport, and fetches that wait for the next report.
    """

    name = "handover"

    def __init__(self, role: str, transport: str, identity: Mapping[str, str], door: PeerDoor) -> None:
        """`transport`: its kind, or an address of that kind. `identity`: all that KV depends on besides tokens, by
        name. `door`: where consumers come. Raises `ConfigError` for a transport that is not there."""
        self._role = Role(role)
        self._kind, _, self._address = transport.partition("://")
        self._make = find_transport(transport)
        self._identity = dict(identity)
        self._door = door
        self._regions: tuple[KVRegion, ...] = ()
        self._done: Outbox[JobReport] = Outbox()
        self._giving: Giving | None = None
        self._taking: Taking | None = None

    def bind(self, memory: KVMemory) -> None:
        self._regions = regions_of(memory, "--kv-role")
        seal = Seal(self._identity, [region.chunk_bytes for region in self._regions])
        place = Place(role=self._role, address=self._address, regions=self._regions, seal=seal, door=self._door)
        self._giving, self._taking = self._make(place)

    def prepare(self, plan: StepPlan, batch: InputBatch) -> None:
        part = plan.part(HandoverPlan)
        if part is None:
            return
        if self._giving is not None:
            for grant in part.grants:
                self._giving.open(grant.lease, grant.blocks)
            for lease in part.revokes:
                self._giving.close(lease)
        if self._taking is not None:
            for watch in part.watches:
                self._taking.watch(watch)
            for pull in part.pulls:
                self._taking.pull(Pull(pull, self._write, self._done.put))
            for drop in part.drops:
                self._taking.drop(drop)

    def _write(self, job: PullJob, group: int, at: int, body: memoryview) -> None:
        self._regions[group].write(job.blocks[group][at], np.frombuffer(body, dtype=np.uint8))

    def report(self) -> ResultPart | None:
        ends = (self._giving, self._taking)
        events = tuple(event for end in ends if end is not None for event in end.news())
        jobs = self._done.take()
        return HandoverReport(events=events, jobs=jobs) if events or jobs else None

    def close(self) -> None:
        self._door.close()
        for end in (self._taking, self._giving):
            if end is not None:
                end.stop()
