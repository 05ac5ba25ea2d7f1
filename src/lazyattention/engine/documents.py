# SPDX-License-Identifier: Apache-2.0
"""The life of documents in one engine: kept by id, listed, pinned, deleted. All per scope (tenant)."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lazyattention.cache.chunk import Chunk
from lazyattention.cache.manager import CacheManager
from lazyattention.documents.document import Document
from lazyattention.engine.admission import CacheIdentity
from lazyattention.engine.request import RequestGroup
from lazyattention.errors import CapacityError, NotFoundError

_Chunks = list[Chunk]  # `list` is a method's name below


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """What is stored of one document.

    Attributes:
        document_id: Its id.
        title: Its title, if any.
        num_chunks: Stored chunks, in all encodings.
        num_tokens: Their tokens.
        num_bytes: Size of their KV.
        num_hits: Requests that found one of them.
        num_users: Holds by live requests.
        is_pinned: True if all its chunks are pinned.
        is_uploaded: True if its text is kept, so that requests may name it by id.
        created_s: Seconds since its oldest chunk was stored.
        idle_s: Seconds since it was last used.
    """

    document_id: str
    title: str | None
    num_chunks: int
    num_tokens: int
    num_bytes: int
    num_hits: int
    num_users: int
    is_pinned: bool
    is_uploaded: bool
    created_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class DeletedDocument:
    """What deleting a document did.

    Attributes:
        document_id: Its id.
        num_chunks: Chunks that nobody will find any more.
        num_freed_bytes: KV memory that is free now, text computed behind the document included.
        request_ids: Live requests of its own scope that still read it; its memory goes when they, and readers of other
            scopes if it was shared, end.
    """

    document_id: str
    num_chunks: int
    num_freed_bytes: int
    request_ids: list[str] = field(default_factory=list)


class DocumentManager:
    """Documents by scope and id. Called from the engine's thread only."""

    def __init__(
        self,
        cache: CacheManager,
        identity: CacheIdentity,
        live_requests: Callable[[], Iterable[RequestGroup]],
        on_delete: Callable[[], None],
    ) -> None:
        """Look after the documents of one cache.

        Args:
            cache: What is stored.
            identity: What its KV depends on.
            live_requests: Returns the requests that wait or run.
            on_delete: Called whenever a document was deleted, so that others forget what they know of it.
        """
        self._cache = cache
        self._live_requests = live_requests
        self._on_delete = on_delete
        self._texts: dict[tuple[str, str], Document] = {}
        self.bytes_per_token = identity.bytes_per_token

    def upload(self, document: Document, scope: str = "default") -> str:
        """Keep a document's text, so that requests may name it by id; return the id. An equal id is replaced."""
        self._texts[(scope, document.document_id)] = document
        return document.document_id

    def find(self, document_id: str, scope: str = "default") -> Document | None:
        """Return an uploaded document."""
        return self._texts.get((scope, document_id))

    def pin(
        self,
        document_ids: Iterable[str],
        *,
        ttl_s: float | None = None,
        scope: str = "default",
        max_bytes: int | None = None,
    ) -> None:
        """Forbid eviction of these documents' chunks until unpinned, or for `ttl_s` seconds.

        Args:
            document_ids: Stored documents.
            ttl_s: None = until unpinned.
            scope: The tenant.
            max_bytes: KV memory that may be pinned in this scope altogether; None = no limit.

        Raises:
            NotFoundError: One of them has no stored chunk; nothing was pinned. Warm it first.
            CapacityError: More than `max_bytes` would be pinned; nothing was.
        """
        chunks = [chunk for document_id in document_ids for chunk in self._chunks_of(document_id, scope)]
        self._check_pins(chunks, scope, max_bytes)
        for chunk in chunks:
            self._cache.pin_chunk(chunk, ttl_s)

    def unpin(self, document_ids: Iterable[str], *, scope: str = "default") -> None:
        """Allow eviction of these documents' chunks again.

        Raises:
            NotFoundError: One of them has no stored chunk; nothing was unpinned.
        """
        chunks = [chunk for document_id in document_ids for chunk in self._chunks_of(document_id, scope)]
        for chunk in chunks:
            if chunk.is_pinned:
                self._cache.unpin_chunk(chunk)

    def delete(self, document_id: str, *, scope: str = "default") -> DeletedDocument:
        """Forget a document: its text, its chunks in every encoding, and all text computed behind it.

        Live requests that were given it go on; what they compute from it is not kept beyond their end.

        Raises:
            NotFoundError: Nothing is known of it.
        """
        holders = [group for group in self._live_requests() if group.uses(document_id, scope)]
        uploaded = self._texts.pop((scope, document_id), None)
        chunks, num_freed = self._cache.delete_document(scope, document_id)
        self._on_delete()  # what is stored nowhere may still have been read
        if uploaded is None and not chunks and not num_freed and not holders:
            raise NotFoundError(f"document {document_id!r} is not stored")
        for group in holders:
            group.forget_at_end.add((scope, document_id))
            for sequence in group.sequences:
                if sequence.chain is not None:
                    sequence.chain.stop()
        num_freed_bytes = num_freed * self._cache.block_size * self.bytes_per_token
        request_ids = [group.request_id for group in holders if group.scope == scope]
        return DeletedDocument(document_id, len(chunks), num_freed_bytes, request_ids)

    def list(self, scope: str = "default") -> "list[DocumentInfo]":
        """Return what is stored of each document, in order of id."""
        self._cache.expire()
        by_id: dict[str, _Chunks] = {document_id: [] for s, document_id in self._texts if s == scope}
        for chunk in self._cache.chunks:
            if chunk.scope == scope:
                for document_id in chunk.document_ids:
                    by_id.setdefault(document_id, []).append(chunk)
        return [self._describe(document_id, by_id[document_id], scope) for document_id in sorted(by_id)]

    def _describe(self, document_id: str, chunks: _Chunks, scope: str) -> DocumentInfo:
        now = time.monotonic()
        uploaded = self._texts.get((scope, document_id))
        titles = [chunk.document_ids[document_id] for chunk in chunks]
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return DocumentInfo(
            document_id=document_id,
            title=uploaded.title if uploaded is not None else titles[0],
            num_chunks=len(chunks),
            num_tokens=num_tokens,
            num_bytes=num_tokens * self.bytes_per_token,
            num_hits=sum(chunk.num_hits for chunk in chunks),
            num_users=sum(chunk.num_users for chunk in chunks),
            is_pinned=bool(chunks) and all(chunk.is_pinned for chunk in chunks),
            is_uploaded=uploaded is not None,
            created_s=max((now - chunk.created_s for chunk in chunks), default=0.0),
            idle_s=min((now - chunk.last_used_s for chunk in chunks), default=0.0),
        )

    def _check_pins(self, new: _Chunks, scope: str, max_bytes: int | None) -> None:
        if max_bytes is None:
            return
        pinned = {chunk.key: chunk for chunk in self._cache.chunks if chunk.scope == scope and chunk.is_pinned}
        pinned |= {chunk.key: chunk for chunk in new}
        num_blocks = sum(len(chunk.block_ids) for chunk in pinned.values())
        num_bytes = num_blocks * self._cache.block_size * self.bytes_per_token
        if num_bytes > max_bytes:
            raise CapacityError(
                f"pinned documents would hold {num_bytes} bytes of KV, {max_bytes} may be pinned; unpin or delete some first"
            )

    def _chunks_of(self, document_id: str, scope: str) -> _Chunks:
        chunks = self._cache.chunks.of_document(scope, document_id)
        if not chunks:
            raise NotFoundError(f"document {document_id!r} has no stored KV; warm it first")
        return chunks
