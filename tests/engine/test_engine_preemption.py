# SPDX-License-Identifier: Apache-2.0
"""Sequences lose their blocks and come back: nothing is lost, nothing changes."""

import itertools

import pytest

from fixtures.tiny_engine import CHUNK_METHODS, FULL_METHODS, answer, drain, make_engine, prompt
from lazyattention.engine.sampling_params import SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def token_ids_of(output, index=0):
    assert output.error is None
    return output.outputs[index].token_ids


def evict_chunks(engine):
    for chunk in list(engine.cache.chunks):
        if chunk in engine.cache._evictable:
            engine.cache._evictable.discard(chunk)
            engine.cache._forget_chunk(chunk, "evicted")


def test_resumed_sequence_waits_for_a_chunk_that_went_while_its_text_stayed():
    """It counted as decoding, since one token of its own was left, and looked at a chunk that was not computed yet."""
    layout = prompt("d60 t8")
    engine = make_engine(block_size=4, max_num_batched_tokens=8)
    engine.add_request("only", layout, LONG)
    [sequence] = engine._groups["only"].sequences
    while not sequence.output_token_ids:
        engine.step()
    engine.scheduler._preempt(sequence)
    evict_chunks(engine)
    resumed = token_ids_of(drain(engine)["only"])
    assert resumed == token_ids_of(answer(make_engine(), layout, LONG))


@pytest.mark.parametrize("method", [*CHUNK_METHODS, *FULL_METHODS])
@pytest.mark.parametrize("goes", ["nothing", "chunks", "everything"])
def test_preemption_at_any_step_changes_no_token(method, goes):
    """Seeded sampling, two completions, in slices; what is stored meanwhile may be evicted as well."""
    layout = prompt("p11 d9 d19 t7 d9 t6")
    params = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=4, ignore_eos=True)
    want = answer(make_engine(reuse_method=method), layout, params)
    for at_step in itertools.count(1):
        engine = make_engine(block_size=4, max_num_batched_tokens=24, reuse_method=method)
        engine.add_request("only", layout, params)
        for _ in range(at_step):
            engine.step()
        victims = list(engine.scheduler.running)
        if not victims:
            break
        for victim in victims:
            engine.scheduler._preempt(victim)
        if goes == "chunks":
            evict_chunks(engine)
        elif goes == "everything":
            engine.cache.clear()
        got = drain(engine)["only"]
        engine.check_idle()
        assert [o.token_ids for o in got.outputs] == [o.token_ids for o in want.outputs], f"after step {at_step}"
    assert at_step > 5
