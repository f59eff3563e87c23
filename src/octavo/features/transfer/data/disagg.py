"""The data half of a hand-over: what a plan says is given to a transport, what it answers becomes a report (PDX-3).

Promises: nothing here holds up a step but a fetch that the step itself computes with, and that for a bounded time; every
fetch is reported once.
Does not know: leases' ends, requests, or how bytes move: transports are found by the kind in an address.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from torch import Tensor

from octavo.base.step import ResultPart, StepPlan
from octavo.features.transfer.data.peer_server import PeerListener
from octavo.features.transfer.data.regions import KVRegion, layers_of, regions_of
from octavo.features.transfer.data.seal import Seal, short
from octavo.features.transfer.data.transport import (
    ConsumerTransport,
    LayerConsumerTransport,
    LayerProducerTransport,
    Place,
    ProducerTransport,
    Pull,
    find_transport,
)
from octavo.features.transfer.data.worker_thread import Outbox
from octavo.features.transfer.disagg import DisaggPlan, DisaggReport, PullJob, TransferRole
from octavo.features.transfer.plan import JobReport
from octavo.worker.batch import InputBatch
from octavo.worker.memory import KVMemory
from octavo.worker.seams import NullDataPart


class DisaggAgent(NullDataPart):
    """A part of the worker.

    Owns: both ends of the transport, and fetches that wait for the next report.
    """

    name = "disaggregation"

    def __init__(
        self, role: str, transport: str, identity: Mapping[str, str], listener: PeerListener, *, by_layer: bool = False
    ) -> None:
        """`transport`: its kind, or an address of that kind. `identity`: all that KV depends on besides tokens, by
        name. `listener`: where consumers come. `by_layer`: the transport is one that can. Raises `ConfigError` for a transport that is not there."""
        self._role = TransferRole(role)
        self._kind, _, self._address = transport.partition("://")
        self._make = find_transport(transport, by_layer=by_layer)
        self._identity = dict(identity)
        self._listener = listener
        self._regions: tuple[KVRegion, ...] = ()
        self._done: Outbox[JobReport] = Outbox()
        self._producer: ProducerTransport | None = None
        self._consumer: ConsumerTransport | None = None
        self.watches_layers = by_layer
        self._saving: LayerProducerTransport | None = None  # in the step under way
        self._loading: LayerConsumerTransport | None = None
        self._form: dict[str, str] = {}

    def bind(self, memory: KVMemory) -> None:
        self._regions = regions_of(memory, "--kv-role")
        seal = Seal(self._identity, [region.chunk_bytes for region in self._regions])
        layers = layers_of(memory) if self.watches_layers else ()
        place = Place(
            role=self._role,
            address=self._address,
            regions=self._regions,
            seal=seal,
            listener=self._listener,
            layers=layers,
        )
        self._producer, self._consumer = self._make(place)
        if self._address:  # a folder says nothing: what the other side must have in common with us goes with the hint
            self._form = {name: short(value) for name, value in seal.identity.items()}
            self._form["a file holds"] = "one layer" if self.watches_layers else "one block"

    def handshake(self) -> Mapping[str, Any]:
        return self._form

    def prepare(self, plan: StepPlan, batch: InputBatch) -> None:
        part = plan.part(DisaggPlan)
        if part is None:
            return
        if self._producer is not None:
            self._begin_saves(self._producer, part)
            for grant in part.grants:
                self._producer.open(grant.lease, grant.blocks)
            for lease in part.revokes:
                self._producer.close(lease)
        if self._consumer is not None:
            for watch in part.watches:
                self._consumer.watch(watch)
            self._begin_loads(self._consumer, part)
            for drop in part.drops:
                self._consumer.drop(drop)

    def _begin_saves(self, producer: ProducerTransport, part: DisaggPlan) -> None:
        if part.saves or part.forgets:
            layered = cast(LayerProducerTransport, producer)
            for lease in part.forgets:
                layered.forget(lease)
            if part.saves:
                layered.begin_saves(part.saves)
                self._saving = layered

    def _begin_loads(self, consumer: ConsumerTransport, part: DisaggPlan) -> None:
        pulls = [Pull(pull, self._write, self._done.put) for pull in part.pulls]
        for pull in pulls:
            if not pull.job.in_step:
                consumer.pull(pull)
        if now := [pull for pull in pulls if pull.job.in_step]:
            layered = cast(LayerConsumerTransport, consumer)
            layered.begin_loads(now)
            self._loading = layered

    # ---- layers --------------------------------------------------------------------------------

    def wants_layers(self) -> bool:
        return self._saving is not None or self._loading is not None

    def before_layer(self, layer: int) -> None:
        if self._loading is not None:
            self._loading.wait_for_layer(layer)

    def after_layer(self, layer: int) -> None:
        if self._saving is not None:
            self._saving.save_layer(layer)

    def after_forward(self, batch: InputBatch, hidden: Tensor) -> None:
        self._end_step()

    def _end_step(self) -> None:
        """Also of one whose rows all failed before anything was computed."""
        if self._loading is not None:
            self._loading.end_loads()
        if self._saving is not None:
            self._saving.wait_for_save()
        self._loading = self._saving = None

    def _write(self, job: PullJob, group: int, at: int, body: memoryview) -> None:
        self._regions[group].write(job.blocks[group][at], np.frombuffer(body, dtype=np.uint8))

    def report(self) -> ResultPart | None:
        self._end_step()
        ends = (self._producer, self._consumer)
        events = tuple(event for end in ends if end is not None for event in end.news())
        jobs = self._done.take()
        return DisaggReport(events=events, jobs=jobs) if events or jobs else None

    def close(self) -> None:
        self._listener.close()
        for end in (self._consumer, self._producer):
            if end is not None:
                end.stop()
