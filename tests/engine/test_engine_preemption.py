# SPDX-License-Identifier: Apache-2.0
"""Sequences lose their blocks and come back: nothing is lost, nothing changes."""

import contextlib
import functools
import itertools
import random

import pytest

from fixtures.tiny_engine import CHUNK_METHODS, FULL_METHODS, answer, drain, make_engine, prompt
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import NotFoundError

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


# Documents and questions of a random schedule with a real model; few, so that they are shared.
SCHEDULE = ("p11 d9 d19 t6", "p11 d19 d9 t5", "p11 d33 t9", "t30", "d9 d33 d9 t4", "p7 d19 t17")
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=9, ignore_eos=True)
FREE = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@functools.cache
def roomy_answers():
    """What each request says when it runs alone with room for everything."""
    engine = make_engine(num_blocks=2000)
    return {
        (shorthand, method, params is SAMPLED): token_ids_of(
            answer(engine, prompt(shorthand), params, reuse_method=method)
        )
        for shorthand in SCHEDULE
        for method in (*CHUNK_METHODS, *FULL_METHODS)
        for params in (FREE, SAMPLED)
    }


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
def test_random_schedule_gives_the_tokens_of_a_roomy_run(seed):
    """Arrivals, aborts, evictions, preemptions and deletions in a pool that is too small; greedy and seeded sampling."""
    rng = random.Random(seed)
    engine = make_engine(
        num_blocks=rng.randint(32, 44),
        block_size=4,
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        max_num_seqs=rng.choice([3, 64]),
    )
    wanted, outputs, aborted = {}, {}, set()
    for number in range(25):
        key = (rng.choice(SCHEDULE), rng.choice([*CHUNK_METHODS, *FULL_METHODS]), rng.random() < 0.5)
        engine.add_request(str(number), prompt(key[0]), SAMPLED if key[2] else FREE, reuse_method=key[1])
        wanted[str(number)] = roomy_answers()[key]
        for _ in range(rng.randint(0, 5)):
            outputs.update((output.request_id, output) for output in engine.step() if output.finished)
        event = rng.random()
        if event < 0.1:
            aborted.add(gone := rng.choice(engine.live_request_ids))
            engine.abort(gone)
        elif event < 0.3 and engine.scheduler.running:
            engine.scheduler._preempt(rng.choice(engine.scheduler.running))
        elif event < 0.4:
            evict_chunks(engine)
        elif event < 0.5:
            engine.cache.clear()
        elif event < 0.6:
            with contextlib.suppress(NotFoundError):
                engine.documents.delete(rng.choice(["d9", "d19", "d33"]))
    outputs.update(drain(engine))
    engine.check_idle()
    assert set(outputs) == set(wanted)
    for request_id, output in outputs.items():
        said = output.outputs[0].token_ids
        if request_id in aborted:
            assert said == wanted[request_id][: len(said)]
        else:
            assert said == wanted[request_id], output.error
    assert engine.scheduler.num_preemptions > 0


def test_pool_too_small_for_all_at_once_preempts_and_answers_all():
    engine = make_engine(num_blocks=20, block_size=4)
    for name in "abcd":
        engine.add_request(name, prompt(f"p11 d19 t6-{name}"), SAMPLED)
    outputs = drain(engine)
    want = {
        name: token_ids_of(answer(make_engine(num_blocks=2000), prompt(f"p11 d19 t6-{name}"), SAMPLED))
        for name in "abcd"
    }
    assert {name: token_ids_of(output) for name, output in outputs.items()} == want
    assert engine.scheduler.num_preemptions > 0


def test_copies_of_stored_text_do_not_keep_a_request_from_room_that_it_was_promised():
    """Two compute the same text at once; what the second one stores behind the first one's blocks held those for ever."""
    layout = prompt("t9")
    longer = SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)
    want = answer(make_engine(block_size=4), layout, longer).outputs[0].token_ids
    engine = make_engine(num_blocks=6, block_size=4)
    engine.add_request("first", layout, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    engine.add_request("second", layout, longer)
    outputs = drain(engine)
    assert outputs["second"].error is None
    assert outputs["second"].outputs[0].token_ids == want
    engine.check_idle()
