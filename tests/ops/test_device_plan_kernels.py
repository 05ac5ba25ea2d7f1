"""The device plan says the right thing: run in plain PyTorch, it is attention over all visible keys at true positions."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyattention.ops import AttentionMetadata, LayerRotary, attention, run
from lazyattention.ops._layout import LayoutSpec, stable_order
from lazyattention.ops._tiles import TileShape
from lazyattention.ops.attend import AttendOptions, attend
from lazyattention.ops.device_plan import lay_out
from tests.ops.layouts import random_step, rotary_of
from tests.ops.test_attend import CASES, KERNEL_CASES, NO_ROPE, dense_oracle


def run_kernel_plan(step, rotary, options, sinks=None, plan=None):
    """Run a step whose KV is in the cache already through the path the GPU takes."""
    plan = plan or step.kernel_plan
    metadata = AttentionMetadata(plan, [(step.k_cache, step.v_cache)], [rotary])
    new_k = torch.full((plan.num_tokens, *step.k_cache.shape[2:]), float("nan"), dtype=step.k_cache.dtype)
    new_v = torch.full((plan.num_tokens, *step.v_cache.shape[2:]), float("nan"), dtype=step.v_cache.dtype)
    return run(
        step.q,
        new_k,
        new_v,
        metadata,
        0,
        softmax_scale=options.softmax_scale,
        sliding_window=options.sliding_window,
        logit_softcap=options.logit_softcap,
        sinks=sinks,
    )


@pytest.mark.parametrize("case", KERNEL_CASES)
@pytest.mark.parametrize("queries", [((0, 4), (1, 1), (2, 7)), ((3, 41), (0, 1), (150, 2))], ids=["few", "many"])
def test_plan_for_kernels_equals_dense_attention(case, queries):
    step_options, rotary_options, attend_options = CASES[case]
    step = random_step(np.random.default_rng(0), queries=queries, **step_options)
    rotary, options = rotary_of(step.q.shape[2], **rotary_options), AttendOptions(0.3, **attend_options)
    got = run_kernel_plan(step, rotary, options)
    torch.testing.assert_close(got, dense_oracle(step, rotary, options), rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    chunk_lens=st.lists(st.integers(0, 90), max_size=4),
    queries=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 9, 33, 50])), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 4, 16, 64]),
    contiguous=st.booleans(),
    keys_turned=st.booleans(),
    window=st.none() | st.integers(1, 90),
)
def test_any_plan_for_kernels_equals_dense_attention(
    seed, chunk_lens, queries, block_size, contiguous, keys_turned, window
):
    step = random_step(
        np.random.default_rng(seed),
        chunk_lens=tuple(chunk_lens),
        queries=tuple(queries),
        block_size=block_size,
        contiguous=contiguous,
        keys_turned=keys_turned,
    )
    rotary, options = rotary_of(16), AttendOptions(0.3, sliding_window=window)
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64)
    got = run_kernel_plan(step, rotary, options, sinks)
    torch.testing.assert_close(got, dense_oracle(step, rotary, options, sinks), rtol=1e-6, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    chunk_lens=st.lists(st.integers(0, 130), max_size=4),
    queries=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 9, 33, 70])), min_size=1, max_size=3),
)
def test_unmasked_tiles_in_tasks_of_their_own(seed, chunk_lens, queries):
    step = random_step(
        np.random.default_rng(seed), chunk_lens=tuple(chunk_lens), queries=tuple(queries), contiguous=True
    )
    rotary, options = rotary_of(16), AttendOptions(0.3)
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "has_unmasked_prefill", lambda *_: True)
        got = run_kernel_plan(step, rotary, options, sinks)
    torch.testing.assert_close(got, dense_oracle(step, rotary, options, sinks), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("scattered_chunk", "has_apart"), [(1, True), (0, False)])
def test_a_few_scattered_tiles_do_not_keep_the_others_from_their_kernel(scattered_chunk, has_apart, window):
    step = random_step(
        np.random.default_rng(0), chunk_lens=(150, 40, 130), queries=((3, 40), (0, 20)), contiguous=True,
        scattered_chunk=scattered_chunk,
    )  # fmt: skip
    rotary, options = rotary_of(16), AttendOptions(0.3, sliding_window=window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "has_unmasked_prefill", lambda *_: True)
        got = run_kernel_plan(step, rotary, options)
    torch.testing.assert_close(got, dense_oracle(step, rotary, options), rtol=1e-6, atol=1e-6)
    (device_plan,) = step.kernel_plan._device_plans.values()
    assert (len(device_plan.prefill[0].apart) > 0) == (has_apart and window is None)


def test_new_keys_are_stored_turned_back_and_seen():
    """A step that stores its own keys unturned reads what a step with turned keys reads."""
    rng = np.random.default_rng(3)
    turned = random_step(rng, chunk_lens=(), queries=((0, 20),), keys_turned=True)
    plan, rotary, options = turned.kernel_plan, rotary_of(16), AttendOptions(0.3)
    slots = turned.plan.items[0].slots
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(20, *turned.k_cache.shape[2:], generator=generator, dtype=torch.float64)
    v = torch.randn(20, *turned.v_cache.shape[2:], generator=generator, dtype=torch.float64)
    outputs = []
    for keys_turned in (True, False):
        arrays = dataclasses.replace(plan.arrays, range_turned=np.full(1, keys_turned))
        stored = dataclasses.replace(
            plan,
            arrays=arrays,
            slot_mapping=slots,
            store_turns=None if keys_turned else -plan.positions,
            _device_plans={},
        )
        metadata = AttentionMetadata(stored, [(turned.k_cache.clone(), turned.v_cache.clone())], [rotary])
        outputs.append(run(turned.q, k, v, metadata, 0, softmax_scale=options.softmax_scale))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)


def test_layer_without_rope_is_not_turned():
    step, options = random_step(np.random.default_rng(1)), AttendOptions(0.3)
    got = run_kernel_plan(step, NO_ROPE, options)
    torch.testing.assert_close(got, dense_oracle(step, NO_ROPE, options), rtol=1e-6, atol=1e-6)


def test_rows_of_several_requests_share_a_task_and_long_ranges_are_cut():
    step = random_step(np.random.default_rng(5), chunk_lens=(40, 700), queries=((0, 1), (3, 1), (0, 1)))
    spec = LayoutSpec(
        num_kv_heads=2,
        group=2,
        block_size=4,
        sliding_window=None,
        decode_few=TileShape(4, 16, 4, 1),
        decode_many=TileShape(16, 16, 4, 1),
        decode_unturned=TileShape(16, 16, 4, 1),
        prefill=TileShape(32, 16, 4, 1),
        prefill_unturned=TileShape(32, 16, 4, 1),
        num_programs=16,
        prefill_min_tokens=8,
    )
    layout = lay_out(step.kernel_plan.arrays, step.kernel_plan.host_positions, spec).decode[0]
    assert layout.many[:, 1].max() == 3
    assert layout.few[:, 1].max() == 1
    chunk = layout.many[layout.many[:, 2] == step.kernel_plan.arrays.range_tables[1]]
    assert len(chunk) > 4
    lens = np.minimum(chunk[:, 4], 700) - chunk[:, 3]
    assert sorted(chunk[:, 6]) == list(range(len(chunk)))
    assert lens.sum() == 700
    assert lens[lens > lens.min()].min() - lens.min() <= 32


@pytest.mark.parametrize("end", [1, 1 << 16, (1 << 16) + 1, 1 << 17])
def test_keys_beyond_16_bits_are_ordered_too(end):
    keys = np.random.default_rng(0).integers(0, end, 1000)
    keys[:3] = end - 1, 0, end - 1
    assert stable_order(keys, end).tolist() == sorted(range(1000), key=keys.tolist().__getitem__)


def test_a_text_grows_without_a_new_plan():
    """Decoding on, only positions change: the tasks end where the rows see their last key."""
    step = random_step(np.random.default_rng(6), queries=((20, 1), (9, 1)))
    rotary, options = rotary_of(16), AttendOptions(0.3)
    shorter = random_step(np.random.default_rng(6), queries=((17, 1), (6, 1)))
    spec_plan = dataclasses.replace(
        step.kernel_plan,
        arrays=dataclasses.replace(
            step.kernel_plan.arrays,
            range_tokens=step.kernel_plan.arrays.range_tokens - np.array([0, 0, 0, 3, 3]),
        ),
        host_positions=shorter.kernel_plan.host_positions,
        _device_plans={},
    )
    # Laid out for the shorter texts, run at the positions of the longer ones.
    got = run_kernel_plan(step, rotary, options, plan=spec_plan)
    torch.testing.assert_close(got, dense_oracle(step, rotary, options), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mutation", ["no delta", "wrong sign"])
def test_a_wrong_delta_is_seen(mutation):
    step = random_step(np.random.default_rng(6), queries=((0, 1), (3, 40)))
    rotary, options = rotary_of(16), AttendOptions(0.3)
    factor = {"no delta": 0, "wrong sign": -1}[mutation]
    # Only the turn is mutated, by turning with other frequencies: visibility stays that of the true plan.
    wrong = LayerRotary(rotary.inv_freq * factor, 16)
    got = run_kernel_plan(step, wrong, options)
    assert (got - dense_oracle(step, rotary, options)).abs().max() > 0.05


def test_plan_for_kernels_has_no_items_to_attend():
    step = random_step(np.random.default_rng(7))
    with pytest.raises(ValueError, match="made for the kernels"):
        attend(step.q, step.k_cache, step.v_cache, step.kernel_plan, rotary_of(16), AttendOptions(0.3))
