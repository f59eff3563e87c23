"""KV memory: views from the layout, untouched until used (REQ-14)."""

import sys

import pytest
import torch

from octavo.base.kvspec import FullAttentionSpec, KVGroup, KVLayout, LayerPlace, SlidingWindowSpec
from octavo.ops.pages import Populating
from octavo.worker.memory import KVMemory, peak_bytes, scratch_layout

CPU = torch.device("cpu")


def spec(**changes: object) -> FullAttentionSpec:
    fields = {"block_size": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32", **changes}
    return FullAttentionSpec(**fields)  # type: ignore[arg-type]


def block_major(layers: int, num_blocks: int, one: FullAttentionSpec) -> KVLayout:
    """All of a block's pages side by side."""
    stride = layers * one.page_bytes
    return KVLayout(
        groups=(KVGroup(index=0, spec=one, layers=tuple(range(layers))),),
        places=tuple(
            LayerPlace(layer=i, group=0, offset=i * one.page_bytes, block_stride=stride) for i in range(layers)
        ),
        num_blocks=num_blocks,
        block_bytes=stride,
        total_bytes=num_blocks * stride,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("padding", [0, 64])
def test_views_have_the_layouts_shape_and_never_overlap(dtype: str, padding: int) -> None:
    one = spec(dtype=dtype, page_padding_bytes=padding)
    memory = KVMemory(block_major(3, 5, one), CPU)
    views = [v for b in memory.bindings for v in (b.key, b.value)]
    for number, view in enumerate(views):
        assert view.shape == (5, 2, 4, 8) and not view.any()
        view.fill_(number + 1)
    for number, view in enumerate(views):
        assert (view == number + 1).all()
    assert int((memory.buffer != 0).sum()) <= 5 * 3 * one.content_bytes, "padding is left alone"


def test_k_lies_before_v_in_a_page() -> None:
    one = spec()
    layout = block_major(2, 3, one)
    memory = KVMemory(layout, CPU)
    memory.bindings[1].key[2] = 1.0
    memory.bindings[1].value[2] = 2.0
    start = layout.places[1].offset + 2 * layout.places[1].block_stride
    page = memory.buffer[start : start + one.page_bytes].view(torch.float32)
    half = one.content_bytes // 8
    assert (page[:half] == 1).all() and (page[half:] == 2).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("padding", [0, 64])
def test_scales_lie_behind_keys_and_values_and_never_overlap(dtype: str, padding: int) -> None:
    """ATT-10."""
    one = spec(dtype=dtype, page_padding_bytes=padding)
    assert one.content_bytes == 2 * 4 * 2 * (8 + 4)
    memory = KVMemory(block_major(3, 5, one), CPU)
    views = [v for b in memory.bindings for v in (b.key, b.value, b.key_scale, b.value_scale)]
    for number, view in enumerate(views):
        assert view is not None
        assert view.shape[:3] == (5, 2, 4) and not view.view(torch.uint8).any()
        view.fill_(number + 1)
    for number, view in enumerate(views):
        assert view is not None and (view.float() == number + 1).all()
    assert int((memory.buffer != 0).sum()) <= 5 * 3 * one.content_bytes, "padding is left alone"


def test_zeroing_clears_these_blocks_in_every_layer_and_no_other() -> None:
    memory = KVMemory(block_major(3, 6, spec()), CPU)
    memory.buffer.fill_(1)
    memory.zero((1, 4))
    for binding in memory.bindings:
        for view in (binding.key, binding.value):
            assert [bool(view[b].any()) for b in range(6)] == [True, False, True, True, False, True]


def test_misaligned_places_are_our_own_mistake() -> None:
    layout = block_major(1, 2, spec())
    bad = KVLayout(
        groups=layout.groups,
        places=(LayerPlace(layer=0, group=0, offset=2, block_stride=layout.block_bytes),),
        num_blocks=1,
        block_bytes=layout.block_bytes,
        total_bytes=layout.total_bytes,
    )
    with pytest.raises(RuntimeError, match="aligned"):
        KVMemory(bad, CPU)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_costs_nothing_until_it_is_touched_and_the_peak_is_measured() -> None:
    made: list[KVMemory] = []
    huge = block_major(4, 20000, spec(block_size=64, num_kv_heads=4, head_dim=64))
    assert huge.total_bytes > 8 << 30
    assert peak_bytes(lambda: made.append(KVMemory(huge, CPU)), CPU) < 64 << 20
    touched = peak_bytes(lambda: made[0].buffer[: 96 << 20].fill_(1), CPU)
    assert 64 << 20 < touched < 192 << 20


def test_a_scratch_layout_gives_every_row_and_kind_its_own_blocks() -> None:
    window = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_dim=8, dtype="float32", window=8)
    layout = scratch_layout([spec(), window, spec()], (9, 3))
    assert [g.layers for g in layout.groups] == [(0, 2), (1,)]
    assert layout.num_blocks == 1 + 2 * (3 + 1)
    memory = KVMemory(layout, CPU)
    assert [b.group for b in memory.bindings] == [0, 1, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for pages")
def test_the_first_blocks_are_made_ready_and_keep_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []
    monkeypatch.setattr("octavo.worker.memory.READY_BYTES", 1 << 20)
    monkeypatch.setattr("octavo.worker.memory.Populating", lambda memory: asked.append(memory) or Populating(memory))
    memory = KVMemory(block_major(3, 20_000, spec()), CPU)
    memory.bindings[0].key[1] = 7.0
    memory.make_ready()
    memory.make_ready()
    memory.close()
    memory.close()
    assert [len(part) for part in asked] == [1 << 20], "once, and no more than that"
    assert (memory.bindings[0].key[1] == 7).all()
