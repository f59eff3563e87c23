"""A connector of somebody's own, alone and beside the built-in ones (PDX-1, PDX-11)."""

import pytest

from octavo import LLM
from octavo.base.errors import ConfigError
from octavo.base.step import PlanPart
from octavo.features.transfer.data.regions import regions_of
from octavo.kvcache.hashing import group_key
from octavo.scheduler import seams as control
from octavo.worker import seams as data
from tests.features.transfer.test_offload import BASE, GREEDY, TURNS
from tests.support import checkpoints


class ShelfPlan(PlanPart, frozen=True):
    """Blocks to keep, and blocks to fill, by key."""

    keep: tuple[tuple[bytes, int], ...] = ()
    fill: tuple[tuple[bytes, int], ...] = ()


class ShelfControl(control.NullControlPart):
    """Everything that became full is kept, and comes back without waiting."""

    name = "shelf"

    def __init__(self, context):
        self.context = context
        (self.group,) = context.layout.groups
        self.known, self.keep, self.fill, self.hits = set(), [], [], 0
        self.layout = None

    def handshake(self, offered):
        self.layout = offered["layout"]

    def match(self, req, local_tokens):
        size, tokens = self.context.hash_block_size, 0
        for block_hash in req.block_hashes:
            if group_key(block_hash, 0) not in self.known:
                break
            tokens += size
        return control.Match(tokens=tokens, source="shelf")

    def after_reserve(self, req, block_ids, external_tokens):
        if external_tokens:
            size = self.context.hash_block_size
            table = self.context.blocks_of(req.request_id)[0]
            found = (
                req.num_computed_tokens // size
            )  # all of the prefix counts as computed: what was here is filled again
            self.hits += found
            self.fill += [(group_key(req.block_hashes[i], 0), table[i]) for i in range(external_tokens // size)]

    def on_commit(self, req, first_block, block_hashes):
        table = self.context.blocks_of(req.request_id)[0]
        for i, block_hash in enumerate(block_hashes, first_block):
            if (key := group_key(block_hash, 0)) not in self.known:
                self.known.add(key)
                self.keep.append((key, table[i]))

    def plan(self, builder):
        if not self.keep and not self.fill:
            return None
        plan = ShelfPlan(tuple(self.keep), tuple(self.fill))
        self.keep, self.fill = [], []
        return plan

    def stats(self):
        return {"hits": self.hits, "chunk_bytes": self.layout["chunk bytes"]}


class ShelfData(data.NullDataPart):
    """The shelf itself."""

    name = "shelf"

    def __init__(self, context):
        assert context.identity["dtype"] == "float32"
        self.shelf = {}

    def bind(self, memory):
        (self.region,) = regions_of(memory, "--kv-connector")

    def handshake(self):
        return {"layout": {"chunk bytes": self.region.chunk_bytes}}

    def prepare(self, plan, batch):
        part = plan.part(ShelfPlan)
        for key, block in part.keep if part is not None else ():
            self.shelf[key] = bytearray(self.region.chunk_bytes)
            self.region.read(block, memoryview(self.shelf[key]))
        for key, block in part.fill if part is not None else ():
            self.region.write(block, memoryview(self.shelf[key]))


class Shelf:
    """A connector."""

    def control_part(self, context):
        return ShelfControl(context)

    def data_part(self, context):
        return ShelfData(context)


class Half:
    """No connector."""

    def control_part(self, context):
        return ShelfControl(context)


def run(**options):
    with LLM(model=str(checkpoints.tiny_llama()), **{**BASE, **options}) as llm:
        outs = [llm.generate([turn], GREEDY, use_tqdm=False)[0] for turn in TURNS]
        return (
            [out.outputs[0].token_ids for out in outs],
            [out.cached_by_source or {} for out in outs],
            llm.stats().parts,
        )


@pytest.mark.parametrize("more", [{}, {"kv_tier": ("host?size=40KiB",)}], ids=["alone", "beside a small host tier"])
def test_a_connector_of_ones_own_brings_prefixes_back(more):
    want, _, _ = run()
    texts, sources, parts = run(kv_connector=(f"{__name__}:Shelf",), **more)
    assert texts == want and parts["shelf"]["hits"] > 20
    assert parts["shelf"]["chunk_bytes"] > 0, "what its worker's half offers once memory is registered (PDX-3)"
    assert all(source.get("shelf", 0) >= 64 for source in sources[3:6])


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (("shelf",), "--kv-connector shelf: give it as module:Class"),
        (("nowhere:X",), "--kv-connector nowhere:X cannot be made: ModuleNotFoundError: No module named 'nowhere'"),
        ((f"{__name__}:Half",), "has no data_part"),
        ((f"{__name__}:Shelf",) * 2, "two connectors have one name"),
    ],
)
def test_what_is_no_connector_is_said_at_the_start(paths, said):
    with pytest.raises(ConfigError, match=said):
        run(kv_connector=paths)
