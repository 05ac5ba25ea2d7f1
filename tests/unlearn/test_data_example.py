# SPDX-License-Identifier: Apache-2.0
"""Examples refuse what cannot be used, are fingerprinted by content, and overlaps between sets are found."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyattention.errors import RequestError
from lazyattention.unlearn.data import QAExample, dataset_digest, find_overlap

EXAMPLE = QAExample("Who?", "Ann.", "Which person?", "It was Ann.", ("It was Bob.",), "forget", "1")


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_answer_is_refused(answer):
    with pytest.raises(RequestError, match="answer of example '7' is empty"):
        QAExample("q", answer, example_id="7")


def test_an_empty_question_needs_plain_text():
    with pytest.raises(RequestError, match="kind='completion'"):
        QAExample("", "text")
    assert QAExample("", "text", kind="completion").question == ""


def test_an_unknown_kind_is_refused():
    with pytest.raises(RequestError, match="'qa' or 'completion', got 'chat'"):
        QAExample("q", "a", kind="chat")


@pytest.mark.parametrize(
    "changed",
    [
        {"question": "What?"},
        {"answer": "Bob."},
        {"paraphrased_question": None},
        {"paraphrased_answer": "x"},
        {"perturbed_answers": ("It was", " Bob.")},
        {"split": "retain"},
        {"example_id": "2"},
        {"kind": "completion"},
        {"group": "Task1"},
    ],
)
def test_the_digest_depends_on_every_field(changed):
    assert dataset_digest([EXAMPLE]) != dataset_digest([replace(EXAMPLE, **changed)])
    assert dataset_digest([EXAMPLE]) == dataset_digest([replace(EXAMPLE)])


def test_the_digest_depends_on_order():
    other = replace(EXAMPLE, example_id="2")
    assert dataset_digest([EXAMPLE, other]) != dataset_digest([other, EXAMPLE])


@given(st.text(min_size=1), st.text(min_size=1))
def test_text_moved_between_fields_changes_the_digest(first, second):
    def make(question, answer):
        return QAExample("q" + question, "a" + answer)

    moved = make(first + second, ""), make(first, second)
    assert dataset_digest([moved[0]]) != dataset_digest([moved[1]])


def test_overlap_ignores_case_and_spaces_but_not_the_answer():
    same = QAExample(" WHO? ", "ann.", example_id="b")
    other_answer = QAExample("Who?", "Bob.", example_id="c")
    assert find_overlap([EXAMPLE], [other_answer, same]) == [("1", "b")]
    assert find_overlap([EXAMPLE], [other_answer]) == []
