# SPDX-License-Identifier: Apache-2.0
"""Which chunks are stored, and why one is not. It owns no blocks: see manager.py. No tensors here."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from lazyattention.cache.chunk import Chunk, ChunkKey
from lazyattention.utils.hashing import digest_fields

# Keys remembered after they left, so that a miss can say "evicted" instead of "new".
_MAX_REMEMBERED = 100_000


def content_id(scope: str, token_ids: Sequence[int]) -> bytes:
    """Identify a text within its scope, whatever it was encoded after and with whichever weights."""
    return digest_fields(("content", scope), token_ids)


def document_tag(scope: str, document_id: str) -> bytes:
    """Mark text KV that was computed from a document, so that deleting the document finds it."""
    return digest_fields(("document", scope, document_id))


class ChunkStore:
    """Index of stored chunks by key, content and document.

    A chunk of one scope is never found through another: the scope is part of every key looked up.
    """

    def __init__(self) -> None:
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._by_content: dict[bytes, set[Chunk]] = {}
        self._by_document: dict[tuple[str, str], set[Chunk]] = {}
        self._departed: OrderedDict[ChunkKey, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    def __contains__(self, chunk: object) -> bool:
        return isinstance(chunk, Chunk) and self._chunks.get(chunk.key) is chunk

    def get(self, key: ChunkKey, token_ids: Sequence[int]) -> Chunk | None:
        """Return the chunk of this key if it is there and holds these very tokens."""
        chunk = self._chunks.get(key)
        if chunk is None or (chunk.token_ids is not token_ids and chunk.token_ids != tuple(token_ids)):
            return None
        return chunk

    def miss_reason(self, key: ChunkKey, scope: str, token_ids: Sequence[int]) -> str:
        """Say why `get` found nothing: "evicted", "expired", "deleted", "other preamble" or "new"."""
        if key in self._departed:
            return self._departed[key]
        return "other preamble" if content_id(scope, token_ids) in self._by_content else "new"

    def insert(self, chunk: Chunk) -> None:
        """Add a chunk whose key is not taken."""
        assert chunk.key not in self._chunks, "find before inserting"
        self._chunks[chunk.key] = chunk
        self._departed.pop(chunk.key, None)
        self._by_content.setdefault(chunk.content_id, set()).add(chunk)
        for document_id in chunk.document_ids:
            self._by_document.setdefault((chunk.scope, document_id), set()).add(chunk)

    def remove(self, chunk: Chunk, reason: str) -> None:
        """Take a chunk out of the index and remember why."""
        del self._chunks[chunk.key]
        self._discard(self._by_content, chunk.content_id, chunk)
        for document_id in chunk.document_ids:
            self._discard(self._by_document, (chunk.scope, document_id), chunk)
        self._departed[chunk.key] = reason
        while len(self._departed) > _MAX_REMEMBERED:
            self._departed.popitem(last=False)

    def label(self, chunk: Chunk, document_id: str, title: str | None) -> None:
        """Note that `chunk` is (also) a piece of this document."""
        chunk.document_ids[document_id] = title
        self._by_document.setdefault((chunk.scope, document_id), set()).add(chunk)

    def of_document(self, scope: str, document_id: str) -> list[Chunk]:
        """Return the stored chunks of one document in one scope, in every encoding."""
        return list(self._by_document.get((scope, document_id), ()))

    def with_content(self, content: bytes) -> list[Chunk]:
        """Return the stored chunks of one text (see `content_id`), in every encoding."""
        return list(self._by_content.get(content, ()))

    @staticmethod
    def _discard(index: dict, name: object, chunk: Chunk) -> None:  # type: ignore[type-arg]
        members = index[name]
        members.discard(chunk)
        if not members:
            del index[name]
