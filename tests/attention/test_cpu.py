"""The native backend: right on a grid (ATT-12), and to the bit the same however the work is cut (ATT-13, OUT-30)."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from octavo.attention.batch import AttentionBatch
from octavo.attention.sdpa import SdpaBackend
from octavo.forward.context import LayerBinding
from octavo.ops.registry import OpRegistry
from tests.attention.plain import CPU_FACTS, need_of, paged_cache, run_and_compare, spec_of

native = pytest.importorskip("octavo.ops.native", exc_type=ImportError)
from octavo.attention.cpu import CpuBackend  # noqa: E402 (the native core may be missing)

BACKEND = CpuBackend()
OPS = OpRegistry().bind(CPU_FACTS, torch.float32, forced={"write_kv": "reference"})
TYPES = [torch.float32, torch.bfloat16]
RAGGED = [(0, 5), (3, 1), (15, 1), (16, 1), (17, 1), (31, 2), (0, 1), (14, 17), (40, 33), (7, 16)]
FAR = [(255, 1), (256, 1), (254, 3), (511, 1), (512, 70), (300, 1), (0, 300)]


@pytest.fixture(params=native.levels())
def level(request):
    native.use_level(request.param)
    yield request.param
    native.use_level(native.levels()[-1])


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


SHAPES = [(1, 1, 8), (9, 3, 64), (6, 1, 24), (4, 2, 80), (8, 2, 32), (3, 1, 96), (2, 1, 128), (2, 2, 256), (20, 1, 40)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("block_size", [16, 48, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_ragged_rows_for_head_shapes_and_block_sizes(level, heads, kv_heads, dim, block_size, dtype):
    rows = RAGGED if level == "scalar" else RAGGED + FAR
    run_and_compare(BACKEND, need_of(heads, kv_heads, dim, dtype), rows, block_size, padding=3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 255, 257, 1000])
@pytest.mark.parametrize("block_size", [16, 32])
def test_windows_see_the_last_tokens_and_nothing_that_was_freed(level, window, block_size, dtype):
    run_and_compare(BACKEND, need_of(4, 2, 32, dtype, window), RAGGED + FAR, block_size)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    "terms",
    [{"softcap": 5.0}, {"sinks": True}, {"alibi": True}, {"softcap": 30.0, "sinks": True, "alibi": True}],
    ids=str,
)
def test_softcap_sinks_and_slopes(level, terms, window, dtype):
    run_and_compare(BACKEND, replace(need_of(12, 3, 64, dtype, window), **terms), RAGGED + FAR[:4], 16)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 24), (4, 2, 80), (2, 1, 128)])
def test_a_cache_of_fewer_bits_with_a_scale_for_each_token_and_head(
    level, heads, kv_heads, dim, dtype, kv_dtype, window
):
    """ATT-10."""
    need = replace(need_of(heads, kv_heads, dim, dtype, window), kv_dtype=kv_dtype)
    run_and_compare(BACKEND, need, RAGGED + FAR[:5], 16, padding=2)


def test_slopes_may_be_the_models_own(level):
    run_and_compare(BACKEND, replace(need_of(2, 1, 16), alibi=True, slopes=(0.5, 0.0)), RAGGED, 16)


@pytest.mark.parametrize(("own", "group"), [(7, 40), (40, 7), (16, 17)])
def test_the_layers_own_window_wins_over_the_groups(own, group):
    """ATT-7."""
    rows = [(0, 20), (0, 1), (group - 2, 1)] if own > group else RAGGED
    run_and_compare(BACKEND, need_of(4, 2, 16, window=own), rows, 16, group_window=group)


@dataclass
class World:
    """Some sequences in a paged cache, and a query for each of their tokens."""

    need: object
    block_size: int
    lens: list
    shared: int = 0  # tokens, whole blocks, that all sequences begin with

    def __post_init__(self):
        gen = np.random.default_rng(1)
        torch.manual_seed(1)
        need = self.need
        self.cache = paged_cache(need, self.lens, self.block_size, gen)
        common = self.shared // self.block_size
        self.cache.block_table[:, :common] = self.cache.block_table[0, :common]
        for cache in (self.cache.binding.key, self.cache.binding.value):
            for row, n in enumerate(self.lens):
                for block in range(-(-n // self.block_size)):
                    if row and block < common:
                        continue
                    into = cache[int(self.cache.block_table[row, block]), :, : n - block * self.block_size]
                    into.copy_(torch.randn(into.shape) * (1 if need.kv_dtype.is_floating_point else 40))
        for scale in (self.cache.binding.key_scale, self.cache.binding.value_scale):
            if scale is not None:
                scale.uniform_(0.01, 0.03)
        self.query = [torch.randn(n, need.num_heads, need.head_dim).to(need.dtype) for n in self.lens]
        self.builder = BACKEND.builder(spec_of(need, self.block_size, need.window))
        self.impl = BACKEND.impl(need, OPS)
        self.sinks = torch.randn(need.num_heads) if need.sinks else None

    def attend(self, parts, share=True):
        """Tokens `start .. stop` of sequence `row`, for each (row, start, stop): the answers, one tensor each."""
        rows = [row for row, _, _ in parts]
        batch = AttentionBatch.of(
            query_lens=[stop - start for _, start, stop in parts],
            context_lens=[start for _, start, _ in parts],
            block_table=self.cache.block_table[rows],
            block_size=self.block_size,
        )
        query = torch.cat([self.query[row][start:stop] for row, start, stop in parts])
        plan = self.builder.plan(batch)
        plan.share_prefixes(share)
        plan = self.builder.plan(batch)
        self.plan = plan
        out = self.impl.run(query, query, query, self.cache.binding, plan, self.sinks)
        return list(out.split([stop - start for _, start, stop in parts]))


NEEDS = [
    need_of(9, 3, 64),
    need_of(9, 3, 64, torch.bfloat16),
    need_of(4, 1, 80, torch.bfloat16, 100),
    need_of(4, 4, 128, torch.bfloat16),
    replace(need_of(10, 2, 32, torch.bfloat16), softcap=20.0, sinks=True, alibi=True),
    replace(need_of(9, 3, 64, torch.bfloat16), kv_dtype=torch.int8),
    replace(need_of(4, 2, 64, torch.bfloat16), kv_dtype=torch.float8_e4m3fn),
    replace(need_of(4, 2, 64), kv_dtype=torch.int8),
]


@pytest.fixture(
    params=range(len(NEEDS)),
    ids=lambda i: f"{NEEDS[i].num_heads}x{NEEDS[i].head_dim}-{NEEDS[i].dtype}-{NEEDS[i].kv_dtype}",
)
def need(request):
    return NEEDS[request.param]


@pytest.mark.parametrize("block_size", [16, 64])
def test_chunks_of_any_size_give_the_same_bits(level, need, block_size):
    length = 330 if level == "scalar" else 700
    world = World(need, block_size, [length])
    (whole,) = world.attend([(0, 0, length)])
    for size in (512, 256, 255, 100, 64, 17, 16, 7, 3):
        for start in range(0, length, size):
            stop = min(start + size, length)
            (part,) = world.attend([(0, start, stop)])
            assert torch.equal(part, whole[start:stop]), f"tokens {start} to {stop} of chunks of {size}"
    for start in (0, 1, 15, 16, 17, 200, 255, 256, 257, length - 1):
        (part,) = world.attend([(0, start, start + 1)])
        assert torch.equal(part, whole[start : start + 1]), f"token {start}"


def test_a_batch_gives_the_bits_of_rows_alone(level, need):
    lens = [1, 16, 17, 256, 257, 40, 300, 555, 64, 90]
    world = World(need, 16, lens)
    starts = [0, 15, 2, 255, 255, 0, 299, 554, 1, 89]
    parts = [(row, start, n) for row, (start, n) in enumerate(zip(starts, lens, strict=True))]
    if level == "scalar":
        parts = parts[:6]
    together = world.attend(parts)
    for part, answer in zip(parts, together, strict=True):
        assert torch.equal(world.attend([part])[0], answer), part
    assert all(map(torch.equal, world.attend(parts[2:5]), together[2:5]))
    assert all(map(torch.equal, world.attend(parts[::-1]), together[::-1]))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 13, 16, 33, 64])
def test_any_number_of_rows_gives_the_same_bits(level, num_rows):
    world = World(need_of(4, 2, 64, torch.bfloat16), 16, [50 + 7 * i for i in range(num_rows)])
    parts = [(row, n - 1, n) for row, n in enumerate(world.lens)]
    together = world.attend(parts)
    for at in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(world.attend([parts[at]])[0], together[at])


def test_the_number_of_threads_changes_no_bit(level, need):
    world = World(need, 64, [40, 700, 300, 513])
    parts = [(0, 0, 40), (1, 699, 700), (2, 100, 300), (3, 510, 513)]
    answers = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        answers.append(world.attend(parts))
    for other in answers[1:]:
        assert all(map(torch.equal, answers[0], other))


@pytest.mark.parametrize("shared", [256, 320, 512])
@pytest.mark.parametrize("count", [5, 12])
def test_a_shared_prefix_read_once_changes_no_bit(level, need, shared, count):
    """ATT-9: whole partitions are shared, where it pays."""
    world = World(need, 64, [shared + 40 + 30 * i for i in range(count)], shared)
    parts = [(row, n - 1, n) for row, n in enumerate(world.lens)]
    parts[2] = (2, world.lens[2] - 9, world.lens[2])  # a prompt's last chunk among them
    together = world.attend(parts)
    sharing = world.plan.shared_partitions()
    apart = world.attend(parts, share=False)
    assert world.plan.shared_partitions() == 0
    assert all(map(torch.equal, together, apart))
    if need.window is None and not need.alibi and count == 12:
        assert sharing == shared // 256


def test_groups_that_share_different_prefixes_and_rows_that_share_none():
    world = World(need_of(9, 3, 64, torch.bfloat16), 64, [700] * 24, 0)
    table = world.cache.block_table
    table[0:10, :8], table[10:18, :5] = table[0, :8], table[10, :5]  # two partitions, one and a quarter
    parts = [(row, 650 + row, 651 + row) for row in np.random.default_rng(0).permutation(24).tolist()]
    together = world.attend(parts)
    assert world.plan.shared_partitions() == 3
    for part, answer in zip(parts, together, strict=True):
        assert torch.equal(world.attend([part])[0], answer)


def test_it_agrees_with_the_reference_backend(level):
    """ATT-12: within two units in the last place of bf16, for values of about one."""
    need = need_of(9, 3, 64, torch.bfloat16)
    world = World(need, 64, [300, 90, 64])
    parts = [(0, 290, 300), (1, 89, 90), (2, 0, 64)]
    mine = torch.cat(world.attend(parts))
    batch = AttentionBatch.of(
        query_lens=[10, 1, 64], context_lens=[290, 89, 0], block_table=world.cache.block_table, block_size=64
    )
    query = torch.cat([world.query[row][start:stop] for row, start, stop in parts])
    keys = torch.cat([new_tokens(world, world.cache.binding.key, *part) for part in parts])
    values = torch.cat([new_tokens(world, world.cache.binding.value, *part) for part in parts])
    plan = SdpaBackend().builder(spec_of(need, 64, None)).plan(batch)
    theirs = SdpaBackend().impl(need, OPS).run(query, keys, values, world.cache.binding, plan)
    assert (mine.float() - theirs.float()).abs().max() < 2e-2


def new_tokens(world, cache, row, start, stop):
    at = [divmod(p, world.block_size) for p in range(start, stop)]
    return torch.stack([cache[int(world.cache.block_table[row, block]), :, offset] for block, offset in at])


def test_padding_is_zero_and_an_empty_step_is_nothing():
    need = need_of(2, 1, 16)
    run_and_compare(BACKEND, need, [(5, 1), (0, 9)], 16, padding=7)
    empty = AttentionBatch.of(query_lens=[], context_lens=[], block_table=np.zeros((0, 1), np.int32), block_size=16)
    plan = BACKEND.builder(spec_of(need, 16, None)).plan(empty)
    query = torch.randn(3, 2, 16)
    world = World(need, 16, [5])
    assert torch.equal(
        BACKEND.impl(need, OPS).run(query, query, query, world.cache.binding, plan), torch.zeros(3, 2, 16)
    )


def test_queries_may_be_a_part_of_a_wider_row():
    world = World(need_of(4, 2, 16), 16, [40])
    (want,) = world.attend([(0, 10, 40)])
    wide = torch.randn(30, 96)
    wide[:, :64] = world.query[0][10:].view(30, 64)
    got = world.impl.run(wide[:, :64].view(30, 4, 16), want, want, world.cache.binding, world.plan)
    assert torch.equal(got, want)


def test_a_layout_that_kernels_cannot_read_is_refused():
    need = need_of(2, 1, 16)
    world = World(need, 16, [5])
    turned = LayerBinding(key=torch.zeros(4, 1, 16, 16).transpose(2, 3), value=world.cache.binding.value, group=0)
    query = torch.randn(5, 2, 16)
    with pytest.raises(RuntimeError, match="contiguous"):
        world.impl.run(query, query, query, turned, world.builder)


def test_what_it_cannot_do_is_said():
    """ATT-1."""
    assert BACKEND.objections(need_of(2, 1, 20), CPU_FACTS) == ("head size 20 is not a multiple of 8",)
    assert BACKEND.objections(need_of(2, 1, 16, torch.float16), CPU_FACTS) == ("does not compute in torch.float16",)
    assert BACKEND.objections(replace(need_of(2, 1, 16), block_size=24), CPU_FACTS) == (
        "block size 24 is not a multiple of 16",
    )
