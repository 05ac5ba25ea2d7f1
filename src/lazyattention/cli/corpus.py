# SPDX-License-Identifier: Apache-2.0
"""The documents a command works on: read once, and narrowed to the best ones per question when asked."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lazyattention.cli.console import err, shows_progress
from lazyattention.cli.report import skipped_report
from lazyattention.documents.document import Document
from lazyattention.documents.readers import read_documents
from lazyattention.documents.splitter import split_text
from lazyattention.errors import RequestError

if TYPE_CHECKING:
    from lazyattention.documents.retrieval import Retriever

RETRIEVERS = ("bm25", "embedding")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents, and optionally a retriever that picks `top_k` of them for each question."""

    documents: Sequence[Document]
    retriever: "Retriever | None" = None
    top_k: int = 0

    def for_question(self, question: str) -> list[Document]:
        """Return the documents to show the model, the best match first; all of them in order without a retriever."""
        if self.retriever is None:
            return list(self.documents)
        return [item.document for item in self.retriever.retrieve(question, self.top_k)]


def check_retriever(name: str) -> None:
    """Raise RequestError unless `name` is a retriever."""
    if name not in RETRIEVERS:
        raise RequestError(f"--retriever must be one of {', '.join(RETRIEVERS)}, got {name!r}")


def load_documents(paths: Sequence[Path], text_encoding: str) -> list[Document]:
    """Read `paths` with a progress bar, and say what was left out."""
    columns = (TextColumn("reading documents"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not shows_progress()) as progress:
        task = progress.add_task("", total=None)
        report = read_documents(
            paths,
            text_encoding=text_encoding,
            on_file=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if report.skipped:
        err.print(skipped_report(report.skipped), soft_wrap=True)
    return report.documents


def make_corpus(
    documents: Sequence[Document],
    *,
    top_k: int | None,
    retriever: str,
    embedding_model: str | None,
    count_tokens: Callable[[str], int],
    max_chunk_len: int,
) -> Corpus:
    """Build the corpus; with `top_k`, documents longer than a chunk become passages first, and passages are retrieved."""
    if top_k is None:
        return Corpus(documents)
    check_retriever(retriever)
    # Imported here, like the embedding model below: --help need not wait for numpy and transformers.
    from lazyattention.documents.retrieval import BM25Retriever, EmbeddingRetriever

    passages = [passage for document in documents for passage in _passages(document, count_tokens, max_chunk_len)]
    if retriever == "bm25":
        return Corpus(passages, BM25Retriever(passages), top_k)
    from lazyattention.models.embedding import load_embedder

    with err.status("embedding the documents") if shows_progress() else contextlib.nullcontext():
        return Corpus(passages, EmbeddingRetriever(passages, load_embedder(embedding_model)), top_k)


def _passages(document: Document, count_tokens: Callable[[str], int], max_chunk_len: int) -> list[Document]:
    pieces = split_text(document.text, count_tokens, max_chunk_len)
    if len(pieces) == 1:
        return [document]
    return [
        Document(piece, id=f"{document.document_id}#{number}", title=document.title, metadata=document.metadata)
        for number, piece in enumerate(pieces, 1)
    ]
