"""A recorded pass gives what the model gives, bit by bit, and what cannot be recorded runs as it is (CMP-10)."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo.forward.context import BatchShape, ForwardContext, GroupPlan, LayerBinding, current
from octavo.ops import reference
from octavo.worker.batch import InputBatch, StepInputs
from octavo.worker.recorded import BufferPool, RecordedForward
from octavo.worker.seams import EagerForward

native = pytest.importorskip("octavo.ops.native")
norms = pytest.importorskip("octavo.ops.native_norms")
pointwise = pytest.importorskip("octavo.ops.native_pointwise")
turning = pytest.importorskip("octavo.ops.native_rotary")
gather = pytest.importorskip("octavo.ops.native_gather")

MOST, HIDDEN, HEADS, DIM = 40, 48, 3, 16


class Small(nn.Module):
    """Every small operator in the order in which a model uses them; attention writes its keys and passes queries on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(30, HIDDEN)
        self.angles = torch.randn(MOST * 2, DIM)
        self.weight = torch.rand(HIDDEN)
        self.runs = 0

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self.runs += 1
        x, cos_sin = gather.gather_rows(self.table, token_ids), gather.gather_rows(self.angles, positions)
        residual = x
        for binding in current().layers:
            x, residual = norms.add_rms_norm(x, residual, self.weight, 1e-5)
            query, key = (part.view(len(x), HEADS, DIM) for part in (x, norms.rms_norm(x, self.weight, 1e-5)))
            query, key = turning.rotary(query, key, cos_sin)
            turning.write_kv(key, query, binding.key, binding.value, current().groups[binding.group].slot_mapping)
            x = pointwise.silu_mul(torch.empty_like(x).view(len(x), -1)) if self.broken(x) else query.flatten(1)
        return norms.add_rms_norm(x, residual, self.weight, 1e-5)[0]

    def broken(self, x: Tensor) -> bool:
        return False

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Rig:
    """Step buffers and KV memory for the small model."""

    def __init__(self, model: nn.Module, num_layers: int = 3) -> None:
        self.model = model
        self.tokens, self.positions, self.slots = (torch.zeros(MOST, dtype=torch.int64) for _ in range(3))
        self.inputs = StepInputs(token_ids=self.tokens, positions=self.positions, slot_mappings=(self.slots,))
        self.layers = self.new_memory(num_layers)
        self.plan = object()

    @staticmethod
    def new_memory(num_layers: int) -> tuple[LayerBinding, ...]:
        pair = [torch.zeros(12, HEADS, 4, DIM) for _ in range(2 * num_layers)]
        return tuple(LayerBinding(key=k, value=v, group=0) for k, v in zip(pair[::2], pair[1::2], strict=True))

    def batch(self, count: int, seed: int = 0) -> tuple[InputBatch, ForwardContext]:
        numbers = np.random.default_rng(seed)
        self.tokens[:count] = torch.from_numpy(numbers.integers(0, 30, count))
        self.positions[:count] = torch.from_numpy(numbers.integers(0, MOST, count))
        self.slots[:count] = torch.from_numpy(numbers.permutation(44)[:count]) + 4
        nothing = np.zeros(0, dtype=np.int32)
        shape = BatchShape(num_tokens=count)
        batch = InputBatch(
            slots=nothing, num_computed_tokens=nothing, num_scheduled_tokens=nothing, query_starts=nothing, sample_rows=nothing.astype(np.int64),
            sample_index=torch.zeros(0, dtype=torch.int64), sample_lengths=nothing.astype(np.int64), groups=(),
            token_ids=self.tokens[:count], positions=self.positions[:count], slot_mappings=(self.slots[:count],),
            inputs=self.inputs, shape=shape,
        )  # fmt: skip
        groups = (GroupPlan(plan=self.plan, slot_mapping=self.slots[:count]),)
        return batch, ForwardContext(shape=shape, groups=groups, layers=self.layers)

    def kv(self) -> list[Tensor]:
        return [x.clone() for binding in self.layers for x in (binding.key, binding.value)]

    def clear(self) -> None:
        for binding in self.layers:
            binding.key.zero_()
            binding.value.zero_()


@pytest.fixture(params=[False, True], ids=["plain", "inference mode"], autouse=True)
def mode(request):
    with torch.inference_mode(request.param):
        yield


@pytest.mark.parametrize("level", native.levels())
def test_recorded_is_eager_in_bits_for_every_row_count(level):
    native.use_level(level)
    try:
        rig = Rig(Small())
        forward = RecordedForward(native.core.Tape)
        for count in (5, 1, *range(1, MOST + 1), 3):
            batch, context = rig.batch(count, seed=count)
            rig.clear()
            want, want_kv = EagerForward().run(rig.model, batch, context), rig.kv()
            rig.clear()
            got = forward.run(rig.model, batch, context)
            assert torch.equal(got, want)
            assert all(torch.equal(a, b) for a, b in zip(rig.kv(), want_kv, strict=True))
        assert not forward.notes and forward.recording is not None
        before = rig.model.runs
        forward.run(rig.model, *rig.batch(7))
        assert rig.model.runs == before, "a replay runs no Python of the model"
    finally:
        native.use_level(native.levels()[-1])


def test_two_threads_give_the_same_bits():
    before = torch.get_num_threads()
    rig, forward = Rig(Small()), RecordedForward(native.core.Tape)
    try:
        answers = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for count in (MOST, MOST, MOST):
                answers.append(forward.run(rig.model, *rig.batch(count)).clone())
        assert all(torch.equal(answers[0], other) for other in answers)
    finally:
        torch.set_num_threads(before)


def test_intermediate_values_share_a_few_buffers():
    rig, forward = Rig(Small(), num_layers=60), RecordedForward(native.core.Tape)
    forward.run(rig.model, *rig.batch(3))
    few, first = forward.held_bytes, Rig(Small(), num_layers=3)
    forward.forget()
    assert forward.held_bytes == 0
    forward.run(first.model, *first.batch(3))
    assert forward.held_bytes == few > MOST * HIDDEN * 4 * 3
    assert few < 12 * MOST * HIDDEN * 4 + 2**14, "as many as live at once, not as many as there are layers"


def test_new_memory_or_buffers_are_recorded_anew():
    rig, forward = Rig(Small()), RecordedForward(native.core.Tape)
    forward.run(rig.model, *rig.batch(4))
    first = forward.recording
    old = rig.kv()
    rig.layers = rig.new_memory(3)
    forward.run(rig.model, *rig.batch(4))
    assert forward.recording is not first and not forward.notes
    assert rig.layers[0].key.any() and all(torch.equal(a, b) for a, b in zip(rig.kv(), old, strict=True))


class Computes(Small):
    """Calls a torch operator."""

    def broken(self, x: Tensor) -> bool:
        return bool((x + 1).numel() < 0)


class Guesses(Small):
    """Does another thing for few rows: what is recorded for many is wrong for them."""

    def broken(self, x: Tensor) -> bool:
        return False

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = super().forward(token_ids, positions)
        return norms.rms_norm(hidden, self.weight, 1e-5) if len(hidden) > 20 else hidden


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Computes, "the model runs operator by operator: aten.add.Tensor is no native operator"),
        (Guesses, "its recording gave other values than the model itself"),
    ],
)
def test_what_cannot_be_replayed_runs_as_it_is_and_says_why(model, why):
    rig, forward = Rig(model()), RecordedForward(native.core.Tape)
    for count in (4, 1, 9):
        batch, context = rig.batch(count)
        assert torch.equal(forward.run(rig.model, batch, context), EagerForward().run(rig.model, batch, context))
    (note,) = forward.notes
    assert why in note
    assert forward.held_bytes == 0


def test_a_backend_that_plans_anew_each_step_is_not_replayed():
    rig, forward = Rig(Small()), RecordedForward(native.core.Tape)
    for count in (4, 5):
        rig.plan = object()
        batch, context = rig.batch(count)
        assert torch.equal(forward.run(rig.model, batch, context), EagerForward().run(rig.model, batch, context))
    assert "another plan each step" in forward.notes[0]


def test_reshaping_that_copies_is_found():
    class Copies(Small):
        def broken(self, x: Tensor) -> bool:
            return x.view(len(x), HEADS, DIM).transpose(1, 2).reshape(len(x), -1) is None

    rig, forward = Rig(Copies()), RecordedForward(native.core.Tape)
    forward.run(rig.model, *rig.batch(4))
    assert "aten.reshape" in forward.notes[0] or "aten.clone" in forward.notes[0]


def test_an_error_of_the_model_is_raised_and_native_calls_run_again():
    class Fails(Small):
        def broken(self, x: Tensor) -> bool:
            raise KeyError("mine")

    rig, forward = Rig(Fails()), RecordedForward(native.core.Tape)
    with pytest.raises(KeyError, match="mine"):
        forward.run(rig.model, *rig.batch(4))
    x = torch.randn(2, HIDDEN)
    torch.testing.assert_close(norms.rms_norm(x, x[0], 1e-5), reference.rms_norm(x, x[0], 1e-5))


def test_the_pool_gives_memory_again_only_when_no_view_of_it_lives():
    pool = BufferPool()
    first = pool.empty((8, 16), torch.float32)
    view = first.view(-1)[3:5]
    second = pool.empty((8, 16), torch.float32)
    assert second.data_ptr() != first.data_ptr()
    address = first.data_ptr()
    del first
    third = pool.empty((8, 16), torch.float32)
    assert third.data_ptr() not in (address, second.data_ptr())
    del view
    half = pool.empty((4, 16), torch.bfloat16)
    assert half.data_ptr() == address and half.dtype == torch.bfloat16
    assert pool.empty((0, 4), torch.float32).shape == (0, 4)


def test_the_pool_takes_little_more_than_what_lives_at_once_whatever_the_sizes():
    pool, living, most, now = BufferPool(), [], 0, 0
    sizes = torch.randint(1, 3_000_000, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    for number, size in enumerate(sizes):
        tensor = pool.empty((size,), torch.uint8)
        tensor.fill_(number % 251)
        living.append((number, tensor))
        now += size
        most = max(most, now)
        del tensor
        if len(living) > 6:
            ended, tensor = living.pop(number % 5)
            assert (tensor == ended % 251).all(), "nobody else wrote there"
            now -= len(tensor)
            del tensor
    assert most <= pool.num_bytes < 2 * most


def test_the_pool_holds_a_tensor_larger_than_its_chunks():
    pool = BufferPool()
    large = [pool.empty((100 << 20,), torch.uint8) for _ in range(2)]
    assert abs(large[0].data_ptr() - large[1].data_ptr()) >= 100 << 20 and pool.num_bytes >= 200 << 20


def test_a_tape_says_what_each_call_is_and_what_it_takes():
    rig, forward = Rig(Small()), RecordedForward(native.core.Tape)
    forward.run(rig.model, *rig.batch(4))
    tape = forward.recording.tape
    names = tape.names()
    assert names[:2] == ["gather_rows", "gather_rows"] and names.count("rotary") == 3
    seconds = tape.timed_replay(4)
    assert len(seconds) == len(names) and all(0 <= s < 1 for s in seconds)
