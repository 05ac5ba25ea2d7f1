"""The plan's work items, attended and merged, are attention over all visible keys at true positions."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyattention.ops import KVRange, LayerRotary, RowGroup, make_plan
from lazyattention.ops.attend import AttendOptions, attend
from lazyattention.ops.attend import cpu as attend_cpu_module
from lazyattention.ops.attend.reference import attend_reference
from lazyattention.ops.merge_states import merge_states
from lazyattention.ops.rotary import turn, turn_table
from tests.ops.layouts import random_step, rotary_of

NO_ROPE = LayerRotary(None, 0)


def dense_oracle(step, rotary, options, sinks=None):
    """First principles, float64: turn every visible key to where it stands, one softmax over all of them."""
    plan, group = step.plan, step.q.shape[1] // step.k_cache.shape[2]
    out = torch.zeros(*step.q.shape[:2], step.v_cache.shape[3], dtype=torch.float64)
    for token in range(plan.num_tokens):
        keys, values, temperatures, biases = [], [], [], []
        for item in plan.items:
            for row in range(item.row_start, item.row_end):
                if int(plan.row_tokens[row]) != token:
                    continue
                index = torch.arange(item.kv_range.num_tokens)
                blocks = torch.tensor(item.kv_range.block_ids)[index // plan.block_size]
                k = step.k_cache[blocks, index % plan.block_size].double()
                v = step.v_cache[blocks, index % plan.block_size].double()
                stands = index + item.kv_range.first_position + int(plan.row_deltas[row])
                amount = int(plan.row_deltas[row]) + 0 * stands if item.kv_range.keys_turned else stands
                if rotary.inv_freq is not None:
                    k = turn(k, *turn_table(rotary.inv_freq, amount, torch.float64), rotary)
                distance = int(plan.positions[token]) - stands
                visible = distance >= 0
                if options.sliding_window is not None:
                    visible &= distance < options.sliding_window
                keys.append(k[visible])
                values.append(v[visible])
                scaling = (1.0, 0.0)
                if plan.row_temperatures is not None:
                    scaling = (plan.row_temperatures[row].item(), plan.row_biases[row].item())
                temperatures.append(torch.full_like(stands[visible], scaling[0], dtype=torch.float64))
                biases.append(torch.full_like(stands[visible], scaling[1], dtype=torch.float64))
        k = torch.cat(keys).repeat_interleave(group, 1)
        v = torch.cat(values).repeat_interleave(group, 1)
        scores = torch.einsum("hd,nhd->hn", step.q[token].double(), k) * options.softmax_scale / torch.cat(temperatures)
        if options.logit_softcap is not None:
            scores = options.logit_softcap * torch.tanh(scores / options.logit_softcap)
        scores = scores + torch.cat(biases)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
            v = torch.cat([v, torch.zeros(1, *v.shape[1:], dtype=v.dtype)])
        out[token] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return out


def run_ops(step, rotary, options, sinks=None, attend_function=attend):
    outputs, lses = attend_function(step.q, step.k_cache, step.v_cache, step.plan, rotary, options)
    return merge_states(outputs, lses, step.plan.row_tokens, step.plan.num_tokens, sinks)[0]


CASES = {
    "plain": ({}, {}, {}),
    "scattered and contiguous blocks": ({"contiguous": True}, {}, {}),
    "one-token chunk, exactly one block, long chunk": ({"chunk_lens": (1, 4, 130)}, {}, {}),
    "empty chunk": ({"chunk_lens": (10, 0, 20)}, {}, {}),
    "no chunks": ({"chunk_lens": ()}, {}, {}),
    "head_dim 80": ({"head_dim": 80}, {}, {}),
    "no grouping": ({"num_q_heads": 3, "num_kv_heads": 3}, {}, {}),
    "group of 16": ({"num_q_heads": 16, "num_kv_heads": 1}, {}, {}),
    "interleaved": ({}, {"is_interleaved": True}, {}),
    "partial rotary": ({}, {"rotary_dim": 8}, {}),
    "partial rotary at the end": ({}, {"rotary_dim": 8, "rotary_start": 8}, {}),
    "window": ({}, {}, {"sliding_window": 20}),
    "window of one": ({}, {}, {"sliding_window": 1}),
    "soft cap": ({}, {}, {"logit_softcap": 2.0}),
    "soft cap and window": ({}, {}, {"logit_softcap": 2.0, "sliding_window": 9}),
    "unturned keys": ({"keys_turned": False}, {}, {}),
    "beyond 128K": ({"far": 200_000}, {}, {}),
    "temperature and bias": ({"is_scaled": True}, {}, {}),
    "temperature, soft cap, window": ({"is_scaled": True}, {}, {"logit_softcap": 2.0, "sliding_window": 20}),
    "temperature, unturned keys": ({"is_scaled": True, "keys_turned": False}, {}, {}),
}
# The kernels know no scaling of chunks' scores.
KERNEL_CASES = {name: case for name, case in CASES.items() if not case[0].get("is_scaled")}


@pytest.mark.parametrize("attend_function", [attend, attend_reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_merged_items_equal_dense_attention(case, attend_function):
    step_options, rotary_options, attend_options = CASES[case]
    step = random_step(np.random.default_rng(0), **step_options)
    rotary = rotary_of(step.q.shape[2], **rotary_options)
    options = AttendOptions(0.3, **attend_options)
    got = run_ops(step, rotary, options, attend_function=attend_function)
    torch.testing.assert_close(got, dense_oracle(step, rotary, options), rtol=1e-9, atol=1e-9)


def test_layer_without_rope_is_not_turned():
    step = random_step(np.random.default_rng(1))
    options = AttendOptions(0.3)
    torch.testing.assert_close(run_ops(step, NO_ROPE, options), dense_oracle(step, NO_ROPE, options))


def test_sinks_take_weight_once_per_token():
    step, options = random_step(np.random.default_rng(2)), AttendOptions(0.3)
    sinks = torch.tensor([0.5, -1.0, 2.0, 3.0], dtype=torch.float64)
    rotary = rotary_of(16)
    got = run_ops(step, rotary, options, sinks)
    torch.testing.assert_close(got, dense_oracle(step, rotary, options, sinks))
    assert (got - run_ops(step, rotary, options)).abs().max() > 0.05


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_lower_precision_stays_near_float64(dtype, tolerance):
    step = random_step(np.random.default_rng(3), dtype=dtype)
    rotary, options = rotary_of(16), AttendOptions(0.3)
    want = dense_oracle(step, rotary, options)
    error = (run_ops(step, rotary, options).double() - want).norm() / want.norm()
    assert error < tolerance


def test_missing_flash_operator_falls_back(monkeypatch):
    monkeypatch.setattr(attend_cpu_module, "_HAS_FLASH", False)
    step, rotary, options = random_step(np.random.default_rng(4)), rotary_of(16), AttendOptions(0.3)
    torch.testing.assert_close(run_ops(step, rotary, options), dense_oracle(step, rotary, options))


def test_scaled_rows_take_sinks_unscaled_and_still_share_reads():
    step, options = random_step(np.random.default_rng(2), is_scaled=True), AttendOptions(0.3)
    sinks = torch.tensor([0.5, -1.0, 2.0, 3.0], dtype=torch.float64)
    got = run_ops(step, rotary_of(16), options, sinks)
    torch.testing.assert_close(got, dense_oracle(step, rotary_of(16), options, sinks))
    assert len(step.plan.items) == len(random_step(np.random.default_rng(2)).plan.items)


def test_the_kernels_refuse_scaled_rows():
    ranges, groups = [KVRange("text", [0], 3, 0)], [RowGroup(0, 0, 3, 0, temperature=0.5)]
    positions = np.arange(3)
    with pytest.raises(ValueError, match="kernels know no temperature"):
        make_plan(positions, positions, ranges, groups, block_size=4, for_kernels=True)


def test_rows_of_several_requests_share_one_item_per_chunk():
    plan = random_step(np.random.default_rng(5)).plan
    chunk_items = [item for item in plan.items if item.kv_range.key[0] == "chunk"]
    assert len(chunk_items) == 3
    assert all(item.row_end - item.row_start == 4 + 1 + 7 for item in chunk_items)


def mutate(step, **changes):
    return dataclasses.replace(step, plan=dataclasses.replace(step.plan, _tables={}, **changes))


@pytest.mark.parametrize("mutation", ["no delta", "wrong sign", "wrong row"])
def test_a_wrong_delta_is_seen(mutation):
    step, rotary, options = random_step(np.random.default_rng(6)), rotary_of(16), AttendOptions(0.3)
    deltas = step.plan.row_deltas
    wrong = {"no delta": deltas * 0, "wrong sign": -deltas, "wrong row": deltas.roll(1)}[mutation]
    # Only the turn is mutated: visibility stays that of the true plan.
    got = run_ops(mutate(step, row_deltas=wrong), rotary, options)
    assert (got - dense_oracle(step, rotary, options)).abs().max() > 0.05


def test_reading_empty_slots_is_seen():
    step, rotary, options = random_step(np.random.default_rng(7)), rotary_of(16), AttendOptions(0.3)
    want = dense_oracle(step, rotary, options)
    for item in step.plan.items:
        if item.kv_range.key == ("chunk", 0):
            item.kv_range.num_tokens += 2
            item.slots = torch.cat([item.slots, item.slots[-1] + torch.tensor([1, 2])])
    assert (run_ops(step, rotary, options) - want).abs().max() > 0.01


def test_a_merge_that_ignores_lse_is_seen():
    step, rotary, options = random_step(np.random.default_rng(8)), rotary_of(16), AttendOptions(0.3)
    outputs, lses = attend(step.q, step.k_cache, step.v_cache, step.plan, rotary, options)
    wrong = merge_states(outputs, torch.zeros_like(lses), step.plan.row_tokens, step.plan.num_tokens)[0]
    assert (wrong - dense_oracle(step, rotary, options)).abs().max() > 0.05


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    chunk_lens=st.lists(st.integers(0, 40), max_size=4),
    queries=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 60),
)
def test_any_step_equals_dense_attention(seed, chunk_lens, queries, block_size, window):
    step = random_step(
        np.random.default_rng(seed), chunk_lens=tuple(chunk_lens), queries=tuple(queries), block_size=block_size
    )
    rotary, options = rotary_of(16), AttendOptions(0.3, sliding_window=window)
    torch.testing.assert_close(run_ops(step, rotary, options), dense_oracle(step, rotary, options))


def test_merge_of_a_token_without_keys_is_zero():
    outputs = torch.randn(2, 1, 4)
    merged, lse = merge_states(outputs, torch.tensor([[0.0], [float("-inf")]]), torch.tensor([0, 1]), 3)
    torch.testing.assert_close(merged[0], outputs[0])
    assert merged[1:].abs().sum() == 0
    assert lse[1:].isinf().all()


def test_wrong_lse_dtype_is_named():
    with pytest.raises(ValueError, match="lses has dtype torch.bfloat16"):
        merge_states(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.bfloat16), torch.tensor([0]), 1)
