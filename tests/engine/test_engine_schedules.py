# SPDX-License-Identifier: Apache-2.0
"""Random schedules: whatever arrives, leaves, is evicted, deleted, pinned, expires or fails, and in whatever order, every
request ends exactly once, with the tokens it would have had alone, and no block, reference or hold is lost.
"""

import contextlib
import itertools
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fixtures.symbolic_model import SymbolicRunner, expected_tokens
from fixtures.tiny_engine import CHUNK_METHODS, FULL_METHODS, make_engine, prompt
from lazyattention.engine import block_chooser
from lazyattention.engine.request import RequestStatus
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import NotFoundError, RequestError
from lazyattention.reuse import REUSE_METHODS, SpanUse

METHODS = (*CHUNK_METHODS, *FULL_METHODS)
# Lengths around the block size of 4; documents and instructions recur, so that chunks and text are shared.
SHORTHANDS = (
    "p5 d6 d4 t3",
    "p5 d4 d6 t3",
    "p5 d6 t5 d4 t2",
    "p5 d6 d6 t9",
    "p5 d13 t4",
    "p3 d6 t1",
    "d4 d0 d1 t5",
    "t9",
    "p5 t12",
    "p5 d6 t17",
)
DOCUMENTS = ("d6", "d4", "d13", "d1")
RECOMPUTES = ("none", "none", "first:4", "first:6", "deviation:0.3", "attention:0.6", "attention:1")
SCOPES = ("a", "a", "a", "b")


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Schedules(RuleBasedStateMachine):
    """The engine with a symbolic model, held to plain counting after every call."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.ended = {}
        self.excused = set()  # may end without all their tokens: aborted, or in a pass that failed
        self.number = 0
        self.had_pins = False

    @initialize(
        num_blocks=st.integers(9, 26),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 64]),
        max_num_seqs=st.sampled_from([1, 2, 5, 64]),
        encoding=st.sampled_from(["after_preamble", "isolated"]),
        num_hidden=st.sampled_from([0, 0, 3]),
        sink=st.sampled_from(["", "", "bos"]),
        chunk_ttl_s=st.sampled_from([None, 50.0]),
        max_skipped=st.sampled_from([1, 64]),
        keeps_plans=st.booleans(),
    )
    def start(self, *, num_blocks, keeps_plans, **options):
        self.engine = make_engine(num_blocks=num_blocks, block_size=4, **options)
        self.engine._checksums = None  # there are no tensors to check
        self.clock = self.engine.cache._clock = Clock()
        self.runner = SymbolicRunner(self.engine, keeps_plans=keeps_plans)
        self.chunking = self.engine.prompts.chunking(self.engine.config.chunk)
        self.chosen_blocks = {}
        choose = self.engine._admission.choose

        def choose_once(group, scores=None):
            assert group.request_id not in self.chosen_blocks
            choose(group, scores)
            visible = [not planned.is_hidden for planned in group.plan.spans]
            self.chosen_blocks[group.request_id] = list(itertools.compress(group.chosen_blocks, visible))

        self.engine._admission.choose = choose_once

    # What can happen --------------------------------------------------------------------------------------------------

    @rule(
        shorthand=st.sampled_from(SHORTHANDS),
        method=st.sampled_from(METHODS),
        max_tokens=st.integers(1, 9),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        scope=st.sampled_from(SCOPES),
        recompute=st.sampled_from(RECOMPUTES),
    )
    def arrive(self, shorthand, method, max_tokens, n, scope, recompute):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)
        if REUSE_METHODS[method].document_use is not SpanUse.SHARED:
            recompute = None
        self.admit(prompt(shorthand), method, params, scope, recompute)

    def admit(self, layout, method, params, scope, recompute=None):
        request_id = f"r{self.number}"
        self.number += 1
        before = self.engine.cache.pool.num_free
        try:
            self.engine.add_request(request_id, layout, params, scope=scope, reuse_method=method, recompute=recompute)
        except RequestError:
            assert self.engine.cache.pool.num_free == before
        else:
            self.live[request_id] = (layout, method, params)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), max_tokens=st.integers(1, 20), scope=st.sampled_from(SCOPES))
    def arrive_with_a_live_ones_prompt(self, data, max_tokens, scope):
        layout, method, _ = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.admit(layout, method, SamplingParams(temperature=0.0, max_tokens=max_tokens), scope)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.engine._next_housekeeping_s = 0.0
            for output in self.engine.step():
                self.note(output)

    @precondition(lambda self: self.engine.live_request_ids)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(self.engine.live_request_ids))
        assert self.engine.abort(request_id)
        self.excused.add(request_id)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data(), then_evict_chunks=st.booleans())
    def preempt(self, data, then_evict_chunks):
        self.engine.scheduler._preempt(data.draw(st.sampled_from(self.engine.scheduler.running)))
        for chunk in [chunk for chunk in self.engine.cache.chunks if chunk in self.engine.cache._evictable]:
            if then_evict_chunks:  # text behind a chunk may well outlive it
                self.engine.cache._forget_chunk(chunk, "evicted")

    @rule(how_many=st.sampled_from([1, 2, 1000]))
    def evict(self, how_many):
        for _ in range(how_many):
            if not self.engine.cache._evict_one():
                break

    @rule(document_id=st.sampled_from(DOCUMENTS), scope=st.sampled_from(SCOPES))
    def delete(self, document_id, scope):
        with contextlib.suppress(NotFoundError):
            self.engine.documents.delete(document_id, scope=scope)
        assert document_id not in [info.document_id for info in self.engine.documents.list(scope)]

    @rule(document_id=st.sampled_from(DOCUMENTS), scope=st.sampled_from(SCOPES), ttl_s=st.sampled_from([None, 20.0]))
    def pin(self, document_id, scope, ttl_s):
        try:
            self.engine.documents.pin([document_id], scope=scope, ttl_s=ttl_s)
            self.had_pins = True
        except NotFoundError:
            pass

    @rule(document_id=st.sampled_from(DOCUMENTS), scope=st.sampled_from(SCOPES))
    def unpin(self, document_id, scope):
        with contextlib.suppress(NotFoundError):
            self.engine.documents.unpin([document_id], scope=scope)

    @rule(seconds=st.sampled_from([1.0, 15.0, 60.0]))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def a_pass_fails(self):
        self.runner.fail_next = True
        self.engine._next_housekeeping_s = 0.0
        for output in self.engine.step():
            if output.error is not None and "told to fail" in str(output.error):
                self.excused.add(output.request_id)
            self.note(output)
        self.runner.fail_next = False

    # What must hold ---------------------------------------------------------------------------------------------------

    def note(self, output):
        layout, method, params = self.live[output.request_id]
        assert output.request_id not in self.ended
        options = self.chunking.options
        seen = "full" if method in FULL_METHODS else options.encoding
        want = expected_tokens(
            layout,
            params.max_tokens,
            seen,
            self.chosen_blocks.get(output.request_id),
            self.engine.cache.block_size,
            num_hidden=options.num_hidden,
            sink=self.chunking.sink,
        )
        for completion in output.outputs:
            assert completion.token_ids == want[: len(completion.token_ids)], (output.request_id, method)
        if not output.finished:
            return
        del self.live[output.request_id]
        self.ended[output.request_id] = output
        if output.request_id in self.excused:
            return
        if output.error is not None:
            # Only pins can make a request fail for want of room: what could never fit was refused.
            assert self.had_pins, output.error
            assert "are pinned" in str(output.error)
            return
        assert [completion.token_ids for completion in output.outputs] == [want] * params.n
        assert output.num_computed_tokens + output.num_reused_tokens == output.num_prompt_tokens

    @invariant()
    def every_reference_is_accounted_for(self):
        if not hasattr(self, "engine"):
            return
        cache, scheduler = self.engine.cache, self.engine.scheduler
        cache.pool.check()
        spans = [span for sequence in scheduler.running for span in sequence.spans]
        held = [span.chunk for span in spans if span.chunk is not None]
        chunks = set(cache.chunks) | set(held)
        chunks |= {before for chunk in chunks for before in chunk.context}
        counts = Counter(block_id for chunk in chunks for block_id in chunk.block_ids)
        assert all(count == 1 for count in counts.values()), "two chunks share a block"
        counts.update(node.block_id for node in cache.texts)
        counts.update(block_id for span in spans for block_id in span.block_ids)
        assert counts == Counter({b: cache.pool.ref_count(b) for b in range(cache.pool.num_blocks) if b in counts})
        assert len(counts) == cache.pool.num_blocks - cache.pool.num_free, "a taken block belongs to nobody"
        users = Counter(held)
        users.update(before for chunk in chunks for before in chunk.context)
        for chunk in chunks:
            assert chunk.num_users == users[chunk]
            may_go = chunk in cache.chunks and chunk.is_ready and not chunk.num_users and not chunk.is_pinned
            assert (chunk in cache._evictable) == may_go
            assert chunk.is_ready or chunk.num_users, "half a chunk stays without anybody who completes it"

    @invariant()
    def nobody_holds_anything_while_waiting(self):
        if not hasattr(self, "engine"):
            return
        for sequence in self.engine.scheduler.waiting:
            assert sequence.status is RequestStatus.WAITING
            assert not sequence.spans
        assert set(self.engine.live_request_ids) <= set(self.live)

    @invariant()
    def promised_room_exists(self):
        """`can_allocate` promises exactly what evicting everything unused would give."""
        if not hasattr(self, "engine"):
            return
        cache = self.engine.cache

        def can_go(node):
            return cache.pool.ref_count(node.block_id) == 1 and all(can_go(child) for child in node.children)

        room = cache.pool.num_free + sum(can_go(node) for node in cache.texts)
        room += sum(len(chunk.block_ids) for chunk in cache.chunks if not chunk.num_users and not chunk.is_pinned)
        assert cache.can_allocate(room)
        assert not cache.can_allocate(room + 1)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self.live, f"never ended: {sorted(self.live)}"
        self.engine.check_idle()
        for chunk in list(self.engine.cache.chunks):
            self.engine.cache.unpin_chunk(chunk)
        self.engine.cache.clear()
        assert self.engine.cache.pool.num_free == self.engine.cache.pool.num_blocks


def made_up_deviations(runner, sequence):
    """Numbers that depend on the tokens alone; there are no tensors to compare."""
    return torch.tensor([hash((token_id, "deviation")) % 97 for token_id in sequence.group.prompt_token_ids])


def _run(max_examples, stateful_step_count):
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=stateful_step_count,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def no_tensors(monkeypatch):
    monkeypatch.setattr(block_chooser, "kv_deviations", made_up_deviations)


def test_any_schedule():
    _run(60, 40)


@pytest.mark.slow
def test_any_schedule_at_length():
    _run(1500, 80)
