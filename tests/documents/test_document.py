# SPDX-License-Identifier: Apache-2.0
"""A document is named by its content, and a wrong one is refused by the name of the wrong field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyattention.documents.document import Document
from lazyattention.errors import RequestError


@given(st.text(), st.none() | st.text())
def test_derived_id_depends_on_title_and_text_only(text, title):
    a = Document(text, title=title, metadata={"a": 1})
    b = Document(text, title=title)
    assert a.document_id == b.document_id
    assert a.document_id.startswith("doc-")
    assert len(a.document_id) == len("doc-") + 16


@given(
    st.tuples(st.none() | st.text(max_size=4), st.text(max_size=4)),
    st.tuples(st.none() | st.text(max_size=4), st.text(max_size=4)),
)
def test_different_documents_have_different_ids(a, b):
    ids = [Document(text, title=title).document_id for title, text in (a, b)]
    assert (ids[0] == ids[1]) == (a == b)


def test_border_between_title_and_text_counts():
    assert Document("b", title="a").document_id != Document("ab", title="").document_id
    assert Document("ab", title="").document_id != Document("ab").document_id


def test_given_id_wins():
    assert Document("text", id="mine").document_id == "mine"


def test_id_is_the_same_in_every_process():
    assert Document("The Nile is a river.", title="Nile").document_id == "doc-2d57035f9cf8d5d7"


def test_lone_surrogate_in_text_still_has_an_id():
    assert Document("\ud800").document_id.startswith("doc-")


def test_of_accepts_string_mapping_and_document():
    document = Document("x", id="i", title="t", metadata={"page": 3})
    assert Document.of("x") == Document("x")
    assert Document.of({"text": "x", "id": "i", "title": "t", "metadata": {"page": 3}}) == document
    assert Document.of(document) is document


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"text": "x", "titel": "y"}, "unknown document field.*'titel'.*allowed: text, id, title, metadata"),
        ({"title": "y"}, "needs 'text'"),
        ({}, "needs 'text'.*no fields"),
        ({"text": 3}, "'text' must be a string, got int"),
        ({"text": None}, "'text' must be a string, got NoneType"),
        ({"text": "x", "id": 3}, "'id' must be a string or null, got int"),
        ({"text": "x", "id": ""}, "'id' is an empty string"),
        ({"text": "x", "metadata": [1]}, "'metadata' must be an object or null, got list"),
        (7, "string or an object with 'text', got int"),
        (None, "got NoneType"),
    ],
)
def test_wrong_document_is_named(value, message):
    with pytest.raises(RequestError, match=message):
        Document.of(value)
