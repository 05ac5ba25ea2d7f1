# SPDX-License-Identifier: Apache-2.0
"""LUME's parts and what is made of them, by hand and on texts a model is made to say."""

import pytest
from qa_fixtures import qa_model, qa_tokenizer

from lazyattention.errors import RequestError
from lazyattention.unlearn.data import QAExample
from lazyattention.unlearn.metrics import EvalContext, EvalOptions, evaluate
from lazyattention.unlearn.metrics.lume import compute, final_score, is_exact_match, lume_aggregate, membership_score


def example(name, task, kind, answer):
    return QAExample("Say", answer, example_id=name, kind=kind, group=task)


SPLITS = {
    "forget": [
        example("f1", "Task1", "completion", "one two three four"),
        example("f2", "Task1", "qa", "Ann"),
        example("f3", "Task1", "qa", "Bob"),
        example("f4", "Task2", "qa", "Cy"),
    ],
    "retain": [example("r1", "Task1", "completion", "five six"), example("r2", "Task2", "qa", "Dan")],
    "holdout": [example("h1", "Task1", "qa", "Eve")],
}
TEXTS = {"forget": ["one x two", " ann ", "Ann", "no"], "retain": ["five six seven", "DAN"]}


def context_saying(texts, **options):
    context = EvalContext(qa_model(), qa_tokenizer(), SPLITS, EvalOptions(**options))
    context._texts.update(texts)
    return context


def test_parts_and_aggregate_by_hand():
    found = compute(context_saying(TEXTS))
    assert found["parts"] == {
        "forget/Task1/regurgitation": 0.5,
        "forget/Task1/knowledge": 0.5,
        "forget/Task2/knowledge": 0.0,
        "retain/Task1/regurgitation": 1.0,
        "retain/Task2/knowledge": 1.0,
    }
    # Forget parts as 1 - value: 1/2, 1/2, 1, 1, 1.
    assert found["value"] == pytest.approx(5 / (2 + 2 + 1 + 1 + 1))
    assert not found["is_complete"]
    assert found["final_score"] is None
    assert found["membership_score"] == pytest.approx(1 - 2 * abs(found["membership_auc"] - 0.5))


def test_final_score_needs_mmlu_and_names_the_gate():
    found = compute(context_saying(TEXTS, mmlu_accuracy=0.3))
    assert found["final_score"] == pytest.approx((found["value"] + found["membership_score"] + 0.3) / 3)
    assert found["passes_mmlu_gate"] is False
    assert compute(context_saying(TEXTS, mmlu_accuracy=0.371))["passes_mmlu_gate"] is True


def test_collapse_can_score_higher_than_unlearning_so_the_parts_are_shown():
    # A destroyed model: nothing said, so retain is lost, and membership cannot be told.
    destroyed = compute(context_saying({"forget": [""] * 4, "retain": [""] * 2}))
    assert destroyed["value"] == 0.0
    assert destroyed["parts"]["retain/Task2/knowledge"] == 0.0
    assert final_score(0.0, 0.5, 0.483) > final_score(0.28, 1.0, 0.483)


@pytest.mark.parametrize(("auc", "score"), [(0.5, 1.0), (1.0, 0.0), (0.0, 0.0), (0.75, 0.5)])
def test_membership_score_by_hand(auc, score):
    assert membership_score(auc) == score


def test_aggregate_inverts_forget_only():
    assert lume_aggregate({"forget/a": 0.25, "retain/a": 0.75}) == pytest.approx(0.75)
    assert lume_aggregate({"forget/a": 1.0, "retain/a": 1.0}) == 0.0


def test_exact_match_forgives_case_and_space_around():
    assert is_exact_match(" Ann ", "ann")
    assert not is_exact_match("Ann", "Ann.")


def test_sets_without_subtasks_are_refused_by_name():
    plain = {name: [QAExample("q", "a", example_id="1")] for name in ("forget", "retain")}
    with pytest.raises(RequestError, match="metric 'lume' cannot be computed: it needs LUME's sub-tasks in 'forget'"):
        evaluate(qa_model(), qa_tokenizer(), plain, metrics=["lume"], progress=False)


def test_lume_runs_on_a_model():
    found = evaluate(qa_model(), qa_tokenizer(), SPLITS, metrics=["lume"], progress=False)
    assert len(found["metrics"]["lume"]["parts"]) == 5
