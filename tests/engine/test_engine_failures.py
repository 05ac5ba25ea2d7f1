# SPDX-License-Identifier: Apache-2.0
"""One request's failure is its own: the others get their answers, every request ends exactly once, nothing leaks."""

import time

import pytest
import torch

from fixtures.tiny_engine import GREEDY, answer, drain, make_engine, prompt
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import CapacityError, RequestError

ENDLESS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def break_model(engine, *, when):
    """Raise in forward passes for which `when(batch)` holds."""
    run = engine.model_runner.run

    def run_or_raise(batch):
        if when(batch):
            raise RuntimeError("out of order")
        return run(batch)

    engine.model_runner.run = run_or_raise


def spoil_logits(engine, request_id, value, *, index=None):
    """Put `value` into the logits of one request's rows (of one completion)."""
    run = engine.model_runner.run

    def run_and_spoil(batch):
        logits = run(batch).clone()
        for row, sequence in enumerate(batch.sampled):
            if sequence.group.request_id == request_id and index in (None, sequence.index):
                logits[row, 5] = value
        return logits

    engine.model_runner.run = run_and_spoil


def test_a_forward_pass_that_raises_fails_the_requests_in_it_and_no_others():
    want = answer(make_engine(), prompt("p11 d9 t7")).outputs[0].token_ids
    engine = make_engine(max_num_seqs=2)
    first_batch = []

    def in_first_batch(batch):
        first_batch.append(batch)
        return len(first_batch) == 1

    break_model(engine, when=in_first_batch)
    for name in ("a", "b", "c"):
        engine.add_request(name, prompt("p11 d9 t7"), GREEDY)
    outputs = drain(engine)
    for name in ("a", "b"):
        assert isinstance(outputs[name].error, CapacityError)
        assert "RuntimeError: out of order" in str(outputs[name].error)
        assert outputs[name].outputs[0].finish_reason == "error"
    assert outputs["c"].error is None
    assert outputs["c"].outputs[0].token_ids == want
    assert outputs["c"].documents[0].status == "miss", "what a failed pass computed is never served"
    assert (engine.stats.num_failed, engine.stats.num_finished) == (2, 3)
    engine.check_idle()


def test_sampling_that_raises_fails_the_requests_in_the_step_and_no_others():
    """By then the pass itself counts as done: its documents are stored, and served to the next request."""
    want = answer(make_engine(), prompt("p11 d9 t7")).outputs[0].token_ids
    engine = make_engine()
    sample = engine.sampler.sample

    def raise_once(logits, rows):
        engine.sampler.sample = sample
        raise RuntimeError("no more randomness")

    engine.sampler.sample = raise_once
    engine.add_request("a", prompt("p11 d9 t7"), GREEDY)
    assert "no more randomness" in str(drain(engine)["a"].error)
    engine.check_idle()
    engine.add_request("b", prompt("p11 d9 t7"), GREEDY)
    output = drain(engine)["b"]
    assert output.outputs[0].token_ids == want
    assert output.documents[0].status == "hit"
    engine.check_idle()


def test_broken_bookkeeping_ends_the_engine():
    """It is no request's failure: going on could serve the KV of something else."""
    engine = make_engine()
    engine.add_request("a", prompt("p11 d9 t7"), GREEDY)

    def raise_assertion(step):
        raise AssertionError("a block has two owners")

    engine.scheduler.advance = raise_assertion
    with pytest.raises(AssertionError, match="two owners"):
        drain(engine)


def test_a_failed_pass_over_a_shared_chunk_fails_whoever_waits_for_it():
    """One request encodes the chunk in slices, another waits for it without any work of its own in the step."""
    engine = make_engine(max_num_batched_tokens=8)
    for name in ("encodes", "waits"):
        engine.add_request(name, prompt("d60 t7"), GREEDY)
    engine.step()
    assert len(engine.scheduler.running) >= 1
    engine.step()
    running = [sequence.group.request_id for sequence in engine.scheduler.running]
    break_model(engine, when=lambda batch: not broken and not broken.append(batch))
    broken = []
    outputs = drain(engine)
    assert [name for name in ("encodes", "waits") if outputs[name].error is not None] == running
    assert all(len(outputs[name].outputs[0].token_ids) == 3 for name in outputs if name not in running)
    engine.check_idle()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_their_request_alone(value):
    engine = make_engine()
    spoil_logits(engine, "bad", value)
    for name in ("good", "bad", "also good"):
        engine.add_request(name, prompt("p11 d9 t7"), GREEDY)
    outputs = drain(engine)
    assert "logits contain" in str(outputs["bad"].error)
    assert outputs["good"].outputs[0].token_ids == outputs["also good"].outputs[0].token_ids
    assert len(outputs["good"].outputs[0].token_ids) == GREEDY.max_tokens
    engine.check_idle()


@pytest.mark.parametrize("failing", [0, 1])
def test_one_completion_that_fails_ends_its_request_once(failing):
    """The failure of the first of two completions ended the request; the second one's token of the same step was then
    appended to a sequence without spans, and the IndexError stopped the engine.
    """
    engine = make_engine()
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=9, ignore_eos=True)
    engine.add_request("two", prompt("p11 d9 t7"), params)
    engine.add_request("other", prompt("p11 d9 t8"), ENDLESS)
    while len(engine._groups["two"].sequences[1].output_token_ids) < 2:
        engine.step()
    spoil_logits(engine, "two", float("nan"), index=failing)
    outputs = drain(engine)
    assert outputs["two"].error is not None
    assert [output.finish_reason for output in outputs["two"].outputs] == ["error", "error"]
    assert outputs["other"].error is None
    engine.check_idle()


def test_a_logits_processor_that_raises_fails_its_request_alone():
    def broken(output_token_ids, logits):
        raise KeyError("no such rule")

    engine = make_engine()
    engine.add_request("bad", prompt("t7"), SamplingParams(logits_processors=[broken]))
    engine.add_request("good", prompt("t7"), GREEDY)
    outputs = drain(engine)
    assert isinstance(outputs["bad"].error, RequestError)
    assert "KeyError" in str(outputs["bad"].error)
    assert outputs["good"].error is None


def test_refused_requests_leave_no_trace():
    engine = make_engine(num_blocks=10, max_model_len=100)
    engine.add_request("live", prompt("t7"), GREEDY)
    refused = [
        ("live", prompt("t7"), "request_id 'live' is in use"),
        (
            "long",
            prompt("p11 d89 t7"),
            r"the prompt has 107 tokens \(89 of them in documents\), but max_model_len is 100",
        ),
        ("ends with a document", prompt("p11 d9"), "must end with text"),
        ("empty question", prompt("p11 d9 t0"), "must end with text"),
        ("never fits", prompt("t70"), r"needs \d+ KV blocks .* can never fit: the pool has 10"),
    ]
    for request_id, layout, message in refused:
        params = SamplingParams(max_tokens=29) if request_id == "never fits" else GREEDY
        with pytest.raises(RequestError, match=message):
            engine.add_request(request_id, layout, params)
    assert engine.live_request_ids == ["live"]
    assert len(engine.scheduler.waiting) == 1
    assert drain(engine)["live"].error is None
    engine.check_idle()


def test_a_request_that_can_never_fit_is_refused_whatever_n():
    engine = make_engine(num_blocks=10)
    with pytest.raises(RequestError, match="can never fit"):
        engine.add_request("never", prompt("t70"), SamplingParams(n=3, max_tokens=20))
    assert not engine.has_work


def test_output_ends_at_the_models_length():
    engine = make_engine(max_model_len=20)
    output = answer(engine, prompt("t17"), ENDLESS)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (3, "length")


def test_a_request_id_can_be_used_again_once_it_ended():
    engine = make_engine()
    first, second = (answer(engine, prompt("p11 d9 t7")) for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert (first.documents[0].status, second.documents[0].status) == ("miss", "hit")


@pytest.mark.parametrize("after_steps", [0, 1, 2, 4])
def test_abort_frees_everything_at_once_and_is_reported_once(after_steps):
    engine = make_engine(max_num_batched_tokens=8, num_blocks=60)
    engine.add_request("goes", prompt("p11 d30 d9 t7"), SamplingParams(n=2, max_tokens=9, ignore_eos=True))
    engine.add_request("stays", prompt("p11 d30 t7"), GREEDY)
    for _ in range(after_steps):
        engine.step()
    assert engine.abort("goes")
    assert not engine.abort("goes")
    assert "goes" not in engine.live_request_ids
    outputs = drain(engine)
    assert [output.finish_reason for output in outputs["goes"].outputs] == ["abort", "abort"]
    assert outputs["goes"].error is None
    assert len(outputs["stays"].outputs[0].token_ids) == 3
    engine.check_idle()


def test_abort_of_the_only_one_that_needed_a_chunk_drops_it_half_done():
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request("only", prompt("d60 t7"), GREEDY)
    engine.step()
    engine.abort("only")
    drain(engine)
    assert len(engine.cache.chunks) == 0
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks
    again = answer(engine, prompt("d60 t7"))
    assert (again.documents[0].status, again.documents[0].reason) == ("miss", "new")


def test_passed_deadline_ends_a_request_with_an_error():
    engine = make_engine()
    engine.add_request("late", prompt("t7"), ENDLESS, deadline_s=time.monotonic() - 1)
    engine.add_request("in time", prompt("t7"), GREEDY, deadline_s=time.monotonic() + 1000)
    outputs = drain(engine)
    assert isinstance(outputs["late"].error, CapacityError)
    assert "deadline passed" in str(outputs["late"].error)
    assert outputs["in time"].error is None


def test_an_error_of_the_kernels_leaves_pool_counts_as_they_were():
    engine = make_engine(max_num_batched_tokens=8)
    answer(engine, prompt("p11 d9 t30"))
    before = (engine.cache.pool.num_free, len(engine.cache.chunks), len(engine.cache.texts))
    break_model(engine, when=lambda batch: True)
    for method in ("rotate_query", "copy_rotate", "chunk_recompute", "prefix"):
        engine.add_request(method, prompt("p11 d9 d33 t30"), GREEDY, reuse_method=method)
        assert drain(engine)[method].error is not None
    engine.check_idle()
    assert (engine.cache.pool.num_free, len(engine.cache.chunks), len(engine.cache.texts)) == before


def test_memory_that_nobody_wrote_is_never_read():
    engine = make_engine()
    for caches in engine.model_runner.kv_pool.layers:
        assert all(bool(torch.isnan(cache).all()) for cache in caches), "the fixture poisons fresh memory"
    assert answer(engine, prompt("p11 d9 t7")).error is None


def test_a_token_that_cannot_be_spelled_fails_its_request_alone():
    """An exception of the tokenizer ended the engine, and with it every request."""
    want = answer(make_engine(), prompt("p11 d9 t7")).outputs[0].token_ids
    engine = make_engine()
    engine.add_request("whole", prompt("p11 d9 t7"), GREEDY)
    engine.add_request("broken", prompt("p11 d9 t8"), GREEDY)

    class Broken:
        stop_reason = None

        def push(self, token_ids):
            raise ValueError("no such token")

        def finish(self):
            return ""

    engine._groups["broken"].sequences[0].detokenizer = Broken()
    outputs = drain(engine)
    assert "no such token" in str(outputs["broken"].error)
    assert outputs["whole"].error is None
    assert outputs["whole"].outputs[0].token_ids == want
    engine.check_idle()
