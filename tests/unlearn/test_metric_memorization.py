# SPDX-License-Identifier: Apache-2.0
"""Exact memorisation and extraction strength against a literal reading of their definitions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_metric_truth import scores_of

from lazyattention.unlearn.metrics.exact_memorization import exact_memorization
from lazyattention.unlearn.metrics.extraction_strength import extraction_strength


def made_of(greedy, num_end_tokens=0):
    return scores_of([0.5] * len(greedy), greedy, num_end_tokens)


def literal_extraction_strength(greedy):
    """1 - k/T with k the first place from which all tokens are right; 0 if there is none."""
    for k in range(len(greedy)):
        if all(greedy[k:]):
            return 1 - k / len(greedy)
    return 0.0


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_both_as_defined(greedy):
    assert exact_memorization(made_of(greedy)) == pytest.approx(sum(greedy) / len(greedy))
    assert extraction_strength(made_of(greedy)) == pytest.approx(literal_extraction_strength(greedy))


@pytest.mark.parametrize(
    ("greedy", "strength"),
    [([True, True, True, True], 1.0), ([False, True, True, True], 0.75), ([True, True, True, False], 0.0)],
)
def test_extraction_strength_by_hand(greedy, strength):
    assert extraction_strength(made_of(greedy)) == strength


def test_the_end_token_does_not_count():
    # Knows when to stop, and nothing else.
    assert exact_memorization(made_of([False, False, True], num_end_tokens=1)) == 0.0
    assert extraction_strength(made_of([False, False, True], num_end_tokens=1)) == 0.0
    # Knows everything but when to stop.
    assert extraction_strength(made_of([True, True, False], num_end_tokens=1)) == 1.0


def test_an_empty_answer_is_zero():
    assert exact_memorization(made_of([True], num_end_tokens=1)) == 0.0
    assert extraction_strength(made_of([True], num_end_tokens=1)) == 0.0
