# SPDX-License-Identifier: Apache-2.0
"""Retrieval finds the document a question is about, and always gives top_k documents if there are as many."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lazyattention.documents.document import Document
from lazyattention.documents.retrieval import BM25Retriever, EmbeddingRetriever
from lazyattention.errors import RequestError

DOCUMENTS = [
    Document("The Nile flows north through Egypt into the Mediterranean.", id="nile"),
    Document("Saturn has rings made of ice and dust.", id="saturn"),
    Document("Gutenberg printed books with movable type.", id="press"),
    Document("Ascorbic acid is also called vitamin C.", id="vitamin"),
    Document("A text about nothing in particular.", title="Jupiter", id="jupiter"),
]


def letters(texts):
    """An embedding that counts letters: crude, but near for texts that share words."""
    return np.array([[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts])


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("Where does the Nile flow?", "nile"),
        ("rings of Saturn", "saturn"),
        ("WHO PRINTED BOOKS", "press"),
        ("C", "vitamin"),
        ("Jupiter?", "jupiter"),  # the title counts
    ],
)
def test_bm25_finds_the_document(query, best):
    retrieved = BM25Retriever(DOCUMENTS).retrieve(query, 2)
    assert [item.document.id for item in retrieved][0] == best
    assert len(retrieved) == 2
    assert retrieved[0].score > retrieved[1].score


@pytest.mark.parametrize("query", ["", "???", "the of", "zzzqqq"])
def test_query_without_known_words_keeps_the_order(query):
    retrieved = BM25Retriever(DOCUMENTS).retrieve(query, 3)
    assert [item.document for item in retrieved] == DOCUMENTS[:3]
    assert {item.score for item in retrieved} == {0.0}


def test_documents_without_words():
    documents = [Document(""), Document("..."), Document("the")]
    assert [item.document for item in BM25Retriever(documents).retrieve("river", 5)] == documents
    assert BM25Retriever([]).retrieve("river", 5) == []
    assert EmbeddingRetriever([], letters).retrieve("river", 5) == []


def test_one_document_among_empty_ones():
    documents = [Document(""), Document("a river"), Document("")]
    assert BM25Retriever(documents).retrieve("river", 1)[0].document is documents[1]


def test_hundreds_of_documents_are_ranked():
    documents = [Document(f"common words and token{i}", id=str(i)) for i in range(500)]
    assert BM25Retriever(documents).retrieve("which one has token377", 1)[0].document.id == "377"


def test_retrieval_leaves_jax_alone(tmp_path):
    """JAX would take most of a GPU's memory at the first use, which bm25s makes of it when it is imported."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("print('jax is used')")
    (tmp_path / "jax" / "lax.py").write_text("def top_k(*given): print('jax took memory')")
    code = """
from lazyattention.documents.document import Document
from lazyattention.documents.retrieval import BM25Retriever
print(BM25Retriever([Document("the cape"), Document("a lamp")]).retrieve("lamp", 1)[0].document.text)
import jax.lax
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2] / "src")])
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split("\n") == ["a lamp", "jax is used", ""]


def test_retrievers_may_be_made_at_once():
    """The first ones import bm25s; nobody sees it half imported."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from lazyattention.documents.document import Document
from lazyattention.documents.retrieval import BM25Retriever
with ThreadPoolExecutor(8) as pool:
    made = list(pool.map(lambda _: BM25Retriever([Document("the cape"), Document("a lamp")]), range(8)))
print({one.retrieve("lamp", 1)[0].document.text for one in made})
"""
    path = str(Path(__file__).parents[2] / "src")
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.stdout == "{'a lamp'}\n", ran.stderr


def test_embedding_retriever_ranks_by_cosine_not_by_length():
    documents = [Document("abc" * 50), Document("xyz"), Document("xyzabc")]
    retrieved = EmbeddingRetriever(documents, letters).retrieve("zyx", 3)
    assert [item.document for item in retrieved] == [documents[1], documents[2], documents[0]]
    assert retrieved[0].score == pytest.approx(1.0)
    assert retrieved[2].score == pytest.approx(0.0)


def test_embedding_of_an_empty_text_is_no_nan():
    assert EmbeddingRetriever([Document("")], letters).retrieve("a", 1)[0].score == 0.0


def test_wrong_embedding_shape_is_named():
    with pytest.raises(RequestError, match=r"embed must return \[1, dim\] vectors, got shape \(3,\)"):
        EmbeddingRetriever([Document("a")], lambda texts: np.zeros(3))


@pytest.mark.parametrize("make", [BM25Retriever, lambda documents: EmbeddingRetriever(documents, letters)])
def test_top_k_must_be_positive(make):
    with pytest.raises(RequestError, match="top_k must be at least 1, got 0"):
        make(DOCUMENTS).retrieve("x", 0)
