# SPDX-License-Identifier: Apache-2.0
"""Uploaded documents of each scope: their text, so that requests can name them by id. Their KV is the engine's matter."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lazyattention.documents.document import Document
from lazyattention.errors import CapacityError, NotFoundError
from lazyattention.server.config import ScopeConfig


@dataclass(slots=True)
class StoredDocument:
    """An uploaded document.

    Attributes:
        document: Its text and what belongs to it.
        scope: Where it was uploaded.
        created_s: Unix time of the upload.
        num_bytes: Size of its text in UTF-8.
        num_tokens: None until it was tokenised.
        num_uses: Requests that had it in their prompt.
        last_used_s: Unix time of the last such request.
    """

    document: Document
    scope: str
    created_s: float
    num_bytes: int
    num_tokens: int | None = None
    num_uses: int = 0
    last_used_s: float | None = None


@dataclass(slots=True)
class _Shelf:
    documents: dict[str, StoredDocument] = field(default_factory=dict)
    num_bytes: int = 0


class DocumentLibrary:
    """Uploaded documents by scope and id. A scope sees its own and, read-only, those of the scopes it `reads`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}

    def add(self, scope: ScopeConfig, documents: Sequence[Document]) -> list[StoredDocument]:
        """Keep `documents`, all or none; one with a known id replaces the older.

        Returns:
            The older documents that were replaced by a different text or title.

        Raises:
            CapacityError: The scope's limit on stored text would be passed.
        """
        shelf = self._shelves.setdefault(scope.name, _Shelf())
        new = {document.document_id: document for document in documents}
        sizes = {name: len(document.text.encode("utf-8", "surrogatepass")) for name, document in new.items()}
        older = [shelf.documents[name] for name in new if name in shelf.documents]
        num_bytes = shelf.num_bytes + sum(sizes.values()) - sum(stored.num_bytes for stored in older)
        if num_bytes > scope.max_stored_bytes:
            raise CapacityError(
                f"the uploaded documents would take {num_bytes} bytes, this scope may keep {scope.max_stored_bytes}; "
                "delete some first"
            )
        shelf.num_bytes = num_bytes
        for name, document in new.items():
            shelf.documents[name] = StoredDocument(document, scope.name, self._clock(), sizes[name])
        return [old for old in older if _content(old.document) != _content(new[old.document.document_id])]

    def get(self, scope: ScopeConfig, document_id: str) -> StoredDocument:
        """Find a document the scope may use.

        Raises:
            NotFoundError: There is none; another scope's is not there either.
        """
        for name in (scope.name, *scope.reads):
            stored = self._shelf(name).documents.get(document_id)
            if stored is not None:
                return stored
        raise NotFoundError(f"no document {document_id!r}; upload it to /v1/documents or send its text")

    def own(self, scope: ScopeConfig, document_id: str) -> StoredDocument:
        """Like `get`, but only what the scope may change."""
        stored = self._shelf(scope.name).documents.get(document_id)
        if stored is None:
            raise NotFoundError(f"no document {document_id!r} of your own; see GET /v1/documents")
        return stored

    def remove(self, scope: ScopeConfig, document_id: str) -> bool:
        """Forget a document of the scope's own; False if there is none."""
        shelf = self._shelf(scope.name)
        stored = shelf.documents.pop(document_id, None)
        if stored is None:
            return False
        shelf.num_bytes -= stored.num_bytes
        return True

    def check_kept(self, documents: Iterable[StoredDocument]) -> None:
        """Refuse a request whose documents were deleted since it came: nobody could delete what it would store.

        Raises:
            NotFoundError: One of them is gone.
        """
        for stored in documents:
            document_id = stored.document.document_id
            if document_id not in self._shelf(stored.scope).documents:
                raise NotFoundError(f"the document {document_id!r} was deleted before the request began")

    def visible(self, scope: ScopeConfig) -> list[StoredDocument]:
        """All documents the scope may use, its own first, in order of upload. Each id once: the one that `get` finds."""
        found: dict[str, StoredDocument] = {}
        for name in (scope.name, *scope.reads):
            for document_id, stored in self._shelf(name).documents.items():
                found.setdefault(document_id, stored)
        return list(found.values())

    def note_use(self, stored: Iterable[StoredDocument]) -> None:
        """Count one request that uses these documents."""
        now = self._clock()
        for document in stored:
            document.num_uses += 1
            document.last_used_s = now

    def _shelf(self, name: str) -> _Shelf:
        return self._shelves.get(name) or _Shelf()


def _content(document: Document) -> tuple[str | None, str]:
    return document.title, document.text
