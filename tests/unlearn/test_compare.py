# SPDX-License-Identifier: Apache-2.0
"""Matched forgetting: where utility is read off, and what may be said about a difference."""

import math
import statistics

import pytest

from lazyattention.errors import ConfigError
from lazyattention.unlearn.compare import CompareOptions, interval, matched_utility, summarize_arms


def trajectory(*points):
    """`(step, forget loss, retain exact memorization)`; forget strength falls as its loss rises."""
    return [
        {"step": s, "forget": {"mean_nll": f, "extraction_strength": 1 / (1 + f)}, "retain": {"exact_memorization": r}}
        for s, f, r in points
    ]


def test_utility_is_read_between_measurements():
    history = trajectory((0, 0.0, 1.0), (5, 2.0, 0.9), (10, 4.0, 0.5))
    assert matched_utility(history, 3.0, CompareOptions()) == pytest.approx(0.7)
    assert matched_utility(history, 0.5, CompareOptions()) == pytest.approx(0.975)
    assert matched_utility(history, 4.0, CompareOptions()) == pytest.approx(0.5)


def test_the_first_crossing_counts_even_if_forgetting_comes_back():
    history = trajectory((0, 0.0, 1.0), (5, 2.0, 0.8), (10, 0.5, 0.9), (15, 2.0, 0.95))
    assert matched_utility(history, 1.0, CompareOptions()) == pytest.approx(0.9)


def test_falling_metrics_are_matched_from_above():
    history = trajectory((0, 0.0, 1.0), (5, 1.0, 0.8))
    options = CompareOptions(level_metric="extraction_strength")
    assert matched_utility(history, 0.75, options) == pytest.approx(0.9)
    assert matched_utility(history, 0.4, options) is None


def test_a_run_that_starts_beyond_the_level_has_its_first_utility():
    assert matched_utility(trajectory((0, 3.0, 0.9), (5, 4.0, 0.1)), 2.0, CompareOptions()) == 0.9


def test_a_run_that_never_gets_there_is_not_matched():
    assert matched_utility(trajectory((0, 0.0, 1.0), (5, 1.0, 0.9)), 2.0, CompareOptions()) is None


def test_intervals_are_students_t():
    values = [0.9, 0.8, 1.0]
    found = interval(values, 0.95)
    # t with 2 degrees of freedom, 97.5 %: 4.302653, from any table.
    half = 4.302653 * statistics.stdev(values) / math.sqrt(3)
    assert found["low"] == pytest.approx(0.9 - half, rel=1e-5)
    assert found["high"] == pytest.approx(0.9 + half, rel=1e-5)
    assert interval([0.5], 0.95) == {"mean": 0.5, "low": None, "high": None}
    assert interval([], 0.95)["mean"] is None


def runs(**utilities):
    return [
        {"arm": arm, "seed": seed, "matched_utility": value}
        for arm, values in utilities.items()
        for seed, value in enumerate(values)
    ]


def test_differences_are_paired_by_seed_and_worded_by_their_interval():
    found = {
        row["arm"]: row
        for row in summarize_arms(
            runs(
                simu=[0.9, 0.7, 0.8],
                better=[0.95, 0.76, 0.85],
                worse=[0.80, 0.61, 0.70],
                alike=[0.91, 0.69, 0.80],
                lost=[None, None, None],
                partly=[0.9, None, None],
            ),
            ["simu", "better", "worse", "alike", "lost", "partly"],
            CompareOptions(),
        )
    }
    # Seeds differ by 0.2, arms by 0.05: only pairing can see it.
    assert found["better"]["verdict"] == "keeps more than the reference"
    assert found["worse"]["verdict"] == "keeps less than the reference"
    assert found["alike"]["verdict"] == "not distinguishable from the reference"
    assert found["lost"]["verdict"] == "not matched"
    assert found["lost"]["num_matched"] == 0
    assert found["partly"]["verdict"] == "one seed, no interval"
    assert found["simu"]["verdict"] == "reference"
    assert found["better"]["difference"]["mean"] == pytest.approx(0.16 / 3)


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match="level_metric must be one of"):
        CompareOptions(level_metric="rouge")
    with pytest.raises(ConfigError, match="seeds must not be empty"):
        CompareOptions(seeds=())
