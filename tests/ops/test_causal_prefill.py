# SPDX-License-Identifier: Apache-2.0
"""New tokens that see all new tokens before them go through stock kernels; all else, and the merge, stays as it was."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lazyattention.ops import AttentionMetadata, KVRange, RowGroup, attention, make_plan, run
from lazyattention.ops._causal_layout import LONG
from tests.ops.layouts import rotary_of

BLOCK_SIZE, NUM_BLOCKS, HEAD_DIM = 4, 400, 16
SPAN = st.tuples(st.sampled_from(["stored", "new", "new", "new"]), st.integers(1, 30))


class Step:
    """Requests made of spans: stored ones, and new ones whose tokens are computed in this step. All see all before."""

    def __init__(self, requests, seed=0, keys_turned=True, contiguous=False):
        rng = np.random.default_rng(seed)
        free = list(range(NUM_BLOCKS))[::-1] if contiguous else rng.permutation(NUM_BLOCKS).tolist()
        ranges, groups, positions, slots, turns = [], [], [], [], []
        for spans in requests:
            start, seen = 3, []
            for kind, length in spans:
                blocks = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
                if kind == "stored":  # at another position
                    ranges.append(KVRange(len(ranges), blocks, length, 1, keys_turned))
                    seen.append((len(ranges) - 1, start - 1))
                    start += length
                    continue
                ranges.append(KVRange(len(ranges), blocks, length, start, keys_turned))
                seen.append((len(ranges) - 1, 0))
                groups += [RowGroup(index, len(positions), length, delta) for index, delta in seen]
                positions += range(start, start + length)
                index = np.arange(length)
                slots += (np.array(blocks)[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE).tolist()
                start += length
        turns = None if keys_turned else -np.array(positions)
        plans = [
            make_plan(np.array(positions), np.array(slots), ranges, groups, block_size=BLOCK_SIZE, store_turns=turns,
                      for_kernels=kernels)
            for kernels in (True, False)
        ]  # fmt: skip
        self.kernel_plan, self.plan = plans
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_BLOCKS, BLOCK_SIZE, 2, HEAD_DIM)
        self.caches = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
        count = len(positions)
        self.q = torch.randn(count, 4, HEAD_DIM, generator=generator, dtype=torch.float64)
        self.k, self.v = (torch.randn(count, 2, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(2))

    def run(self, plan, sinks=None):
        caches = [tuple(cache.clone() for cache in self.caches)]
        metadata = AttentionMetadata(plan, caches, [rotary_of(HEAD_DIM)])
        return run(self.q, self.k, self.v, metadata, 0, softmax_scale=0.3, sinks=sinks)

    def causal_batches(self):
        (device_plan,) = self.kernel_plan._device_plans.values()
        return device_plan.causal


@pytest.fixture
def stock(monkeypatch):
    monkeypatch.setattr(attention, "causal_prefill_min_tokens", lambda *_: 8)


def assert_right(step, sinks=None):
    got = step.run(step.kernel_plan, sinks)
    torch.testing.assert_close(got, step.run(step.plan, sinks), rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.lists(SPAN, min_size=1, max_size=5), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
    keys_turned=st.booleans(),
    has_sinks=st.booleans(),
    min_tokens=st.sampled_from([0, 8]),
)
@example(requests=[[("new", 3), ("new", 4)]], seed=0, keys_turned=True, has_sinks=False, min_tokens=0)
def test_any_step_equals_dense_attention(requests, seed, keys_turned, has_sinks, min_tokens):
    requests = [spans for spans in requests if any(kind == "new" for kind, _ in spans)]
    if not requests:
        return
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64) if has_sinks else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "causal_prefill_min_tokens", lambda *_: min_tokens)
        assert_right(Step(requests, seed, keys_turned), sinks)


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize(
    ("requests", "batches"),
    [
        # Spans of one prompt are one sequence; nothing else is seen, so its output is written at once.
        ([[("new", 9), ("new", 5), ("new", 20)]], [(0, 34, 1, True)]),
        # Requests side by side are sequences of one batch.
        ([[("new", 9)], [("new", 20)], [("new", 8)]], [(0, 37, 3, True)]),
        # What comes before is merged in.
        ([[("stored", 6), ("new", 9), ("new", 3)]], [(0, 12, 1, False)]),
        # A stored span between two new ones ends the sequence; side by side in the batch, they share a launch.
        ([[("new", 9), ("stored", 6), ("new", 11)]], [(0, 20, 2, False)]),
        # Too short.
        ([[("new", 7)], [("stored", 30), ("new", 3)]], []),
    ],
)
def test_what_becomes_a_sequence(requests, batches):
    step = Step(requests)
    assert_right(step)
    assert [(b.token_start, b.num_tokens, b.num_seqs, b.parts is None) for b in step.causal_batches()] == batches


@pytest.mark.usefixtures("stock")
def test_long_sequences_have_launches_of_their_own():
    step = Step([[("new", 9)], [("new", 10)], [("new", LONG)], [("new", 8)]])
    assert_right(step)
    got = [(b.token_start, b.num_tokens, b.num_seqs, b.max_len) for b in step.causal_batches()]
    assert got == [(0, 19, 2, 10), (19, LONG, 1, LONG), (LONG + 19, 8, 1, 8)]


@pytest.mark.usefixtures("stock")
def test_whole_tiles_before_the_new_tokens_may_be_all_that_is_left_for_chunk_prefill(monkeypatch):
    monkeypatch.setattr(attention, "has_unmasked_prefill", lambda *_: True)
    step = Step([[("stored", 96), ("new", 40)]], contiguous=True)
    assert_right(step)
    (device_plan,) = step.kernel_plan._device_plans.values()
    (prefill,) = device_plan.prefill
    assert (len(prefill.tasks), len(prefill.apart) > 0, len(device_plan.causal)) == (0, True, 1)


@pytest.mark.usefixtures("stock")
def test_keys_that_lie_elsewhere_are_not_taken_for_the_rows_own():
    """A stored range as long as the rows, standing where they stand: only the slots tell it from their own."""
    step = Step([[("new", 12)]])
    other = KVRange("other", list(range(380, 383)), 12, 3)
    arrays = make_plan(
        step.kernel_plan.host_positions, step.kernel_plan.host_slots, [other], [RowGroup(0, 0, 12, 0)],
        block_size=BLOCK_SIZE, for_kernels=True,
    )  # fmt: skip
    step.run(arrays)
    (device_plan,) = arrays._device_plans.values()
    assert device_plan.causal == ()


@pytest.mark.usefixtures("stock")
def test_layers_with_a_window_keep_to_their_kernels():
    step = Step([[("new", 12)]])
    metadata = AttentionMetadata(step.kernel_plan, [tuple(step.caches)], [rotary_of(HEAD_DIM)])
    with pytest.raises(ValueError, match="sliding_window"):
        run(step.q, step.k, step.v, metadata, 0, softmax_scale=0.3, sliding_window=5)


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("mutation", ["not merged", "lse of another base"])
def test_mutations_are_seen(mutation, monkeypatch):
    step = Step([[("stored", 20), ("new", 12)]])
    original = attention.causal_prefill

    def mutated(q, k, v, batch, out, states, options, **kwargs):
        original(q, k, v, batch, out, states, options, **kwargs)
        if mutation == "not merged":
            states.outputs[batch.parts] = 0
        else:
            states.lses[batch.parts] *= 1.4427

    monkeypatch.setattr(attention, "causal_prefill", mutated)
    got = step.run(step.kernel_plan)
    assert (got - step.run(step.plan)).abs().max() > 0.01


def test_nothing_changes_where_there_is_no_stock_kernel():
    step = Step([[("new", 40)]])
    assert_right(step)
    assert step.causal_batches() == ()
    (spec,) = step.kernel_plan._device_plans
    assert spec == dataclasses.replace(spec, causal_min_tokens=0)
