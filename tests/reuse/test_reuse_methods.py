# SPDX-License-Identifier: Apache-2.0
"""What each reuse method decides, from the prompt alone."""

import pytest

from fixtures.tiny_engine import CHUNK_METHODS, FULL_METHODS, prompt
from lazyattention.errors import ConfigError
from lazyattention.reuse import REUSE_METHODS, PromptLayout, Span, SpanUse

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


def test_every_method_is_listed_with_a_summary():
    assert set(REUSE_METHODS) == set(PLANS) == {*CHUNK_METHODS, *FULL_METHODS}
    for name in REUSE_METHODS:
        assert REUSE_METHODS[name].name == name
        assert REUSE_METHODS[name].summary.endswith(".")


@pytest.mark.parametrize("name", PLANS)
def test_uses_of_spans_after_a_preamble(name):
    plan = REUSE_METHODS[name].plan(LAYOUT, "after_preamble")
    assert plan.uses == PLANS[name]
    assert plan.preamble_index == (0 if name in CHUNK_METHODS else None)


@pytest.mark.parametrize("name", PLANS)
def test_uses_of_spans_when_isolated(name):
    plan = REUSE_METHODS[name].plan(LAYOUT, "isolated")
    assert plan.uses == (TEXT, *PLANS[name][1:])
    assert plan.preamble_index is None


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("shorthand", ["d9 d4 t7", "p0 d9 t7", "p5 t7", "t7"])
def test_without_documents_or_preamble_nothing_is_shared_but_documents(name, shorthand):
    layout = prompt(shorthand)
    plan = REUSE_METHODS[name].plan(layout, "after_preamble")
    assert plan.preamble_index is None
    assert all(use is TEXT for use, span in zip(plan.uses, layout.spans, strict=True) if not span.is_document)


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
