# SPDX-License-Identifier: Apache-2.0
"""Choose the documents that a question is about, when a folder holds more than a prompt can."""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from lazyattention.documents.document import Document
from lazyattention.errors import RequestError

_IMPORTING = threading.Lock()


@dataclass(frozen=True, slots=True)
class RetrievedDocument:
    """A document and how well it matches; scores compare within one call only."""

    document: Document
    score: float


class Retriever(Protocol):
    """Built once over some documents, then asked any number of times, from one thread."""

    def retrieve(self, query: str, top_k: int) -> list[RetrievedDocument]:
        """Return at most `top_k` documents, best first; ties keep the documents' order."""
        ...


class BM25Retriever:
    """Lexical retrieval: documents that share rare words with the question. No model needed.

    Words are lower-cased and not stemmed; English stop words are ignored.

    Source:
        Robertson & Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond". Index: library bm25s.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        """Index title and text of each document."""
        self._bm25s: Any = _import_bm25s()
        self._documents = list(documents)
        tokens = self._tokenize([f"{document.title or ''}\n{document.text}" for document in self._documents])
        self._has_words = any(tokens)
        self._index: Any = self._bm25s.BM25()
        if self._has_words:
            self._index.index(tokens, show_progress=False)

    def retrieve(self, query: str, top_k: int) -> list[RetrievedDocument]:
        """Return at most `top_k` documents, best first; fewer only if there are fewer documents."""
        _check_top_k(top_k)
        words = self._tokenize([query])[0]
        if not self._has_words or not words:
            scores = np.zeros(len(self._documents))
        else:
            scores = np.asarray(self._index.get_scores(words), dtype=np.float64)
        return _best(self._documents, scores, top_k)

    def _tokenize(self, texts: list[str]) -> list[list[str]]:
        # One-letter words count too: "vitamin C".
        tokens: list[list[str]] = self._bm25s.tokenize(
            texts, stopwords="en", token_pattern=r"(?u)\b\w+\b", return_ids=False, show_progress=False
        )
        return tokens


def _import_bm25s() -> ModuleType:
    """Import late, which takes a third of a second, and without JAX.

    Where JAX is installed, bm25s has it select something as it is imported, and JAX then takes three quarters of the GPU's
    memory for itself. Scores are selected here (`_best`), so JAX is never needed.
    """
    with _IMPORTING:
        if "bm25s" not in sys.modules:
            modules: dict[str, Any] = sys.modules  # None = cannot be imported
            known = {"jax": modules["jax"]} if "jax" in modules else {}
            modules["jax"] = None
            try:
                import bm25s
            finally:
                del modules["jax"]
                modules.update(known)
        import bm25s

        found: ModuleType = bm25s
        return found


class EmbeddingRetriever:
    """Retrieval by meaning: cosine similarity of vectors from any embedding function."""

    def __init__(self, documents: Sequence[Document], embed: Callable[[list[str]], np.ndarray]) -> None:
        """Embed title and text of each document.

        Args:
            documents: What to choose from.
            embed: Texts to vectors `[num_texts, dim]`, any float dtype; need not be normalised.
        """
        self._documents = list(documents)
        self._embed = embed
        texts = [f"{document.title}\n{document.text}" if document.title else document.text for document in documents]
        self._vectors = self._normalised(texts) if texts else np.zeros((0, 1))  # [num_documents, dim]

    def retrieve(self, query: str, top_k: int) -> list[RetrievedDocument]:
        """Return at most `top_k` documents, best first; fewer only if there are fewer documents."""
        _check_top_k(top_k)
        if not self._documents:
            return []
        return _best(self._documents, self._vectors @ self._normalised([query])[0], top_k)

    def _normalised(self, texts: list[str]) -> np.ndarray:
        vectors = np.asarray(self._embed(texts), dtype=np.float64)
        if vectors.ndim != 2 or len(vectors) != len(texts):
            raise RequestError(f"embed must return [{len(texts)}, dim] vectors, got shape {vectors.shape}")
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(norms == 0, 1, norms)


def _check_top_k(top_k: int) -> None:
    if top_k < 1:
        raise RequestError(f"top_k must be at least 1, got {top_k}")


def _best(documents: list[Document], scores: np.ndarray, top_k: int) -> list[RetrievedDocument]:
    order = np.argsort(-scores, kind="stable")[:top_k]  # stable: equal scores keep the documents' order
    return [RetrievedDocument(documents[index], float(scores[index])) for index in order]
