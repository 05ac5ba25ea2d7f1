# SPDX-License-Identifier: Apache-2.0
"""Probability, truth ratio, forget quality and model utility against cases computed by hand and against scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lazyattention.unlearn.metrics.forget_quality import forget_quality
from lazyattention.unlearn.metrics.perplexity import perplexity
from lazyattention.unlearn.metrics.probability import answer_probability, normalized_probability
from lazyattention.unlearn.metrics.score import AnswerScores
from lazyattention.unlearn.metrics.summaries import harmonic_mean, json_safe, mean_over_examples
from lazyattention.unlearn.metrics.truth_ratio import (
    closeness_to_one,
    preference_for_truth,
    truth_ratio,
    truth_ratio_arithmetic,
)

NLL = st.floats(0.0, 20.0)


def scores_of(probs, greedy=None, num_end_tokens=0):
    logprobs = np.log(np.asarray(probs, dtype=np.float32))
    zeros = np.zeros_like(logprobs)
    is_greedy = np.asarray(greedy if greedy is not None else [False] * len(probs))
    return AnswerScores(np.arange(len(probs)), logprobs, is_greedy, zeros, zeros, num_end_tokens)


def test_probability_is_the_geometric_mean_over_tokens():
    assert answer_probability(scores_of([0.5, 0.125])) == pytest.approx(0.25)
    assert answer_probability(scores_of([1.0])) == 1.0


def test_normalized_probability_by_hand():
    assert normalized_probability(0.2, [0.1, 0.1]) == pytest.approx(0.5)
    assert normalized_probability(0.0, [0.0]) == 0.0
    # Indifferent among one right and three wrong answers: 1/4.
    assert normalized_probability(0.3, [0.3] * 3) == pytest.approx(0.25)


def test_truth_ratio_by_hand():
    right, wrong = -math.log(0.4), [-math.log(0.1), -math.log(0.4)]
    assert truth_ratio(right, wrong) == pytest.approx(math.sqrt(0.1 * 0.4) / 0.4)  # 0.5
    assert truth_ratio_arithmetic(right, wrong) == pytest.approx((0.1 + 0.4) / 2 / 0.4)  # 0.625


@given(NLL, st.lists(NLL, min_size=1, max_size=6))
def test_arithmetic_mean_is_never_below_the_geometric_one(right, wrong):
    assert truth_ratio_arithmetic(right, wrong) >= truth_ratio(right, wrong) * (1 - 1e-9)


def test_truth_ratio_of_a_destroyed_model_does_not_overflow():
    assert math.isfinite(truth_ratio(5000.0, [1.0]))
    assert math.isfinite(truth_ratio_arithmetic(5000.0, [1.0]))
    assert truth_ratio(0.0, [5000.0]) > 0


def test_aggregates_by_hand():
    assert [closeness_to_one(r) for r in (0.5, 1.0, 4.0)] == [0.5, 1.0, 0.25]
    assert [preference_for_truth(r) for r in (0.25, 1.0, 4.0)] == [0.75, 0.0, 0.0]


def test_forget_quality_is_scipys_two_sample_test():
    rng = np.random.default_rng(0)
    first, second = rng.lognormal(0, 1, 80), rng.lognormal(0.6, 1, 70)
    found = forget_quality(list(first), list(second))
    expected = stats.ks_2samp(first, second)
    assert found["value"] == pytest.approx(expected.pvalue)
    assert found["statistic"] == pytest.approx(expected.statistic)
    assert found["mean_log_ratio_difference"] == pytest.approx(np.log(first).mean() - np.log(second).mean())
    # TOFU's code tests the inverse ratios; the test does not see the difference.
    inverse = forget_quality(list(1 / first), list(1 / second))
    assert inverse["value"] == pytest.approx(found["value"])


def test_forget_quality_statistic_by_hand():
    # Distribution functions differ most between 2 and 3: 1 against 1/2.
    found = forget_quality([1.0, 2.0], [1.0, 3.0])
    assert found["statistic"] == pytest.approx(0.5)
    assert forget_quality([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])["value"] == pytest.approx(1.0)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=9))
def test_harmonic_mean_is_scipys(values):
    assert harmonic_mean(values) == pytest.approx(stats.hmean(values))


def test_harmonic_mean_of_a_lost_part_is_zero():
    assert harmonic_mean([0.5, 0.0]) == 0.0
    with pytest.raises(ValueError, match="no values"):
        harmonic_mean([])
    with pytest.raises(ValueError, match="at least 0, got -1"):
        harmonic_mean([1, -1])


def test_perplexity_weighs_tokens_not_examples():
    # Three tokens in all: (1/2 * 1/8 * 1/8) ** (-1/3).
    assert perplexity([scores_of([0.5]), scores_of([0.125, 0.125])]) == pytest.approx(128 ** (1 / 3))
    assert perplexity([scores_of([1 / 700] * 4)]) == pytest.approx(700, rel=1e-5)


def test_means_carry_their_error():
    found = mean_over_examples(["a", "b", "c", "d"], [1.0, 2.0, 3.0, 6.0])
    assert found["value"] == 3.0
    assert found["stderr"] == pytest.approx(stats.sem([1.0, 2.0, 3.0, 6.0]))
    assert found["per_example"] == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 6.0}
    assert mean_over_examples(["a"], [1.0])["stderr"] is None


def test_json_safe_writes_no_nan():
    value = json_safe({"a": (np.float32(0.5), math.nan), 3: {"b": np.int64(2), "c": math.inf, "d": np.bool_(True)}})
    assert value == {"a": [0.5, None], "3": {"b": 2, "c": None, "d": True}}
