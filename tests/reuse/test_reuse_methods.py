# SPDX-License-Identifier: Apache-2.0
"""What each reuse method decides, from the prompt alone."""

from dataclasses import replace

import pytest

from fixtures.tiny_engine import CHUNK_METHODS, FULL_METHODS, prompt
from lazyattention.config import ChunkOptions
from lazyattention.errors import ConfigError
from lazyattention.reuse import REUSE_METHODS, Chunking, PromptLayout, Span, SpanUse

TEXT, SHARED, COPIED, PRIVATE = SpanUse.TEXT, SpanUse.SHARED, SpanUse.COPIED, SpanUse.PRIVATE
LAYOUT = prompt("p5 d9 t3 d4 t7")
PLANS = {
    "rotate_query": (SHARED, SHARED, TEXT, SHARED, TEXT),
    "rotate_key": (SHARED, SHARED, TEXT, SHARED, TEXT),
    "copy_rotate": (SHARED, COPIED, TEXT, COPIED, TEXT),
    "chunk_recompute": (TEXT, PRIVATE, TEXT, PRIVATE, TEXT),
    "prefix": (TEXT,) * 5,
    "full_recompute": (TEXT,) * 5,
}


ISOLATED = Chunking(ChunkOptions(encoding="isolated"))


def uses(plan):
    return tuple(planned.use for planned in plan.spans)


def test_every_method_is_listed_with_a_summary():
    assert set(REUSE_METHODS) == set(PLANS) == {*CHUNK_METHODS, *FULL_METHODS}
    for name in REUSE_METHODS:
        assert REUSE_METHODS[name].name == name
        assert REUSE_METHODS[name].summary.endswith(".")


@pytest.mark.parametrize("name", PLANS)
def test_uses_of_spans_after_a_preamble(name):
    plan = REUSE_METHODS[name].plan(LAYOUT, Chunking())
    assert uses(plan) == PLANS[name]
    seen = (0,) if name in CHUNK_METHODS else ()
    assert [planned.context for planned in plan.spans] == [(), seen, (), seen, ()]


@pytest.mark.parametrize("name", PLANS)
def test_uses_of_spans_when_isolated(name):
    plan = REUSE_METHODS[name].plan(LAYOUT, ISOLATED)
    assert uses(plan) == (TEXT, *PLANS[name][1:])
    assert not any(planned.context for planned in plan.spans)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("shorthand", ["d9 d4 t7", "p0 d9 t7", "p5 t7", "t7"])
def test_without_documents_or_preamble_nothing_is_shared_but_documents(name, shorthand):
    layout = prompt(shorthand)
    plan = REUSE_METHODS[name].plan(layout, Chunking())
    assert not any(planned.context for planned in plan.spans)
    assert all(planned.use is TEXT for planned in plan.spans if not planned.span.is_document)


def test_only_recomputing_methods_reuse_no_text():
    assert {name for name in REUSE_METHODS if not REUSE_METHODS[name].reuses_text} == {
        "chunk_recompute",
        "full_recompute",
    }
    assert {name for name in REUSE_METHODS if not REUSE_METHODS[name].keys_turned} == {"rotate_key"}


def test_an_unknown_method_suggests_the_nearest():
    with pytest.raises(ConfigError, match="rotate_query"):
        REUSE_METHODS["rotate_querry"]


def test_a_layout_counts_its_tokens():
    assert LAYOUT.num_tokens == 28 == len(LAYOUT.token_ids)
    assert PromptLayout.of_text([1, 2]).spans == (Span((1, 2)),)
    assert not PromptLayout.of_text([1, 2]).spans[0].is_document


# Where the options put things: (tokens, start, what it sees, is it hidden).
def shape(plan):
    return [(len(p.span.token_ids), p.start, p.context, p.is_hidden) for p in plan.spans]


def test_a_sink_stands_outside_the_prompt_and_is_seen_by_its_chunk_only():
    plan = REUSE_METHODS["rotate_query"].plan(LAYOUT, Chunking(ChunkOptions(sink="x"), sink=(1, 2)))
    assert shape(plan) == [
        (5, 0, (), False),
        (2, 5, (0,), True),
        (9, 5, (0, 1), False),
        (3, 14, (), False),
        (2, 5, (0,), True),
        (4, 17, (0, 4), False),
        (7, 21, (), False),
    ]
    assert plan.num_positions == LAYOUT.num_tokens


def test_hidden_tokens_keep_their_place_and_one_token_stays_visible():
    plan = REUSE_METHODS["copy_rotate"].plan(LAYOUT, Chunking(ChunkOptions(num_hidden=6)))
    assert shape(plan) == [
        (5, 0, (), False),
        (6, 5, (0,), True),
        (3, 11, (0, 1), False),
        (3, 14, (), False),
        (3, 17, (0,), True),
        (1, 20, (0, 4), False),
        (7, 21, (), False),
    ]
    assert uses(plan)[1:3] == (SHARED, COPIED)


def test_parallel_neighbours_start_together_and_pieces_follow_each_other():
    documents = [
        Span((1,) * n, document_id=name, chunk_index=i) for name, i, n in (("a", 0, 4), ("a", 1, 3), ("b", 0, 5))
    ]
    layout = PromptLayout((Span((1, 2), is_preamble=True), *documents, Span((3,)), documents[2], Span((4, 5))))
    plan = REUSE_METHODS["rotate_query"].plan(layout, Chunking(ChunkOptions(positions="parallel")))
    assert [p.start for p in plan.spans] == [0, 2, 6, 2, 9, 10, 15]
    assert plan.num_positions == 17


@pytest.mark.parametrize("name", FULL_METHODS)
def test_full_attention_knows_no_chunks(name):
    options = ChunkOptions(positions="parallel", num_hidden=2, sink="x")
    plan = REUSE_METHODS[name].plan(LAYOUT, Chunking(options, sink=(1, 2)))
    assert [(n, start) for n, start, _, _ in shape(plan)] == [(5, 0), (9, 5), (3, 14), (4, 17), (7, 21)]
    assert plan.options == ChunkOptions()


def test_positions_of_encoding_count_too():
    layout = prompt("d9 t1")
    plan = REUSE_METHODS["rotate_query"].plan(
        layout, Chunking(ChunkOptions(encoding="isolated", sink="x"), sink=(1,) * 4)
    )
    assert plan.num_positions == 13


def test_a_spans_digest_is_that_of_its_tokens():
    span = Span((1, 2, 3), document_id="d")
    assert span.digest == Span((1, 2, 3), document_id="other").digest
    assert replace(span, token_ids=(1, 2)).digest == Span((1, 2)).digest != span.digest
    assert span.digest is span.digest
    assert span == Span((1, 2, 3), document_id="d"), "what was hashed already is equal to what was not"
