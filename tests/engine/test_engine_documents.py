# SPDX-License-Identifier: Apache-2.0
"""The life of a document in the engine: found or not and why, pinned, expired, deleted with all that came of it."""

from dataclasses import replace

import pytest

from fixtures.tiny_engine import CHUNK_METHODS, FULL_METHODS, GREEDY, answer, drain, make_engine, named_tokens, prompt
from lazyattention.documents.document import Document
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import NotFoundError
from lazyattention.reuse import REUSE_METHODS, PromptLayout

LONGER = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def statuses(output):
    return [(reuse.document_id, reuse.status, reuse.reason) for reuse in output.documents]


def held_token_ids(engine):
    """Everything the store could still serve, by any key."""
    chunks = [chunk.token_ids for chunk in engine.cache.chunks]
    return [*chunks, *(node.token_ids for node in engine.cache.texts)]


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


# Hits, misses and their reasons ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CHUNK_METHODS[:3])
def test_a_cold_workload_reports_no_hit_and_a_warm_one_what_was_not_computed(method):
    engine = make_engine(reuse_method=method)
    layout = prompt("p11 d9 d16 d0 t7")
    cold, warm = (answer(engine, layout) for _ in range(2))
    assert statuses(cold) == [("d9", "miss", "new"), ("d16", "miss", "new"), ("d0", "computed", "empty")]
    assert statuses(warm) == [("d9", "hit", "reused"), ("d16", "hit", "reused"), ("d0", "computed", "empty")]
    assert (cold.num_reused_tokens, cold.num_computed_tokens) == (0, 43)
    assert (warm.num_reused_tokens, warm.num_computed_tokens) == (36, 7)
    stats = engine.cache.stats
    assert (stats.num_hit_tokens, stats.num_miss_tokens) == (25, 25)
    assert [reuse.num_bytes for reuse in warm.documents] == [9 * 1024, 16 * 1024, 0]


def test_reported_reuse_is_what_the_model_did_not_compute():
    """Numbers are held to the tokens that went through the model."""
    engine = make_engine()
    computed = []
    run = engine.model_runner.run
    engine.model_runner.run = lambda batch: (computed.append(batch.num_tokens), run(batch))[1]
    for shorthand in ("p11 d9 d16 t7", "p11 d16 d9 t7", "p11 d9 d16 t7", "p11 d9 t8 d16 t9", "p11 d9 t8 d16 t9"):
        for method in REUSE_METHODS:
            computed.clear()
            output = answer(engine, prompt(shorthand), SamplingParams(max_tokens=1), reuse_method=method)
            assert output.num_computed_tokens == sum(computed), (shorthand, method)
            assert output.num_computed_tokens + output.num_reused_tokens == output.num_prompt_tokens


def test_waiting_requests_count_once_however_often_they_are_looked_at():
    engine = make_engine(num_blocks=12, max_num_seqs=4)
    for name in ("a", "b", "c"):
        engine.add_request(name, prompt(f"p11 d19-{name} t7"), LONGER)
    outputs = drain(engine)
    assert all(statuses(outputs[name]) == [(f"d19-{name}", "miss", "new")] for name in outputs)
    assert (engine.cache.stats.num_hit_tokens, engine.cache.stats.num_miss_tokens) == (0, 57)


def test_every_reason_for_a_miss():
    engine = make_engine(chunk_ttl_s=50)
    clock = engine.cache._clock = Clock()
    layout = prompt("p11 d9 t7")

    def reason(layout=layout, **more):
        [reuse] = answer(engine, layout, **more).documents
        return reuse.reason

    assert reason() == "new"
    assert reason() == "reused"
    assert reason(prompt("p12 d9 t7")) == "other preamble"
    engine.cache.clear()
    assert reason() == "evicted"
    clock.now_s += 60
    assert reason() == "expired"
    engine.documents.delete("d9")
    assert reason() == "deleted"
    assert reason(scope="tenant") == "new"
    assert reason(reuse_method="chunk_recompute") == "not reused by chunk_recompute"
    assert reason(reuse_method="full_recompute") == "not reused by full_recompute"
    assert reason(reuse_method="prefix") == "no identical prefix"
    assert reason(reuse_method="prefix") == "identical prefix"


def test_one_document_twice_in_a_prompt_is_computed_once():
    engine = make_engine()
    output = answer(engine, prompt("p11 d9 d16 d9 t7"))
    assert statuses(output)[2] == ("d9", "hit", "same request")
    assert (output.num_computed_tokens, output.num_reused_tokens) == (43, 9)
    assert len(engine.cache.chunks) == 3


def test_ten_requests_for_one_cold_document_compute_it_once():
    engine = make_engine(max_num_batched_tokens=32)
    for number in range(10):
        engine.add_request(str(number), prompt(f"p11 d60 t{number + 1}"), GREEDY)
    outputs = drain(engine)
    first, *others = (statuses(outputs[str(number)]) for number in range(10))
    assert first == [("d60", "miss", "new")]
    assert all(other in ([("d60", "hit", "in flight")], [("d60", "hit", "reused")]) for other in others)
    assert [("d60", "hit", "in flight")] in others
    prompt_tokens = 11 + 60 + sum(range(1, 11))
    assert engine.stats.num_computed_tokens == prompt_tokens + 10 * (GREEDY.max_tokens - 1)


def test_a_document_is_one_physical_copy_whatever_the_number_of_positions():
    engine = make_engine()
    for shorthand in ("d32 t7", "d9 d32 t7", "d16 d32 d9 t5", "d32 d32 t3"):
        answer(engine, prompt(shorthand))
    blocks = {chunk.num_tokens: len(chunk.block_ids) for chunk in engine.cache.chunks}
    assert blocks == {9: 2, 16: 2, 32: 4}


def test_multi_turn_chat_computes_only_the_new_turn():
    """Documents first, history behind them: each turn reuses all whole blocks of text before it."""
    engine = make_engine(block_size=8)
    history, new_tokens = list(named_tokens("t37")), 0
    for turn in range(4):
        layout = prompt("p11 d33 d9 t1")
        layout = type(layout)((*layout.spans[:-1], type(layout.spans[0])(tuple(history))))
        output = answer(engine, layout, LONGER)
        if turn:
            assert output.num_computed_tokens <= new_tokens + engine.cache.block_size
        added = named_tokens(f"t15-{turn}")
        history += [*output.outputs[0].token_ids, *added]
        new_tokens = len(added) + 1


def test_chat_over_reordered_documents_reuses_no_text_behind_them():
    engine = make_engine()
    answer(engine, prompt("p11 d9 d16 t40"))
    moved = answer(engine, prompt("p11 d16 d9 t40"))
    assert moved.num_reused_tokens == 36
    same = answer(engine, prompt("p11 d9 d16 t40"))
    assert same.num_reused_tokens == 36 + 32


# Pins -----------------------------------------------------------------------------------------------------------------


def test_a_pinned_document_survives_pressure_and_an_unpinned_one_does_not():
    engine = make_engine(num_blocks=16)
    answer(engine, prompt("d33 t5"))
    engine.documents.pin(["d33"])
    for number in range(4):
        answer(engine, prompt(f"d60-{number} t5"))
    assert statuses(answer(engine, prompt("d33 t6"))) == [("d33", "hit", "reused")]
    engine.documents.unpin(["d33"])
    for number in range(4):
        answer(engine, prompt(f"d100-{number} t5"))
    assert statuses(answer(engine, prompt("d33 t7"))) == [("d33", "miss", "evicted")]


def test_a_pool_full_of_pins_refuses_with_a_message_and_goes_on():
    engine = make_engine(num_blocks=16)
    answer(engine, prompt("d96 t5"))
    engine.documents.pin(["d96"])
    output = answer(engine, prompt("d40 t5"))
    assert "of 16 KV blocks 12 are pinned" in str(output.error)
    assert statuses(answer(engine, prompt("d96 t6"))) == [("d96", "hit", "reused")]
    engine.documents.unpin(["d96"])
    assert answer(engine, prompt("d40 t5")).error is None
    engine.check_idle()


def test_a_pin_for_a_time_ends():
    engine = make_engine()
    clock = engine.cache._clock = Clock()
    answer(engine, prompt("d33 t5"))
    engine.documents.pin(["d33"], ttl_s=10)
    clock.now_s += 9
    assert engine.documents.list()[0].is_pinned
    clock.now_s += 1
    assert not engine.documents.list()[0].is_pinned


@pytest.mark.parametrize("call", ["pin", "unpin"])
def test_all_or_nothing_when_a_document_is_not_stored(call):
    engine = make_engine()
    answer(engine, prompt("d33 t5"))
    with pytest.raises(NotFoundError, match="'nowhere' has no stored KV"):
        getattr(engine.documents, call)(["d33", "nowhere"])
    assert not engine.documents.list()[0].is_pinned


# Deletion -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*CHUNK_METHODS, *FULL_METHODS])
def test_deletion_takes_all_text_computed_behind_the_document(method):
    engine = make_engine(reuse_method=method)
    for shorthand in ("p11 d9 t40", "p11 d16 t9 d9 t30", "p11 d16 t50"):
        answer(engine, prompt(shorthand), LONGER)
    if method in ("chunk_recompute", "full_recompute"):
        with pytest.raises(NotFoundError):
            engine.documents.delete("d9")
        return
    engine.documents.delete("d9")
    engine.check_idle()
    kept = held_token_ids(engine)
    assert named_tokens("d9")[:8] not in kept
    assert not [tokens for tokens in kept if tokens[:8] in (named_tokens("t40")[:8], named_tokens("t30")[:8])]
    reused = {
        shorthand: answer(engine, prompt(shorthand)).num_reused_tokens
        for shorthand in ("p11 d16 t50", "p11 d9 t40", "p11 d16 t9 d9 t30")
    }
    # What was computed before or without the document is still there; the second of these prompts computes it anew.
    again = 0 if method == "prefix" else 9
    assert reused == {"p11 d16 t50": 11 + 16 + 48, "p11 d9 t40": 11, "p11 d16 t9 d9 t30": 11 + 16 + 9 + again}


@pytest.mark.parametrize("method", ["rotate_query", "rotate_key", "copy_rotate"])
def test_deletion_takes_text_behind_a_chunk_that_was_evicted(method):
    engine = make_engine(block_size=4)
    answer(engine, prompt("p5 d6 d13 t9"), reuse_method=method)
    for chunk in [chunk for chunk in engine.cache.chunks if chunk.document_ids]:
        engine.cache._evictable.discard(chunk)
        engine.cache._forget_chunk(chunk, "evicted")
    assert len(engine.cache.texts) > 0
    assert engine.documents.delete("d6").num_freed_bytes > 0
    assert len(engine.cache.texts) == 0
    engine.check_idle()


def test_text_behind_a_chunk_ends_with_it_under_every_name_and_when_its_time_is_over():
    layout = prompt("p11 d9 t40")
    span = next(span for span in layout.spans if span.is_document)
    twin = replace(layout, spans=tuple(replace(s, document_id="twin") if s is span else s for s in layout.spans))
    for is_deleted in (True, False):
        engine = make_engine(chunk_ttl_s=10)
        clock = engine.cache._clock = Clock()
        assert statuses(answer(engine, layout)) == [("d9", "miss", "new")]
        assert statuses(answer(engine, twin)) == [("twin", "hit", "reused")]
        assert named_tokens("t40")[:8] in held_token_ids(engine)
        if is_deleted:
            engine.documents.delete("twin")
        clock.now_s += 0 if is_deleted else 11
        engine.documents.list()  # ends what is over
        assert set(held_token_ids(engine)) <= {named_tokens("p11")[:8], named_tokens("p11")[8:], named_tokens("p11")}


@pytest.mark.parametrize("method", ["rotate_query", "rotate_key", "copy_rotate", "prefix"])
@pytest.mark.parametrize("after_steps", [0, 1, 2, 3, 6])
def test_deletion_while_running_keeps_nothing_beyond_the_request(method, after_steps):
    """A document that only a live request had was reported as not found, and stayed stored once that request ended."""
    want = answer(make_engine(reuse_method=method), prompt("p11 d30 t30"), LONGER).outputs[0].token_ids
    engine = make_engine(reuse_method=method, max_num_batched_tokens=24)
    engine.add_request("runs", prompt("p11 d30 t30"), LONGER)
    for _ in range(after_steps):
        engine.step()
    deleted = engine.documents.delete("d30")
    assert deleted.request_ids == ["runs"]
    assert drain(engine)["runs"].outputs[0].token_ids == want
    engine.check_idle()
    preamble = named_tokens("p11")
    assert set(held_token_ids(engine)) <= {preamble, preamble[:8], preamble[8:]}
    assert engine.documents.list() == []


def test_deletion_in_the_step_that_ends_the_last_user():
    """The chunk was complete and gone in one step; the checksum of its blocks, which it had no more, stopped the engine."""
    engine = make_engine()
    engine.add_request("runs", prompt("p11 d30 t7"), SamplingParams(max_tokens=1))
    engine.documents.delete("d30")
    assert drain(engine)["runs"].error is None
    assert [chunk.num_tokens for chunk in engine.cache.chunks] == [11]


def test_after_deletion_the_document_is_new_to_others_at_once():
    engine = make_engine(max_num_batched_tokens=24)
    engine.add_request("old", prompt("p11 d30 t30"), LONGER)
    for _ in range(5):
        engine.step()
    engine.documents.delete("d30")
    engine.add_request("new", prompt("p11 d30 t30"), LONGER)
    outputs = drain(engine)
    assert statuses(outputs["new"]) == [("d30", "miss", "deleted")]
    assert outputs["old"].outputs[0].token_ids == outputs["new"].outputs[0].token_ids
    engine.check_idle()


def test_deleting_what_is_not_there_says_so():
    engine = make_engine()
    with pytest.raises(NotFoundError, match="document 'd9' is not stored"):
        engine.documents.delete("d9")
    engine.documents.upload(Document("some text", id="d9"))
    assert engine.documents.delete("d9").num_chunks == 0
    with pytest.raises(NotFoundError):
        engine.documents.delete("d9")


def test_deletion_frees_the_bytes_it_says():
    engine = make_engine()
    answer(engine, prompt("p11 d30 t30"), LONGER)
    free = engine.cache.pool.num_free
    deleted = engine.documents.delete("d30")
    block_bytes = engine.cache.block_size * engine.documents.bytes_per_token
    assert deleted.num_freed_bytes == (engine.cache.pool.num_free - free) * block_bytes > 4 * block_bytes


def test_a_deleted_document_is_not_remembered_by_the_tokeniser():
    """Its text and tokens stayed in the memo of tokenised documents."""
    engine = make_engine()
    document = Document("the lighthouse stands on the northern cape", id="secret")
    layout = engine.prompts.chat([{"role": "user", "content": "What?"}], [document])
    answer(engine, layout)
    assert len(engine.prompts.memo) == 1
    engine.documents.delete("secret")
    assert len(engine.prompts.memo) == 0


# Scopes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rotate_query", "prefix"])
def test_scopes_share_nothing_and_see_nothing(method):
    engine = make_engine(reuse_method=method)
    layout = prompt("p16 d9 d16 t40")
    first = answer(engine, layout, scope="a")
    other = answer(engine, layout, scope="b")
    assert statuses(other) == statuses(first)
    assert other.num_reused_tokens == 0
    assert answer(engine, layout, scope="a").num_reused_tokens > 0
    engine.documents.upload(Document("private", id="note"), scope="a")
    assert engine.documents.find("note", scope="b") is None
    assert "note" not in [info.document_id for info in engine.documents.list("b")]
    assert engine.documents.list("c") == []
    with pytest.raises(NotFoundError):
        engine.documents.delete("d9", scope="c")
    with pytest.raises(NotFoundError):
        engine.documents.pin(["d9"], scope="c")
    engine.documents.delete("d9", scope="b")
    assert answer(engine, layout, scope="a").num_reused_tokens > 0


def test_an_in_flight_chunk_is_not_shared_across_scopes():
    engine = make_engine(max_num_batched_tokens=16)
    for scope in ("a", "b"):
        engine.add_request(scope, prompt("d60 t7"), GREEDY, scope=scope)
    outputs = drain(engine)
    assert all(statuses(outputs[scope]) == [("d60", "miss", "new")] for scope in "ab")


def shared(shorthand):
    """The prompt with its documents lying in scope "library"."""
    return PromptLayout(
        tuple(replace(span, scope="library") if span.is_document else span for span in prompt(shorthand).spans)
    )


@pytest.mark.parametrize("after_steps", [0, 1, 3])
def test_deleting_a_shared_document_reaches_text_that_a_tenant_computes_behind_it(after_steps):
    """Only live requests of the document's own scope were stopped from keeping what they computed behind it."""
    engine = make_engine()
    engine.add_request("reads", shared("p11 d30 t30"), LONGER, scope="tenant")
    for _ in range(after_steps):
        engine.step()
    deleted = engine.documents.delete("d30", scope="library")
    assert deleted.request_ids == [], "tenants' requests are not named to the library"
    drain(engine)
    engine.check_idle()
    assert set(held_token_ids(engine)) <= {named_tokens("p11")}
    assert engine.documents.list("library") == []


def test_a_shared_document_is_computed_once_for_all_its_readers():
    engine = make_engine()
    first = answer(engine, shared("p11 d30 t30"), scope="a")
    second = answer(engine, shared("p11 d30 t30"), scope="b")
    assert (statuses(first), statuses(second)) == ([("d30", "miss", "new")], [("d30", "hit", "reused")])
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.num_computed_tokens >= 30, "the text behind it stays each tenant's own"
    private = answer(engine, prompt("p11 d30 t30"), scope="b")
    assert statuses(private) == [("d30", "miss", "new")]


def test_live_requests_of_another_scope_are_not_named():
    engine = make_engine()
    for scope in ("a", "b"):
        engine.add_request(scope, prompt("d9 t7"), GREEDY, scope=scope)
    engine.step()
    assert engine.documents.delete("d9", scope="a").request_ids == ["a"]
    drain(engine)
    assert [info.document_id for info in engine.documents.list("b")] == ["d9"]


# Warming and listing --------------------------------------------------------------------------------------------------


def test_a_warmed_text_hits_in_a_request():
    """Warming takes the path of a request, so that a request's very tokens are found."""
    engine = make_engine()
    document = Document("its lamp was lit in the spring", title="Lamp")
    message = {"role": "user", "content": "When was the lamp lit?"}
    system = {"role": "system", "content": "Answer briefly."}
    answer(engine, engine.prompts.chat([system, {"role": "user", "content": "?"}], [document]))
    output = answer(engine, engine.prompts.chat([system, message], [document]))
    assert statuses(output) == [(document.document_id, "hit", "reused")]


def test_list_tells_what_is_stored():
    engine = make_engine()
    answer(engine, prompt("p11 d9 d16 t7"))
    answer(engine, prompt("p12 d9 t7"))
    engine.documents.upload(Document("not computed yet", id="later", title="Later"))
    d16, d9, later = engine.documents.list()
    assert (d16.document_id, d16.num_chunks, d16.num_tokens, d16.num_hits) == ("d16", 1, 16, 0)
    assert (d9.document_id, d9.num_chunks, d9.num_tokens) == ("d9", 2, 18)
    assert d9.num_bytes == 18 * engine.documents.bytes_per_token
    assert (later.num_chunks, later.title, later.is_uploaded, d9.is_uploaded) == (0, "Later", True, False)
    assert d9.num_users == 0


def test_text_without_documents_is_reused_by_prefix_and_by_chunk_methods_alike():
    for method in ("prefix", "rotate_query"):
        engine = make_engine(reuse_method=method)
        answer(engine, prompt("t50"))
        assert answer(engine, prompt("t50")).num_reused_tokens == 48


def test_a_prompt_that_is_stored_whole_still_computes_its_last_token():
    engine = make_engine()
    first = answer(engine, prompt("t48"))
    again = answer(engine, prompt("t48"))
    assert again.num_computed_tokens == 8
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
