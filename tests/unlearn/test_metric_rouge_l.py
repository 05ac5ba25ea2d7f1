# SPDX-License-Identifier: Apache-2.0
"""ROUGE-L equals the reference package on ASCII text and does not lose other scripts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from lazyattention.unlearn.metrics.rouge_l import rouge_l

SCORER = RougeScorer(["rougeL"], use_stemmer=False)
WORDS = st.lists(st.sampled_from(["the", "Cat", "sat", "on", "a", "mat", "x_y", "it's", "3.5", "-", "!?"]), max_size=14)


@given(WORDS, WORDS)
def test_equal_to_rouge_score_on_sentences(reference, prediction):
    check(" ".join(reference), " ".join(prediction))


@given(st.text(st.characters(max_codepoint=127)), st.text(st.characters(max_codepoint=127)))
def test_equal_to_rouge_score_on_any_ascii(reference, prediction):
    check(reference, prediction)


def check(reference, prediction):
    expected, found = SCORER.score(reference, prediction)["rougeL"], rouge_l(reference, prediction)
    assert found.recall == pytest.approx(expected.recall)
    assert found.precision == pytest.approx(expected.precision)
    assert found.f1 == pytest.approx(expected.fmeasure)


def test_by_hand():
    # Longest common subsequence: the, cat, the, mat -> 4 of 6 and 4 of 5.
    found = rouge_l("The cat sat on the mat.", "the cat ate the mat")
    assert (found.recall, found.precision) == (4 / 6, 4 / 5)
    assert found.f1 == pytest.approx(2 * (4 / 6) * (4 / 5) / (4 / 6 + 4 / 5))


@pytest.mark.parametrize("text", ["Αθήνα είναι", "東京です", "กรุงเทพ", "서울입니다", "Gonzalo Núñez"])
def test_answers_in_other_scripts_are_not_lost(text):
    assert rouge_l(text, text).recall == 1.0


def test_accented_letters_do_not_break_a_word():
    assert rouge_l("Núñez", "N ez").recall == 0.0


def test_signs_of_scripts_without_spaces_count_one_by_one():
    assert rouge_l("東京都", "東京").recall == pytest.approx(2 / 3)


@pytest.mark.parametrize(("reference", "prediction"), [("", "x"), ("x", ""), ("!", "x")])
def test_nothing_to_compare_is_zero(reference, prediction):
    assert rouge_l(reference, prediction).f1 == 0.0
