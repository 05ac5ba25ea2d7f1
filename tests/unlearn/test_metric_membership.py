# SPDX-License-Identifier: Apache-2.0
"""Membership attacks by hand, areas against scikit-learn, and a hold-out that does not match is called out."""

import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qa_fixtures import qa_model, qa_tokenizer
from sklearn.metrics import roc_auc_score
from test_metric_truth import scores_of

from lazyattention.errors import RequestError
from lazyattention.unlearn.data import QAExample, collate, encode_examples, generate_people
from lazyattention.unlearn.metrics import evaluate
from lazyattention.unlearn.metrics.mia_loss import loss_score
from lazyattention.unlearn.metrics.mia_min_k import min_k_score
from lazyattention.unlearn.metrics.mia_min_k_plus_plus import min_k_plus_plus_score
from lazyattention.unlearn.metrics.mia_zlib import zlib_score
from lazyattention.unlearn.metrics.privleak import privleak
from lazyattention.unlearn.metrics.score import AnswerScores
from lazyattention.unlearn.metrics.summaries import area_under_roc

EXAMPLE = QAExample("q", "aaaa bbbb aaaa bbbb")
VALUES = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=20)


@given(VALUES, VALUES)
def test_area_is_scikit_learns_ties_included(members, others):
    labels = [1] * len(members) + [0] * len(others)
    assert area_under_roc(members, others).value == pytest.approx(roc_auc_score(labels, members + others))


def test_area_by_hand():
    # Of four pairs two are won, one is a tie: (2 + 1/2) / 4.
    assert area_under_roc([1.0, 3.0], [1.0, 2.0]).value == pytest.approx(0.625)
    with pytest.raises(RequestError, match="members and non-members, got 0 and 1"):
        area_under_roc([], [1.0])


def test_interval_covers_the_true_area_about_95_times_in_100():
    rng = np.random.default_rng(0)
    # Two normals one standard deviation apart: P(X > Y) = Phi(1 / sqrt(2)).
    truth = 0.5 * (1 + math.erf(0.5))
    hits = 0
    for _ in range(400):
        auc = area_under_roc(rng.normal(1, 1, 60), rng.normal(0, 1, 50))
        hits += auc.low <= truth <= auc.high
    assert 0.91 < hits / 400 < 0.985


def test_attack_scores_by_hand():
    scores = scores_of([0.5, 0.25, 0.125, 1.0])
    assert loss_score(scores, EXAMPLE) == pytest.approx(-math.log(64) / 4)
    size = len(zlib.compress(EXAMPLE.answer.encode()))
    assert zlib_score(scores, EXAMPLE) == pytest.approx(-math.log(64) / 4 / size)
    # The lowest half of four: log 1/8 and log 1/4.
    assert min_k_score(scores, 0.5) == pytest.approx(-math.log(32) / 2)
    # A share of less than one token takes one.
    assert min_k_score(scores, 0.1) == pytest.approx(math.log(0.125))
    assert min_k_score(scores, 1.0) == pytest.approx(-math.log(64) / 4)


def test_share_of_tokens_is_not_lost_to_rounding():
    # 0.29 * 100 is 28.999999999999996.
    scores = scores_of([0.9] * 72 + [0.5] + [0.1] * 27)
    expected = (27 * math.log(0.1) + math.log(0.5) + math.log(0.9)) / 29
    assert min_k_score(scores, 0.29) == pytest.approx(expected, rel=1e-5)


def test_min_k_plus_plus_by_hand():
    log_p = np.array([-1.0, -3.0], dtype=np.float32)
    scores = AnswerScores(
        np.array([0, 1]),
        log_p,
        np.array([True, False]),
        np.array([-2.0, -2.0], np.float32),
        np.array([2.0, 0.5], np.float32),
    )
    # z-scores 0.5 and -2.
    assert min_k_plus_plus_score(scores, 0.5) == pytest.approx(-2.0)
    assert min_k_plus_plus_score(scores, 1.0) == pytest.approx(-0.75)


def test_min_k_plus_plus_of_a_certain_model_is_finite():
    zeros = np.zeros(2, dtype=np.float32)
    scores = AnswerScores(np.array([0, 1]), zeros, np.array([True, True]), zeros, zeros)
    assert min_k_plus_plus_score(scores, 1.0) == 0.0


def test_privleak_by_hand():
    assert privleak(0.5, 0.5) == 0.0
    assert privleak(1.0, 0.5) == pytest.approx(-100.0)  # betrayed as members: forgot too little
    assert privleak(0.0, 0.5) == pytest.approx(100.0)  # forgot too much
    assert privleak(0.7, 0.6) == pytest.approx(-25.0)
    assert privleak(0.7, 1.0) is None


def test_a_model_trained_on_the_forget_set_is_betrayed_by_every_attack():
    splits = generate_people(40, 0, num_facts=2, forget_fraction=0.2)
    model, tokenizer = qa_model(scale=1.0), qa_tokenizer(chat=True)
    options = {"metrics": ["mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus", "privleak"], "progress": False}
    before = evaluate(model, tokenizer, splits, **options)["summary"]
    batch = collate(encode_examples(tokenizer, splits["forget"]), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = evaluate(model, tokenizer, splits, **options)["summary"]
    for name in ("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus"):
        assert 0.1 < before[name] < 0.9
        assert after[name] > 0.95
    assert after["privleak"] < -90 < before["privleak"]


def test_a_hold_out_of_another_kind_is_called_out(caplog):
    splits = generate_people(60, 0, num_facts=2, forget_fraction=0.3)
    short = [QAExample(f"What is {i}?", "It", example_id=str(i)) for i in range(40)]
    model, tokenizer = qa_model(), qa_tokenizer()
    options = {"metrics": ["mia_loss", "mia_zlib"], "progress": False}
    matched = evaluate(model, tokenizer, splits, **options)["metrics"]["mia_loss"]
    assert matched["is_matched"]
    assert "does not match" not in caplog.text
    other = evaluate(model, tokenizer, {**splits, "holdout": short}, **options)["metrics"]["mia_loss"]
    assert not other["is_matched"]
    assert "membership attacks: answers of forget" in caplog.text
    assert caplog.text.count("does not match") == 1
