# SPDX-License-Identifier: Apache-2.0
"""Random schedules: whatever arrives, leaves, is evicted, deleted, pinned, expires or fails, and in whatever order, every
request ends exactly once, with the tokens it would have had alone, no block, reference or hold is lost, and nothing of a
deleted document is found again. Each request brings its own method, chunk options and blocks to recompute.

The same schedules run over symbols (many steps a second, held to plain counting) and over tiny models (held to the oracle).
"""

import contextlib
import functools
import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
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

from fixtures.symbolic_model import VOCAB_SIZE, SymbolicRunner, expected_tokens
from fixtures.tiny_engine import CHUNK_METHODS, FULL_METHODS, loaded_tiny, make_engine, mask_of, named_tokens, prompt
from fixtures.tiny_models import tiny_model
from lazyattention.config import ChunkOptions
from lazyattention.documents.document import Document
from lazyattention.engine import block_chooser
from lazyattention.engine.request import RequestStatus
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import NotFoundError, RequestError
from lazyattention.reuse import REUSE_METHODS, PromptLayout, SpanUse
from oracle import TOLERANCE, ChunkOracle, LogitsRecorder, error_of

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

# Those that read in place are drawn more often: most can go wrong there.
METHODS = (*CHUNK_METHODS[:2] * 3, *CHUNK_METHODS, *FULL_METHODS)
# Lengths around block sizes; documents and instructions recur, so that chunks and text are shared.
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
    "p5 d1 d1 d0 d6 t2",
    "p5 d4 +6 d6 t3",
    "p3 d6 +1 t2 d4 +6 d13 t4",
)
DOCUMENTS = ("d6", "d4", "d13", "d1", "d0")
RECOMPUTES = ("none", "none", "first:1", "first:6", "deviation:0.3", "attention:0.3", "attention:0.6", "attention:1")
SCOPES = ("a", "a", "a", "b")
OWNERS = ("a", "b", "shared")
TEXT = "the log\n"
# Those that differ in one thing meet often: nothing of one may be taken for the other's.
OPTIONS = st.one_of(
    st.none(),
    st.sampled_from(
        [
            ChunkOptions(),
            ChunkOptions(encoding="isolated"),
            ChunkOptions(positions="parallel"),
            ChunkOptions(num_hidden=3),
            ChunkOptions(sink="bos"),
            ChunkOptions(chunk_temperature=0.6),
            ChunkOptions(chunk_bias=-1.0),
        ]
    ),
    st.builds(
        ChunkOptions,
        encoding=st.sampled_from(["after_preamble", "isolated"]),
        positions=st.sampled_from(["contiguous", "contiguous", "parallel"]),
        num_hidden=st.sampled_from([0, 1, 3, 40]),
        sink=st.sampled_from(["", "", "bos", TEXT]),
        chunk_temperature=st.sampled_from([1.0, 1.0, 0.6]),
        chunk_bias=st.sampled_from([0.0, 0.0, -1.0]),
    ),
)
REQUESTS = st.fixed_dictionaries(
    {
        "shorthand": st.sampled_from(SHORTHANDS),
        "method": st.sampled_from(METHODS),
        "max_tokens": st.integers(1, 9),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "logprobs": st.sampled_from([None, None, 2]),
        "scope": st.sampled_from(SCOPES),
        "is_shared": st.sampled_from([False, False, True]),
        "options": OPTIONS,
        "recompute": st.sampled_from(RECOMPUTES),
    }
)
# Layers with a window, with none but short ones, without RoPE; soft caps; two tables.
FAMILIES = (
    ("llama", "default"),
    ("mistral", "default"),
    ("gemma2", "default"),
    ("gemma3_text", "a table per layer type"),
    ("cohere2", "full layers without RoPE"),
    ("smollm3", "some layers without RoPE"),
)
# Of these tokens each document has some, and nobody else has all of them.
TRACE_LEN = 3


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Symbols:
    """Answers by counting."""

    families = (None,)

    def __init__(self, engine, _, keeps_plans):
        self.runner = SymbolicRunner(engine, keeps_plans=keeps_plans)
        self._block_size = engine.cache.block_size

    def check(self, request_id, layout, params, mask, chosen_blocks, output):
        want = expected_tokens(layout, params.max_tokens, mask, chosen_blocks, self._block_size)
        logprob = 1 - math.log(math.e + VOCAB_SIZE - 1)
        for completion in output.outputs:
            num_tokens = len(completion.token_ids)
            assert completion.token_ids == want[:num_tokens], request_id
            if params.logprobs is not None:
                assert [entry.logprob for entry in completion.logprobs] == [pytest.approx(logprob)] * num_tokens


@functools.cache
def oracle_of(model_type, variant):
    return ChunkOracle(tiny_model(model_type, variant).double())


class TinyModels:
    """Answers by the model, checked when a request ends."""

    families = FAMILIES

    def __init__(self, engine, family, _):
        self.runner = self
        self.fail_next = False
        self._engine, self._oracle = engine, oracle_of(*family)
        self._recorder = LogitsRecorder(engine)
        self._run = engine.model_runner.run
        engine.model_runner.run = self.run

    def run(self, batch):
        if self.fail_next:
            raise RuntimeError("the model was told to fail")
        return self._run(batch)

    def check(self, request_id, layout, params, mask, chosen_blocks, output):
        if not output.finished:
            return
        for completion in output.outputs:
            token_ids = completion.token_ids
            if not token_ids:
                continue
            want = self._oracle.logits(
                layout, token_ids[:-1], mask=mask, chosen_blocks=chosen_blocks, block_size=self._engine.cache.block_size
            )
            got = self._recorder.of(request_id, completion.index)[: len(token_ids)]
            error = error_of(got, want)
            assert error < TOLERANCE, (error, request_id, mask, chosen_blocks)
            assert token_ids == got.argmax(-1).tolist()
            if params.logprobs is not None:
                likeliest = want.log_softmax(-1).max(-1).values.tolist()
                assert [entry.logprob for entry in completion.logprobs] == pytest.approx(likeliest, abs=1e-3)


class Schedules(RuleBasedStateMachine):
    """The engine with a stand-in that knows the answers, held to it and to plain counting after every call."""

    world = Symbols

    def __init__(self):
        super().__init__()
        self.live = {}
        self.ended = {}
        self.excused = set()  # may end without all their tokens: aborted, too late, or in a pass that failed
        self.number = 0
        self.had_pins = False
        self.uploaded = set()
        # Documents, by whose they are, of which nothing is stored; requests that are the first to bring them since.
        self.gone = {(owner, name) for owner in OWNERS for name in DOCUMENTS}
        self.first_since = {}

    @initialize(
        data=st.data(),
        num_tokens=st.integers(36, 104),
        block_size=st.sampled_from([1, 4, 4, 16]),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 64]),
        max_num_seqs=st.sampled_from([1, 2, 5, 64]),
        chunk=OPTIONS,
        chunk_ttl_s=st.sampled_from([None, 50.0]),
        max_skipped=st.sampled_from([1, 64]),
        keeps_plans=st.booleans(),
    )
    def start(self, *, data, num_tokens, block_size, chunk, keeps_plans, **options):
        family = data.draw(st.sampled_from(self.world.families))
        self.engine = make_engine(
            family and loaded_tiny(*family),
            # Of long blocks more are needed, since most are nearly empty.
            num_blocks=num_tokens // min(block_size, 6),
            block_size=block_size,
            chunk=chunk or ChunkOptions(),
            **options,
        )
        self.clock = self.engine.cache._clock = Clock()
        self.answers = self.world(self.engine, family, keeps_plans)
        if self.world is Symbols:
            self.engine._checksums = None  # there are no tensors to check
        self.chosen_blocks = {}
        choose = self.engine._admission.choose

        def choose_once(group, scores=None):
            assert group.request_id not in self.chosen_blocks
            choose(group, scores)
            visible = [not planned.is_hidden for planned in group.plan.spans]
            self.chosen_blocks[group.request_id] = list(itertools.compress(group.chosen_blocks, visible))

        self.engine._admission.choose = choose_once

    # What can happen --------------------------------------------------------------------------------------------------

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=3), num_steps=st.integers(0, 10))
    def arrive(self, requests, num_steps):
        for request in requests:
            self.arrive_one(**request)
        self.step(num_steps)

    def arrive_one(self, shorthand, method, max_tokens, n, logprobs, scope, is_shared, options, recompute):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n, logprobs=logprobs, ignore_eos=True)
        layout = prompt(shorthand)
        if is_shared:
            layout = PromptLayout(tuple(replace(s, scope="shared") if s.is_document else s for s in layout.spans))
        is_parallel = (options or self.engine.config.chunk).positions == "parallel"
        if REUSE_METHODS[method].document_use is not SpanUse.SHARED or is_parallel:
            recompute = None
        self.admit(layout, method, params, scope, options, recompute)

    def admit(self, layout, method, params, scope, options, recompute=None):
        request_id = f"r{self.number}"
        self.number += 1
        before = self.engine.cache.pool.num_free
        try:
            self.engine.add_request(
                request_id,
                layout,
                params,
                scope=scope,
                reuse_method=method,
                chunk_options=options,
                recompute=recompute,
                deadline_s=1e12,
            )
        except RequestError:
            assert self.engine.cache.pool.num_free == before
            return
        self.live[request_id] = (layout, method, params, options, scope)
        found_as_text = set()
        if recompute not in (None, "none"):
            # What it computes anew of a shared document is text of its own scope, where the same text may lie already.
            for span in (span for span in layout.spans if span.scope is not None):
                own = (scope, span.document_id)
                if own not in self.gone:
                    found_as_text.add((span.scope, span.document_id))
                self.gone.discard(own)
                self.first_since.pop(own, None)
        for key in documents_of(layout, scope):
            if key in self.gone and key not in found_as_text:
                self.first_since[key] = request_id
            else:
                self.first_since.pop(key, None)
            self.gone.discard(key)
            # One that waits to compute a shared document of this name anew may find this text.
            if key[0] != "shared":
                self.first_since.pop(("shared", key[1]), None)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), max_tokens=st.integers(1, 20), scope=st.sampled_from(SCOPES))
    def arrive_with_a_live_ones_prompt(self, data, max_tokens, scope):
        layout, method, _, options, _ = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.admit(layout, method, params, scope, options)

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

    @precondition(lambda self: self.engine.live_request_ids)
    @rule(data=st.data())
    def a_deadline_passes(self, data):
        request_id = data.draw(st.sampled_from(self.engine.live_request_ids))
        self.engine._groups[request_id].deadline_s = 0.0
        self.excused.add(request_id)
        self.step(1)
        assert "deadline passed" in str(self.ended[request_id].error)

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

    @rule(document_id=st.sampled_from(DOCUMENTS), owner=st.sampled_from(OWNERS))
    def delete(self, document_id, owner):
        key = (owner, document_id)
        readers = [r for r, (layout, *_, scope) in self.live.items() if key in documents_of(layout, scope)]
        with contextlib.suppress(NotFoundError):
            self.engine.documents.delete(document_id, scope=owner)
        self.uploaded.discard(key)
        assert document_id not in [info.document_id for info in self.engine.documents.list(owner)]
        self.first_since.pop(key, None)
        if not readers:
            self.gone.add(key)

    @rule(
        what=st.sampled_from(["upload", "pin", "pin for a while", "unpin"]),
        document_id=st.sampled_from(DOCUMENTS),
        owner=st.sampled_from(OWNERS),
    )
    def look_after_documents(self, what, document_id, owner):
        documents = self.engine.documents
        with contextlib.suppress(NotFoundError):
            if what == "upload":
                documents.upload(Document(text=document_id, id=document_id), owner)
                self.uploaded.add((owner, document_id))
            elif what == "unpin":
                documents.unpin([document_id], scope=owner)
            else:
                documents.pin([document_id], scope=owner, ttl_s=None if what == "pin" else 20.0)
                self.had_pins = True

    @rule(seconds=st.sampled_from([1.0, 15.0, 60.0]))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def a_pass_fails(self):
        self.answers.runner.fail_next = True
        self.engine._next_housekeeping_s = 0.0
        for output in self.engine.step():
            if output.error is not None and "told to fail" in str(output.error):
                self.excused.add(output.request_id)
            self.note(output)
        self.answers.runner.fail_next = False

    # What must hold ---------------------------------------------------------------------------------------------------

    def note(self, output):
        layout, method, params, options, _ = self.live[output.request_id]
        assert output.request_id not in self.ended
        mask = mask_of(options or self.engine.config.chunk, method)
        self.answers.check(output.request_id, layout, params, mask, self.chosen_blocks.get(output.request_id), output)
        assert 0 <= output.num_reused_tokens < output.num_prompt_tokens
        if not output.finished:
            return
        *_, scope = self.live.pop(output.request_id)
        self.ended[output.request_id] = output
        self.check_report(output, layout, scope)
        if output.request_id in self.excused:
            return
        if output.error is not None:
            # Only pins can make a request fail for want of room: what could never fit was refused.
            assert self.had_pins, output.error
            assert "are pinned" in str(output.error)
            return
        assert [len(completion.token_ids) for completion in output.outputs] == [params.max_tokens] * params.n
        assert output.num_computed_tokens + output.num_reused_tokens == output.num_prompt_tokens

    def check_report(self, output, layout, scope):
        """Whoever is the first to bring a document since nothing of it was stored finds nothing of it."""
        spans = [span for span in layout.spans if span.is_document]
        for span, entry in zip(spans, output.documents, strict=bool(output.documents)):
            assert 0 <= entry.num_reused_tokens <= entry.num_tokens
            assert 0 <= entry.num_recomputed_tokens <= entry.num_tokens
            key = (span.scope or scope, span.document_id)
            if self.first_since.get(key) == output.request_id and entry.reason != "same request":
                assert not entry.num_reused_tokens, (key, entry)
                assert entry.status in ("miss", "computed")
        for key in [key for key, request_id in self.first_since.items() if request_id == output.request_id]:
            del self.first_since[key]
        assert sum(entry.num_recomputed_tokens for entry in output.documents) == output.num_recomputed_tokens

    @invariant()
    def uploads_are_kept_until_deleted(self):
        if hasattr(self, "engine"):
            found = {(o, name) for o in OWNERS for name in DOCUMENTS if self.engine.documents.find(name, o)}
            assert found == self.uploaded

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
        for _ in range(20_000):  # of one token each, for a hundred requests and more
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self.live, f"never ended: {sorted(self.live)}"
        self.engine.check_idle()
        assert self.engine.stats.num_finished == len(self.ended)
        assert self.engine.stats.num_recomputed_tokens == sum(
            output.num_recomputed_tokens for output in self.ended.values() if output.num_computed_tokens
        )
        for owner, document_id in itertools.product(OWNERS, DOCUMENTS):
            with contextlib.suppress(NotFoundError):
                self.engine.documents.delete(document_id, scope=owner)
        self.nothing_is_left_of_documents()
        self.engine.check_idle()
        for chunk in list(self.engine.cache.chunks):
            self.engine.cache.unpin_chunk(chunk)
        self.engine.cache.clear()
        assert self.engine.cache.pool.num_free == self.engine.cache.pool.num_blocks

    def nothing_is_left_of_documents(self):
        """All were deleted: only instructions, sinks and what was computed before any document may be stored."""
        cache = self.engine.cache
        assert not [chunk for chunk in cache.chunks if chunk.document_ids]
        for node in cache.texts:
            assert is_before_documents(node), node.token_ids
        kept = reachable_token_ids(self.engine)
        for name in DOCUMENTS:
            tokens = named_tokens(name)
            if len(tokens) >= TRACE_LEN:
                left = [
                    ids for ids in kept if any(ids[i : i + TRACE_LEN] == tokens[:TRACE_LEN] for i in range(len(ids)))
                ]
                assert not left, (name, left)


def documents_of(layout, scope):
    return {(span.scope or scope, span.document_id) for span in layout.spans if span.is_document}


FIRST_TEXTS = {prompt(shorthand).spans[0].token_ids for shorthand in SHORTHANDS if not shorthand.startswith("d")}
FIRST_TEXTS |= {named_tokens("p5") + named_tokens("t12")}


def is_before_documents(node):
    """True if a text block and all before it are the beginning of a prompt."""
    tokens = ()
    while node is not None:
        tokens = (*node.token_ids, *tokens)
        node = node.parent
    return any(tokens[: len(text)] == text or text[: len(tokens)] == tokens for text in FIRST_TEXTS)


def reachable_token_ids(engine):
    """Every sequence of whole numbers that something of the engine still refers to, the model aside."""
    found, seen, pending = [], set(), [engine]
    while pending:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, (type, torch.nn.Module, torch.Tensor, str, bytes, int, float)):
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            found.append(tuple(thing.reshape(-1).tolist()))
        elif isinstance(thing, (list, tuple)) and thing and all(isinstance(one, int) for one in thing):
            found.append(tuple(thing))
        elif isinstance(thing, dict):
            pending += [*thing.keys(), *thing.values()]
        elif isinstance(thing, (list, tuple, set, frozenset)):
            pending += thing
        elif type(thing).__module__.startswith("lazyattention"):
            names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
            pending += [getattr(thing, name) for name in names if hasattr(thing, name)]
            pending += vars(thing).values() if hasattr(thing, "__dict__") else ()
    return found


def deviations(runner, sequence):
    """Of symbols numbers that depend on the tokens alone; there are no tensors to compare."""
    if not isinstance(runner.run.__self__, SymbolicRunner):
        return measured_deviations(runner, sequence)
    return torch.tensor([hash((token_id, "deviation")) % 97 for token_id in sequence.group.prompt_token_ids])


measured_deviations = block_chooser.kv_deviations


class SchedulesOfModels(Schedules):
    """The same over tiny models."""

    world = TinyModels


def _run(machine, max_examples, stateful_step_count):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=stateful_step_count,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def symbols_have_deviations(monkeypatch):
    monkeypatch.setattr(block_chooser, "kv_deviations", deviations)


def test_any_schedule():
    _run(Schedules, 18, 25)


def test_any_schedule_of_tiny_models():
    _run(SchedulesOfModels, 8, 20)


@pytest.mark.slow
def test_any_schedule_at_length():
    _run(Schedules, 1500, 80)


@pytest.mark.slow
def test_any_schedule_of_tiny_models_at_length():
    _run(SchedulesOfModels, 300, 40)
