"""The Triton kernels, in the interpreter where there is no GPU: small awkward shapes against dense attention."""

import dataclasses

import numpy as np
import pytest
import torch

from lazyattention.ops import AttentionMetadata, LayerRotary, attention
from lazyattention.ops._tiles import TileShape, tiles_for
from lazyattention.ops.attend import AttendOptions
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.merge_states import merge_parts, merge_states
from lazyattention.ops.rotary import turn, turn_table
from lazyattention.ops.rotate.reference import copy_turned_reference
from lazyattention.ops.static_plan import StaticCapacity, StaticPlan
from tests.ops.decoding import Decoding
from tests.ops.layouts import random_step, rotary_of
from tests.ops.test_attend import CASES, KERNEL_CASES, NO_ROPE, dense_oracle
from tests.ops.test_device_plan_kernels import run_kernel_plan

pytest.importorskip("triton")

from lazyattention.ops import _turn_tables
from lazyattention.ops.chunk_prefill.kernel import chunk_prefill_triton
from lazyattention.ops.merge_states.kernel import merge_parts_triton, merge_states_triton
from lazyattention.ops.rotate.kernel import copy_turned_triton
from lazyattention.ops.shared_decode import op as shared_decode_op
from lazyattention.ops.shared_decode.kernel import shared_decode_triton
from lazyattention.ops.store_kv.kernel import store_kv_triton

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")


@pytest.fixture
def kernels(monkeypatch):
    """Run the kernels where CPU tensors would go to the references."""

    def merge(states, out, num_merges, tokens, starts, *, sinks=None):
        merge_parts_triton(states.outputs, states.lses, out, num_merges, tokens, starts, sinks=sinks)

    def prefill(*args, sinks=None):
        chunk_prefill_triton(*args, sinks)

    monkeypatch.setattr(shared_decode_op, "shared_decode", shared_decode_triton)
    for name, kernel in {
        "store_kv": store_kv_triton,
        "chunk_prefill": prefill,
        "merge_parts": merge,
    }.items():
        monkeypatch.setattr(attention, name, kernel)


def relative_error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", KERNEL_CASES)
@pytest.mark.parametrize("queries", [((0, 2), (5, 1), (1, 1)), ((3, 18),)], ids=["decode", "prefill"])
def test_kernels_equal_dense_attention(case, queries):
    step_options, rotary_options, attend_options = CASES[case]
    options = {"chunk_lens": (5, 33), "dtype": torch.float32, **step_options}
    step = random_step(np.random.default_rng(0), queries=queries, **options)
    rotary, options = rotary_of(step.q.shape[2], **rotary_options), AttendOptions(0.3, **attend_options)
    got = run_kernel_plan(step, rotary, options)
    assert relative_error(got, dense_oracle(step, rotary, options)) < 1e-5


@pytest.mark.usefixtures("kernels")
def test_static_plan_with_idle_tasks_of_every_kind():
    """Padded tasks, rows and merges do nothing; what is left of longer steps is not seen."""
    decoding = Decoding(4, block_size=4, num_blocks=200, chunk_lens=(40, 7), table_entries=1024)
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = (torch.randn(200, 4, 2, 16, generator=generator) for _ in range(2))
    exact = [(k_cache.double(), v_cache.double())]
    q = torch.randn(40, 4, 16, generator=generator)
    k, v = (torch.randn(40, 2, 16, generator=generator) for _ in range(2))
    rotary = rotary_of(16)
    spec = attention.layout_spec(q, LayerKV(k_cache, v_cache), 4, rotary, AttendOptions(0.3))
    capacity = StaticCapacity(
        num_tokens=40, max_rows=50, max_few_tasks=60, max_many_tasks=5, max_parts=300, max_prefill_tasks=12,
        max_tiles=20, max_masked=30,
    )  # fmt: skip
    static = StaticPlan(capacity, [spec], block_size=4, blocks=decoding.builder.blocks)
    metadata = AttentionMetadata(static.plan, [(k_cache, v_cache)], [rotary])
    decoding.add(2, 3)
    decoding.add(1, 5)
    for query_lens in ([33, 2], [1, 20], [1, 1]):
        step, scratch = decoding.step(np.array(query_lens))
        assert static.load(step, decoding.builder.blocks)
        got = attention.run(q, k, v, metadata, 0, softmax_scale=0.3)
        count = sum(query_lens)
        on_cpu = AttentionMetadata(scratch, exact, [rotary])
        want = attention.run(*(x[:count].double() for x in (q, k, v)), on_cpu, 0, softmax_scale=0.3)
        assert relative_error(got[:count], want) < 1e-5
        assert not got[count:].any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("head_dim", "num_q_heads", "num_kv_heads"), [(64, 3, 1), (80, 7, 1), (96, 2, 2), (128, 5, 1), (256, 2, 1)]
)
def test_head_dims_and_odd_groups(head_dim, num_q_heads, num_kv_heads):
    step = random_step(
        np.random.default_rng(1),
        chunk_lens=(18,),
        queries=((0, 1), (2, 20)),
        head_dim=head_dim,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        dtype=torch.float16,
    )
    rotary, options = rotary_of(head_dim), AttendOptions(head_dim**-0.5)
    assert relative_error(run_kernel_plan(step, rotary, options), dense_oracle(step, rotary, options)) < 2e-3


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("block_size", [1, 64])
@pytest.mark.parametrize("window", [None, 30])
def test_small_and_large_blocks_sinks_and_long_ranges(block_size, window):
    step = random_step(
        np.random.default_rng(2),
        chunk_lens=(150, 16),
        queries=((0, 1), (40, 17)),
        block_size=block_size,
        contiguous=block_size == 1,
        dtype=torch.float32,
    )
    rotary, options = rotary_of(16), AttendOptions(0.3, sliding_window=window)
    sinks = torch.tensor([0.5, -1.0, 2.0, 30.0])
    got = run_kernel_plan(step, rotary, options, sinks)
    assert relative_error(got, dense_oracle(step, rotary, options, sinks)) < 1e-5


@pytest.mark.usefixtures("kernels")
def test_layer_without_rope_is_not_turned():
    step, options = random_step(np.random.default_rng(3), dtype=torch.float32), AttendOptions(0.3)
    assert relative_error(run_kernel_plan(step, NO_ROPE, options), dense_oracle(step, NO_ROPE, options)) < 1e-5


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mutation", ["no turn", "wrong sign", "low table only", "empty slots are read"])
def test_mutations_are_seen(mutation, monkeypatch):
    step = random_step(np.random.default_rng(4), queries=((0, 1), (3, 18)), dtype=torch.float32, far=5000)
    rotary, options = rotary_of(16), AttendOptions(0.3)
    want = dense_oracle(step, rotary, options)
    used = rotary
    if mutation in ("no turn", "wrong sign"):
        used = LayerRotary(rotary.inv_freq * (0 if mutation == "no turn" else -1), 16)
    elif mutation == "low table only":
        tables = _turn_tables.turn_tables(rotary, torch.device("cpu")).clone()
        tables[_turn_tables.NUM_LOW :, 0], tables[_turn_tables.NUM_LOW :, 1] = 1.0, 0.0
        monkeypatch.setitem(_turn_tables._memo, (id(rotary.inv_freq), torch.device("cpu")), (tables, rotary.inv_freq))
    else:
        arrays = step.kernel_plan.arrays
        arrays.range_tokens[0] += 2
    assert relative_error(run_kernel_plan(step, used, options), want) > 0.02


@pytest.mark.parametrize("rotary_options", [{}, {"is_interleaved": True}, {"rotary_dim": 10, "rotary_start": 3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copy_turned_kernel_equals_reference(rotary_options, dtype):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, 4, 3, 20, generator=generator).to(dtype) for _ in range(2))
    want_k, want_v = k.clone(), v.clone()
    sources, targets = torch.tensor([0, 5, 35, 7, 5]), torch.tensor([8, 9, 17, 30, 31])
    deltas = torch.tensor([0, 1, -700, 200_001, 1023])
    rotary = rotary_of(20, **rotary_options)
    copy_turned_reference(want_k, want_v, sources, targets, deltas, rotary)
    copy_turned_triton(k, v, sources, targets, deltas, rotary, tile_rows=4)
    torch.testing.assert_close(k, want_k, rtol=2e-3, atol=1e-5 if dtype == torch.float32 else 2e-3)
    assert torch.equal(v, want_v)


@pytest.mark.parametrize("is_turned", [False, True])
def test_store_kernel_takes_head_major_keys_and_skips_minus_one(is_turned):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, 7, 20, generator=generator).transpose(0, 1) for _ in range(2))  # [7, 3, 20], head-major
    k_cache, v_cache = torch.zeros(6, 4, 3, 20), torch.zeros(6, 4, 3, 20)
    slots = torch.tensor([4, -1, 0, 23, 9, -1, 11])
    turns = torch.tensor([0, 1, -5, -3000, 77, 2, -1])
    rotary = rotary_of(20)
    store_kv_triton(k, v, k_cache, v_cache, slots, store_turns=turns if is_turned else None, rotary=rotary, tile_rows=4)
    want = turn(k, *turn_table(rotary.inv_freq, turns, torch.float32), rotary) if is_turned else k
    stored = slots >= 0
    torch.testing.assert_close(k_cache.view(-1, 3, 20)[slots[stored]], want[stored], rtol=1e-5, atol=1e-5)
    assert torch.equal(v_cache.view(-1, 3, 20)[slots[stored]], v[stored])
    written = torch.zeros(24, dtype=torch.bool).index_fill_(0, slots[stored], True)
    assert not k_cache.view(24, -1)[~written].any()
    assert not v_cache.view(24, -1)[~written].any()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_merge_kernel_equals_reference(has_sinks):
    generator = torch.Generator().manual_seed(0)
    outputs, lses = torch.randn(41, 3, 20, generator=generator), torch.randn(41, 3, generator=generator) * 30
    lses[4] = float("-inf")
    # Unordered, 36 parts for token 2, none for token 3, one part without keys for token 4.
    row_tokens = torch.cat([torch.tensor([0, 1, 0, 1, 4]), torch.full((36,), 2)])
    sinks = torch.tensor([0.5, -40.0, 40.0]) if has_sinks else None
    want, want_lse = merge_states(outputs, lses, row_tokens, 5, sinks)
    got, got_lse = merge_states_triton(outputs, lses, row_tokens, 5, sinks)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_lse, want_lse)


@pytest.mark.parametrize("num_q_heads", [1, 6])
def test_merge_kernel_leaves_tokens_beyond_the_real_merges(num_q_heads):
    generator = torch.Generator().manual_seed(1)
    outputs, lses = (
        torch.randn(13, num_q_heads, 20, generator=generator),
        torch.randn(13, num_q_heads, generator=generator),
    )
    sinks = torch.randn(num_q_heads, generator=generator)
    num_merges = torch.tensor([3], dtype=torch.int32)
    tokens, starts = (torch.tensor(x, dtype=torch.int32) for x in ([4, 0, 2, 3], [0, 4, 4, 13, 13]))
    want, got = (torch.full((5, num_q_heads, 20), 7.0) for _ in range(2))
    merge_parts(PartialStates(outputs, lses), want, num_merges, tokens, starts, sinks=sinks)
    merge_parts_triton(outputs, lses, got, num_merges, tokens, starts, sinks=sinks)
    torch.testing.assert_close(got, want)
    assert (got[[1, 3]] == 7.0).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("few", "many"),
    [
        (TileShape(16, 16, 2, 1), TileShape(128, 32, 8, 2, 1)),
        (TileShape(32, 32, 4, 2), TileShape(128, 16, 8, 3, 2)),
        (TileShape(64, 16, 4, 2), TileShape(64, 16, 4, 2)),
    ],
)
def test_tile_shapes_of_decode_change_nothing_but_the_time(few, many, monkeypatch):
    """A chunk 40 requests share, others for one to three, and texts that end inside a tile."""
    tiles = dataclasses.replace(tiles_for(torch.device("cpu"), 16, torch.float32), decode_few=few, decode_many=many)
    monkeypatch.setattr(attention, "tiles_for", lambda *_: tiles)
    decoding = Decoding(5, block_size=4, num_blocks=900, chunk_lens=(130, 40, 7), table_entries=4096)
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = (torch.randn(900, 4, 2, 16, generator=generator) for _ in range(2))
    for index in range(40):
        decoding.add(3 if index % 3 else 2, 1 + index % 9)
    step, scratch = decoding.step()
    q = torch.randn(40, 6, 16, generator=generator)
    k, v = (torch.randn(40, 2, 16, generator=generator) for _ in range(2))
    rotary = rotary_of(16)
    exact = AttentionMetadata(scratch, [(k_cache.double(), v_cache.double())], [rotary])
    want = attention.run(*(x.double() for x in (q, k, v)), exact, 0, softmax_scale=0.3)
    metadata = AttentionMetadata(decoding.builder.plan(step), [(k_cache, v_cache)], [rotary])
    assert relative_error(attention.run(q, k, v, metadata, 0, softmax_scale=0.3), want) < 1e-5


def test_turn_tables_reach_both_ends():
    rotary = rotary_of(16)
    tables = _turn_tables.turn_tables(rotary, torch.device("cpu")).double()
    for amount in (-_turn_tables.MAX_TURN, -1025, -1, 0, 1023, 1024, _turn_tables.MAX_TURN - 1):
        low = tables[amount & (_turn_tables.NUM_LOW - 1)]
        high = tables[_turn_tables.NUM_LOW + _turn_tables.NUM_HIGH // 2 + (amount >> _turn_tables.LOG2_NUM_LOW)]
        cos, sin = turn_table(rotary.inv_freq, torch.tensor([amount]), torch.float64)
        torch.testing.assert_close(low[0] * high[0] - low[1] * high[1], cos[0], rtol=0, atol=3e-7)
        torch.testing.assert_close(low[1] * high[0] + low[0] * high[1], sin[0], rtol=0, atol=3e-7)
