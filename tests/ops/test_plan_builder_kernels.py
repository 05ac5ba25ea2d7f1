"""Plans built from kept state equal plans made from scratch, step after step."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyattention.ops import AttentionMetadata, attention, plan_builder, run
from lazyattention.ops.attend import AttendOptions
from lazyattention.ops.attention import layout_spec
from lazyattention.ops.layer_kv import LayerKV
from lazyattention.ops.plan_builder import PlanBuilder, RequestRows
from lazyattention.ops.static_plan import StaticCapacity, StaticPlan
from tests.ops.decoding import Decoding
from tests.ops.layouts import rotary_of

BLOCK_SIZE, NUM_BLOCKS = 4, 400


class Layer:
    """One layer's memory and inputs; two copies, so that both plans store into their own."""

    def __init__(self, max_tokens=64):
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_BLOCKS, BLOCK_SIZE, 2, 16)
        k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        self.caches = [(k.clone(), v.clone()) for _ in range(2)]
        self.q = torch.randn(max_tokens, 4, 16, generator=generator, dtype=torch.float64)
        self.k, self.v = (torch.randn(max_tokens, 2, 16, generator=generator, dtype=torch.float64) for _ in range(2))
        self.rotary = rotary_of(16)

    def run(self, plan, which, window=None):
        metadata = AttentionMetadata(plan, [self.caches[which]], [self.rotary])
        count = plan.num_tokens
        return run(
            self.q[:count], self.k[:count], self.v[:count], metadata, 0, softmax_scale=0.3, sliding_window=window
        )

    def spec(self, window=None):
        return layout_spec(self.q, LayerKV(*self.caches[0]), BLOCK_SIZE, self.rotary, AttendOptions(0.3, window))


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    actions=st.lists(st.sampled_from(["decode", "decode", "decode", "arrive", "leave", "prefill"]), max_size=12),
    ahead=st.lists(st.booleans(), min_size=13, max_size=13),
    keys_turned=st.booleans(),
)
def test_any_course_of_steps_equals_plans_from_scratch(seed, actions, ahead, keys_turned):
    """Some steps are assembled ahead, and come so or otherwise."""
    decoding = Decoding(
        seed, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(5, 16, 33, 1), keys_turned=keys_turned
    )
    layer = Layer()
    decoding.add(2, 6)
    decoding.add(4, 1)
    for action, is_ahead in zip([*actions, "decode"], ahead, strict=False):
        query_lens = None
        if is_ahead:
            decoding.step_ahead()
        if action == "arrive" and len(decoding.requests) < 6:
            decoding.add(int(decoding.rng.integers(0, 5)), int(decoding.rng.integers(0, 9)))
        elif action == "leave" and len(decoding.requests) > 1:
            decoding.remove(next(iter(decoding.requests)))
        elif action == "prefill":
            query_lens = decoding.rng.integers(1, 9, len(decoding.requests))
        step, scratch = decoding.step(query_lens)
        got = layer.run(decoding.builder.plan(step), 0)
        torch.testing.assert_close(got, layer.run(scratch, 1), rtol=1e-6, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    courses=st.lists(st.lists(st.integers(0, 7), max_size=10, unique=True), min_size=2, max_size=6),
    most=st.sampled_from([1, 3]),
)
def test_rows_kept_between_steps_are_those_of_the_requests_there_are(courses, most):
    """Requests leave from anywhere, come back, and change their order, decoding or not."""
    builder = PlanBuilder(block_size=BLOCK_SIZE, device="cpu", table_entries=1 << 10)
    ids = [builder.add_range([i], 3, 0) for i in range(9)]
    requests = [RequestRows(np.array(ids[: i % 4 + 1]) + i % 5, np.arange(i % 4 + 1) * 10 + i) for i in range(8)]
    for course in courses:
        chosen = [requests[i] for i in course]
        lens = np.array([i % most + 1 for i in course], np.int64)
        arrays = builder.step(chosen, lens, np.arange(lens.sum()), np.zeros(lens.sum(), np.int64)).arrays
        starts = np.cumsum(lens) - lens
        want = [
            (range_id, start, size, delta)
            for request, start, size in zip(chosen, starts.tolist(), lens.tolist(), strict=True)
            for range_id, delta in zip(request.range_ids.tolist(), request.deltas.tolist(), strict=True)
        ]
        groups = (arrays.group_ranges, arrays.group_starts, arrays.group_sizes, arrays.group_deltas)
        assert list(zip(*(a.tolist() for a in groups), strict=True)) == want


def test_requests_may_come_in_any_sequence():
    builder = PlanBuilder(block_size=BLOCK_SIZE, device="cpu", table_entries=64)
    ids = [builder.add_range([i], 3, 0) for i in range(2)]
    requests = tuple(RequestRows(np.array([i]), np.zeros(1, np.int64)) for i in ids)
    for lens in ([2, 1], [1, 1]):
        arrays = builder.step(requests, np.array(lens), np.arange(sum(lens)), np.arange(sum(lens))).arrays
        assert arrays.group_ranges.tolist() == ids
        assert arrays.group_sizes.tolist() == lens


def test_device_tasks_are_kept_while_only_positions_change():
    decoding = Decoding(0, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(5, 16))
    layer = Layer()
    decoding.add(2, 2, max_tokens=40)  # its block is full after two steps; the next lies elsewhere
    decoding.add(1, 6, max_tokens=40)
    plans = []
    for _ in range(3):
        step, scratch = decoding.step()
        plans.append(decoding.builder.plan(step))
        torch.testing.assert_close(layer.run(plans[-1], 0), layer.run(scratch, 1), rtol=1e-6, atol=1e-6)
    assert plans[1].device_plan(layer.spec()) is plans[2].device_plan(layer.spec())
    decoding.add(2, 3)
    assert decoding.builder.plan(decoding.step()[0]).device_plan(layer.spec()) is not plans[2].device_plan(layer.spec())


def test_a_step_assembled_ahead_is_there_when_it_comes(monkeypatch):
    """Each text's block is full when it is, the next one lies elsewhere; one layout does for both."""
    monkeypatch.setattr(plan_builder, "_MAX_STEPS_PER_LAYOUT", 3)  # steps; one that was assembled ahead is none yet
    decoding = Decoding(0, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(5, 16), table_entries=4096)
    layer = Layer()
    decoding.add(2, 2, max_tokens=40)
    key = decoding.add(1, 6, max_tokens=40)
    enough = {"num_tokens": 3, "max_rows": 12, "max_few_tasks": 20, "max_many_tasks": 0, "max_parts": 30}
    static = StaticPlan(StaticCapacity(**enough), [layer.spec()], block_size=BLOCK_SIZE, blocks=decoding.builder.blocks)

    def run_next():
        step, scratch = decoding.step()
        assert static.load(step, decoding.builder.blocks)
        count = len(decoding.requests)
        torch.testing.assert_close(layer.run(static.plan, 0)[:count], layer.run(scratch, 1), rtol=1e-6, atol=1e-6)
        return step.version

    prompts = decoding.step(np.array([2, 2]))[0]
    ahead = decoding.step_ahead()
    assert ahead.version > prompts.version
    assert static.load_layout(ahead)
    assert not (ahead.slot_mapping >= 0).any()
    assert run_next() == ahead.version
    assert decoding.step_ahead() is None  # nothing new
    assert run_next() == ahead.version
    assert run_next() == ahead.version
    assert run_next() > ahead.version
    decoding.remove(key)
    decoding.add(2, 3, max_tokens=40)
    left = decoding.step_ahead()
    assert static.load_layout(left)
    decoding.add(1, 7, max_tokens=40)  # another one after all
    assert run_next() > left.version
    for _ in range(9):
        decoding.step_ahead()
        run_next()


def test_full_block_tables_move_and_plans_follow():
    decoding = Decoding(0, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(60,), table_entries=4)
    layer = Layer()
    for _ in range(5):
        decoding.add(1, 9)
        step, scratch = decoding.step()
        got = layer.run(decoding.builder.plan(step), 0)
        torch.testing.assert_close(got, layer.run(scratch, 1), rtol=1e-6, atol=1e-6)


def test_block_tables_that_move_for_a_range_nobody_reads_yet_are_followed():
    decoding = Decoding(0, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(16,), table_entries=16)
    layer = Layer()
    decoding.add(1, 3, max_tokens=40)
    for number in range(9):
        if number == 4:
            decoding.builder.add_range(range(64), 1, 0)
        step, scratch = decoding.step()
        got = layer.run(decoding.builder.plan(step), 0)
        torch.testing.assert_close(got, layer.run(scratch, 1), rtol=1e-6, atol=1e-6)


def test_nothing_is_left_of_a_range_whose_id_is_used_again():
    builder = PlanBuilder(block_size=BLOCK_SIZE, device="cpu")
    old = builder.add_range([5, 6], 7, 2, keys_turned=False)
    builder.drop_range(old)
    new = builder.add_range([9], 4, 0)
    rows, one = [RequestRows(np.array([new]), np.zeros(1, np.int64))], np.ones(1, np.int64)

    def described():
        arrays = builder.step(rows, one, one, one).arrays
        own = (arrays.range_tokens, arrays.range_firsts, arrays.range_turned, arrays.range_slots)
        return [array[new] for array in own]

    assert new == old
    assert described() == [4, 0, True, 9 * BLOCK_SIZE]
    builder.grow_range(new, 5, [4])
    assert described() == [5, 0, True, -1]


@pytest.mark.parametrize("window", [None, 12])
def test_static_plan_runs_each_loaded_step_in_place(window):
    decoding = Decoding(1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(5, 16, 33), table_entries=4096)
    layer = Layer()
    capacity = StaticCapacity(num_tokens=6, max_rows=40, max_few_tasks=60, max_many_tasks=60, max_parts=200)
    static = StaticPlan(capacity, [layer.spec(window)], block_size=BLOCK_SIZE, blocks=decoding.builder.blocks)
    pointers = [
        static.plan.positions.data_ptr(),
        static.plan.device_plan(layer.spec(window)).decode[0].tasks.data_ptr(),
    ]
    keys = [decoding.add(2, 5)]
    for round_ in range(9):
        if round_ in (2, 4, 5):
            keys.append(decoding.add(3, round_))
        if round_ == 7:
            decoding.remove(keys.pop(0))
        step, scratch = decoding.step()
        assert static.load(step, decoding.builder.blocks)
        got = layer.run(static.plan, 0, window)
        torch.testing.assert_close(got[: len(keys)], layer.run(scratch, 1, window), rtol=1e-6, atol=1e-6)
        assert not got[len(keys) :].any()
    assert pointers == [
        static.plan.positions.data_ptr(),
        static.plan.device_plan(layer.spec(window)).decode[0].tasks.data_ptr(),
    ]


def test_static_plan_refuses_what_does_not_fit():
    decoding = Decoding(1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(5, 16), table_entries=4096)
    layer = Layer()
    decoding.add(2, 5)
    decoding.add(2, 5)
    step, _ = decoding.step()
    enough = {"num_tokens": 2, "max_rows": 6, "max_few_tasks": 20, "max_many_tasks": 0, "max_parts": 20}
    for too_small in ("num_tokens", "max_rows", "max_few_tasks", "max_parts"):
        capacity = StaticCapacity(**{**enough, too_small: 1})
        static = StaticPlan(capacity, [layer.spec()], block_size=BLOCK_SIZE, blocks=decoding.builder.blocks)
        for _ in range(2):  # nor when it is asked again
            assert not static.load(step, decoding.builder.blocks), too_small
        if too_small != "num_tokens":
            assert getattr(static.capacity_for(step), too_small) > 1
    static = StaticPlan(StaticCapacity(**enough), [layer.spec()], block_size=BLOCK_SIZE, blocks=decoding.builder.blocks)
    assert static.load(step, decoding.builder.blocks)
    assert static.capacity_for(step) == StaticCapacity(**enough)
    assert not static.load(step, decoding.builder.blocks.clone())
    turning = dataclasses.replace(step, store_turns=np.array([7, 9]))
    assert not static.load(turning, decoding.builder.blocks)
    static = StaticPlan(
        StaticCapacity(**enough), [layer.spec()], block_size=BLOCK_SIZE, blocks=decoding.builder.blocks,
        has_store_turns=True,
    )  # fmt: skip
    for one, want in ((turning, [7, 9]), (step, [0, 0])):
        assert static.load(one, decoding.builder.blocks)
        assert static.plan.store_turns.tolist() == want
    unturned = Decoding(1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(5, 16), table_entries=4096,
                        keys_turned=False)  # fmt: skip
    unturned.add(2, 5)
    step, _ = unturned.step()
    for has_unturned in (False, True):
        capacity = StaticCapacity(**enough, has_unturned=has_unturned)
        static = StaticPlan(capacity, [layer.spec()], block_size=BLOCK_SIZE, blocks=unturned.builder.blocks)
        assert static.load(step, unturned.builder.blocks) == has_unturned


def test_inputs_go_along_with_a_step_and_nothing_is_left_of_the_last_ones():
    decoding = Decoding(1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(5,), table_entries=4096)
    layer = Layer()
    decoding.add(1, 5)
    capacity = StaticCapacity(num_tokens=2, max_rows=6, max_few_tasks=20, max_many_tasks=0, max_parts=20)
    blocks = decoding.builder.blocks
    static = StaticPlan(capacity, [layer.spec()], block_size=BLOCK_SIZE, blocks=blocks, num_inputs=3)
    for inputs, want in ((np.array([7, 8, 9]), [7, 8, 9]), (None, [0, 0, 0])):
        step, scratch = decoding.step()
        assert static.load(step, blocks, inputs)
        assert static.inputs.tolist() == want
        torch.testing.assert_close(layer.run(static.plan, 0)[:1], layer.run(scratch, 1), rtol=1e-6, atol=1e-6)


def test_tables_are_sent_whole_whether_close_together_or_far_apart(monkeypatch):
    for most in (1 << 14, 0):
        monkeypatch.setattr(plan_builder, "_MAX_SENT_ENTRIES", most)
        builder = PlanBuilder(block_size=BLOCK_SIZE, device="cpu", table_entries=64)
        ids = [builder.add_range(range(i, i + 3), 9, 0, max_tokens=40) for i in range(4)]
        builder._send_tables()
        builder.grow_range(ids[0], 14, [90])
        builder.grow_range(ids[3], 14, [91])
        builder._send_tables()
        assert builder.blocks.tolist() == builder._host_blocks.tolist()
        assert [int(builder.blocks[builder._ranges.tables[i] + 3]) for i in (ids[0], ids[3])] == [90, 91]


def prefill_capacity(**changes):
    enough = {"num_tokens": 90, "max_rows": 200, "max_few_tasks": 300, "max_many_tasks": 60, "max_parts": 3000}
    room = {"max_prefill_tasks": 60, "max_apart_tasks": 50, "max_tiles": 100, "max_masked": 200}
    return StaticCapacity(**{**enough, **room, **changes})


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("kernel_for_unmasked_tiles", [False, True])
def test_static_plan_runs_prefill_and_decode_in_place(monkeypatch, window, kernel_for_unmasked_tiles):
    """One plan, many steps: long questions, short ones, decodes, all at once; contiguous and scattered."""
    monkeypatch.setattr(attention, "has_unmasked_prefill", lambda *_: kernel_for_unmasked_tiles and window is None)
    decoding = Decoding(
        2, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(150, 7, 40), table_entries=4096, contiguous=True
    )
    layer = Layer(90)
    spec = layer.spec(window)
    static = StaticPlan(prefill_capacity(), [spec], block_size=BLOCK_SIZE, blocks=decoding.builder.blocks)
    pointers = [tensor.data_ptr() for tensor in tensors_of(static.plan.device_plan(spec))]
    keys, num_prefills, num_apart = [decoding.add(3, 5)], 0, 0
    for query_lens in ([33], [1], [20, 1], [1, 1], [40, 3, 17], [1, 50, 1, 30], [1, 2, 3, 1]):
        while len(keys) < len(query_lens):
            keys.append(decoding.add(len(keys) % 4, len(keys)))
        if len(query_lens) == 3:
            decoding.rng.shuffle(decoding.free)
        step, scratch = decoding.step(np.array(query_lens))
        assert static.load(step, decoding.builder.blocks)
        plan = static.plan.device_plan(spec)
        num_prefills += int((plan.prefill[0].tasks[:, 1] > 0).any())
        num_apart += int((plan.prefill[0].apart[:, 1] > 0).any())
        got = layer.run(static.plan, 0, window)
        count = sum(query_lens)
        torch.testing.assert_close(got[:count], layer.run(scratch, 1, window), rtol=1e-6, atol=1e-6)
        assert not got[count:].any()
    assert num_prefills == 4
    assert (num_apart > 0) == (kernel_for_unmasked_tiles and window is None)
    assert pointers == [tensor.data_ptr() for tensor in tensors_of(static.plan.device_plan(spec))]


def tensors_of(device_plan):
    (prefill,) = device_plan.prefill
    decode = [x for tasks in device_plan.decode for x in (tasks.tasks, tasks.rows, tasks.num_tasks)]
    return [*decode, prefill.tasks, prefill.apart, prefill.tiles, prefill.segments, prefill.masked, prefill.part_bases,
            device_plan.merge_tokens, device_plan.merge_starts]  # fmt: skip


def test_static_plan_with_room_for_prefill_refuses_what_does_not_fit():
    decoding = Decoding(1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(50, 16), table_entries=4096)
    layer = Layer(90)
    decoding.add(2, 5)
    decoding.add(2, 5)
    step, scratch = decoding.step(np.array([40, 3]))
    for too_small in ("max_rows", "max_few_tasks", "max_parts", "max_prefill_tasks", "max_tiles", "max_masked"):
        capacity = prefill_capacity(**{too_small: 1})
        static = StaticPlan(capacity, [layer.spec()], block_size=BLOCK_SIZE, blocks=decoding.builder.blocks)
        assert not static.load(step, decoding.builder.blocks), too_small
        grown = static.capacity_for(step)
        assert getattr(grown, too_small) > 1
        static = StaticPlan(grown, [layer.spec()], block_size=BLOCK_SIZE, blocks=decoding.builder.blocks)
        assert static.load(step, decoding.builder.blocks), too_small
    got = layer.run(static.plan, 0)
    torch.testing.assert_close(got[:43], layer.run(scratch, 1), rtol=1e-6, atol=1e-6)
    unturned = Decoding(1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(50, 16), table_entries=4096,
                        keys_turned=False)  # fmt: skip
    unturned.add(2, 5)
    capacity = prefill_capacity(has_unturned=True)
    static = StaticPlan(capacity, [layer.spec()], block_size=BLOCK_SIZE, blocks=unturned.builder.blocks)
    assert not static.load(unturned.step(np.array([40]))[0], unturned.builder.blocks)


def test_without_room_for_prefill_all_rows_go_through_shared_decode():
    decoding = Decoding(1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_lens=(50, 16), table_entries=4096)
    layer = Layer(90)
    decoding.add(2, 5)
    step, scratch = decoding.step(np.array([40]))
    capacity = prefill_capacity(max_prefill_tasks=0, max_apart_tasks=0, max_tiles=0, max_masked=0)
    static = StaticPlan(capacity, [layer.spec()], block_size=BLOCK_SIZE, blocks=decoding.builder.blocks)
    assert static.load(step, decoding.builder.blocks)
    assert static.plan.device_plan(layer.spec()).prefill == ()
    torch.testing.assert_close(layer.run(static.plan, 0)[:40], layer.run(scratch, 1), rtol=1e-6, atol=1e-6)
