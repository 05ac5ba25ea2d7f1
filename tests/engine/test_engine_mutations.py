# SPDX-License-Identifier: Apache-2.0
"""What must not be wrong is broken on purpose: the oracle has to notice every time, or its green says nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fixtures.tiny_engine import CHUNK_METHODS, GREEDY, drain, loaded_tiny, make_engine, prompt
from fixtures.tiny_models import tiny_model
from lazyattention.cache import kv_pool
from lazyattention.cache.manager import CacheManager
from lazyattention.engine import batch as batch_module
from lazyattention.engine import model_runner
from lazyattention.ops import LayerRotary, RowGroup, attention
from oracle import TOLERANCE, ChunkOracle, LogitsRecorder, error_of

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
# No span fills its last block; the preamble stands before documents, text between them.
LAYOUT = prompt("p11 d9 d19 t7 d33 d9 t5")
CAUGHT = 50 * TOLERANCE


@pytest.fixture(scope="module")
def oracle():
    return ChunkOracle(tiny_model(num_hidden_layers=2).double())


def errors_by_method(oracle, *, encoding="after_preamble", empty_slots=float("nan")):
    """Each method's error, cold and then warm, in an engine built after the mutation; NaN logits count as infinite."""
    engine = make_engine(encoding=encoding)
    for caches in engine.model_runner.kv_pool.layers:
        for cache in caches:
            cache.fill_(empty_slots)
    recorder = LogitsRecorder(engine)
    errors = {}
    for method in CHUNK_METHODS:
        for request_id in (method, f"{method} again"):
            engine.add_request(request_id, LAYOUT, GREEDY, reuse_method=method)
            tokens = tuple(drain(engine)[request_id].outputs[0].token_ids)
            if request_id not in {name for name, _ in recorder.rows}:
                errors[request_id] = float("inf")
                continue
            want = oracle.logits(LAYOUT, tokens[:-1], encoding=encoding)
            got = recorder.of(request_id)[: len(want)]
            errors[request_id] = error_of(got, want) if len(got) == len(want) else float("inf")
    return errors


def drop_delta(monkeypatch):
    original = batch_module._Builder._add_group
    monkeypatch.setattr(batch_module._Builder, "_add_group", lambda self, index, num, _: original(self, index, num, 0))


def flip_delta(monkeypatch):
    original = batch_module._Builder._add_group
    monkeypatch.setattr(
        batch_module._Builder, "_add_group", lambda self, index, num, delta: original(self, index, num, -delta)
    )


def off_by_one_delta(monkeypatch):
    original = batch_module._Builder._add_group
    monkeypatch.setattr(
        batch_module._Builder,
        "_add_group",
        lambda self, index, num, delta: original(self, index, num, delta + (1 if delta else 0)),
    )


def read_empty_slots(monkeypatch):
    original = batch_module._Builder.look_at_chunk

    def look_at_whole_blocks(self, chunk, num_tokens, position_delta, *, keys_turned):
        known = len(self.ranges)
        original(self, chunk, num_tokens, position_delta, keys_turned=keys_turned)
        if len(self.ranges) > known and chunk.is_ready:
            self.ranges[-1].num_tokens = len(chunk.block_ids) * self.block_size

    monkeypatch.setattr(batch_module._Builder, "look_at_chunk", look_at_whole_blocks)


def lose_last_token(monkeypatch):
    original = batch_module._Builder.look_at_chunk

    def look_at_all_but_one(self, chunk, num_tokens, position_delta, *, keys_turned):
        known = len(self.ranges)
        original(self, chunk, num_tokens, position_delta, keys_turned=keys_turned)
        if len(self.ranges) > known and chunk.is_ready:
            self.ranges[-1].num_tokens -= 1

    monkeypatch.setattr(batch_module._Builder, "look_at_chunk", look_at_all_but_one)


def merge_by_mean(monkeypatch):
    original = attention.merge_states

    def merge_without_lse(outputs, lses, *rest):
        return original(outputs, torch.where(lses.isinf(), lses, torch.zeros_like(lses)), *rest)

    monkeypatch.setattr(attention, "merge_states", merge_without_lse)


def merge_in_base_two(monkeypatch):
    original = attention.merge_states
    monkeypatch.setattr(attention, "merge_states", lambda o, lses, *rest: original(o, lses / np.log(2), *rest))


def encode_at_position_zero(monkeypatch):
    original = CacheManager.insert_chunk

    def insert(self, *arguments, **more):
        chunk = original(self, *arguments, **more)
        chunk.base = 0
        return chunk

    monkeypatch.setattr(CacheManager, "insert_chunk", insert)


def forget_the_preamble(monkeypatch):
    original = CacheManager.insert_chunk

    def insert(self, key, ids, *, context, **more):
        chunk = original(self, key, ids, context=(), **more)
        chunk.base = sum(before.num_tokens for before in context)
        return chunk

    monkeypatch.setattr(CacheManager, "insert_chunk", insert)


def leave_the_preamble_where_it_stands(monkeypatch):
    """A private document sees the preamble from its true place, not moved up to it."""
    original = batch_module._add_sequence_piece

    def add(builder, piece, sequence):
        known = len(builder.row_groups)
        original(builder, piece, sequence)
        if sequence.spans[piece.span_index].use.value == "private":
            for index in range(known, len(builder.row_groups)):
                builder.row_groups[index] = replace_delta(builder.row_groups[index])

    def replace_delta(group):
        return RowGroup(group.range_index, group.token_start, group.num_tokens, 0)

    monkeypatch.setattr(batch_module, "_add_sequence_piece", add)


def store_keys_as_they_come(monkeypatch):
    original = batch_module._add_chunk_piece

    def add(builder, piece):
        original(builder, piece)
        builder.store_turns[-1] = np.zeros_like(builder.store_turns[-1])

    monkeypatch.setattr(batch_module, "_add_chunk_piece", add)


def _with_copy_deltas(monkeypatch, change):
    original = kv_pool.copy_turned
    monkeypatch.setattr(
        kv_pool,
        "copy_turned",
        lambda k, v, source, target, deltas, rotary: original(k, v, source, target, change(deltas), rotary),
    )


def copy_without_turning(monkeypatch):
    _with_copy_deltas(monkeypatch, torch.zeros_like)


def copy_turning_backwards(monkeypatch):
    _with_copy_deltas(monkeypatch, torch.neg)


def let_documents_see_each_other(monkeypatch):
    """Encode each chunk behind the first one: the mask between documents is what is broken."""
    original = batch_module._add_chunk_piece
    first = []

    def add(builder, piece):
        original(builder, piece)
        if not piece.chunk.context:
            first.clear()
        elif not first:
            first.append(piece.chunk)
        else:
            builder.look_at_chunk(first[0], piece.num_tokens, -9, keys_turned=first[0].keys_turned)

    monkeypatch.setattr(batch_module, "_add_chunk_piece", add)


def positions_count_empty_slots(monkeypatch):
    """Spans start at multiples of the block size, as if empty slots had positions."""
    original = model_runner.make_plan

    def plan(positions, slot_mapping, *rest, **more):
        return original(slot_mapping * 0 + positions // 8 * 8 + slot_mapping % 8, slot_mapping, *rest, **more)

    monkeypatch.setattr(model_runner, "make_plan", plan)


SHARED = ("rotate_query", "rotate_key")
STORED = (*SHARED, "copy_rotate")
MUTATIONS = [
    (drop_delta, CHUNK_METHODS[:2] + ("chunk_recompute",)),
    (flip_delta, SHARED),
    (off_by_one_delta, SHARED),
    (read_empty_slots, SHARED),
    (lose_last_token, SHARED),
    (merge_by_mean, CHUNK_METHODS),
    (merge_in_base_two, CHUNK_METHODS),
    (encode_at_position_zero, STORED),
    (forget_the_preamble, STORED),
    (let_documents_see_each_other, STORED),
    (leave_the_preamble_where_it_stands, ("chunk_recompute",)),
    (store_keys_as_they_come, ("rotate_key",)),
    (copy_without_turning, ("copy_rotate",)),
    (copy_turning_backwards, ("copy_rotate",)),
    (positions_count_empty_slots, CHUNK_METHODS),
]


@pytest.mark.parametrize(("mutate", "methods"), MUTATIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_oracle_notices(oracle, monkeypatch, mutate, methods):
    mutate(monkeypatch)
    # Finite values in slots nobody wrote: NaN would give reading them away too easily.
    errors = errors_by_method(oracle, empty_slots=1.0)
    for method in methods:
        assert errors[method] > CAUGHT, f"{mutate.__name__} goes unnoticed by {method}"


@pytest.mark.parametrize("encoding", ["after_preamble", "isolated"])
@pytest.mark.parametrize("empty_slots", [float("nan"), 1e3])
def test_unbroken_engine_passes_the_same_comparison(oracle, encoding, empty_slots):
    errors = errors_by_method(oracle, encoding=encoding, empty_slots=empty_slots)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(("method", "change"), [("rotate_query", -1.0), ("rotate_key", -1.0), ("copy_rotate", -1.0)])
def test_oracle_notices_frequencies_of_the_wrong_sign(oracle, monkeypatch, method, change):
    loaded = loaded_tiny(num_hidden_layers=2)
    wrong = tuple(LayerRotary(r.inv_freq * change, r.rotary_dim, r.is_interleaved) for r in loaded.rotaries)
    engine = make_engine(replace(loaded, rotaries=wrong))
    recorder = LogitsRecorder(engine)
    engine.add_request("only", LAYOUT, GREEDY, reuse_method=method)
    tokens = drain(engine)["only"].outputs[0].token_ids
    want = oracle.logits(LAYOUT, tokens[:-1], encoding="after_preamble")
    assert error_of(recorder.of("only"), want) > CAUGHT


def test_a_write_into_a_stored_chunk_is_caught():
    engine = make_engine()
    engine.add_request("first", LAYOUT, GREEDY)
    drain(engine)
    chunk = next(chunk for chunk in engine.cache.chunks if chunk.num_tokens == 19)
    v_cache = engine.model_runner.kv_pool.layers[1][1]
    v_cache[chunk.block_ids[2], 2, 1, 5] += 1e-9
    engine.add_request("second", LAYOUT, GREEDY)
    with pytest.raises(AssertionError, match=f"chunk {chunk.key.hex} was written to"):
        drain(engine)


def test_writes_into_empty_slots_of_a_stored_chunk_are_nobodys_matter():
    engine = make_engine()
    engine.add_request("first", LAYOUT, GREEDY)
    drain(engine)
    chunk = next(chunk for chunk in engine.cache.chunks if chunk.num_tokens == 19)
    engine.model_runner.kv_pool.layers[1][1][chunk.block_ids[2], 3:] = 7.0
    engine.add_request("second", LAYOUT, GREEDY)
    before = engine._checksums.num_checks
    drain(engine)
    assert engine._checksums.num_checks > before
