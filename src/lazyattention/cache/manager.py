# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache's bookkeeping: blocks, stored chunks, stored text, and what goes when room is needed.

No tensors here. References on blocks: a stored chunk or text node holds one; each request that uses it holds one more.
So whatever is deleted while in use stays readable until its last user ends, and is found by nobody else.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lazyattention.cache.block_pool import BlockPool
from lazyattention.cache.chunk import Chunk, ChunkKey
from lazyattention.cache.chunk_store import ChunkStore, content_id, document_tag
from lazyattention.cache.eviction import EvictionQueue, recompute_cost
from lazyattention.cache.prefix_store import PrefixNode, PrefixStore
from lazyattention.errors import CapacityError


@dataclass(slots=True)
class CacheStats:
    """Counters since start. Rates are in tokens.

    Attributes:
        num_hit_tokens: Document tokens found at admission.
        num_miss_tokens: Document tokens not found at admission.
        num_hit_text_tokens: Text tokens found at admission.
        num_evicted_chunks: Chunks that made room.
        num_evicted_text_blocks: Text blocks that made room.
        num_expired_chunks: Chunks whose time was over.
        num_deleted_chunks: Chunks deleted by the user.
    """

    num_hit_tokens: int = 0
    num_miss_tokens: int = 0
    num_hit_text_tokens: int = 0
    num_evicted_chunks: int = 0
    num_evicted_text_blocks: int = 0
    num_expired_chunks: int = 0
    num_deleted_chunks: int = 0


class CacheManager:
    """Everything that decides which KV exists.

    Protocol: `find_chunk`/`match_text` change nothing but statistics; `hold_*` makes KV safe from eviction;
    `release_*` undoes one hold. All calls come from the engine's thread.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        chunk_ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An empty cache of `num_blocks` blocks of `block_size` tokens; `clock` returns monotonic seconds."""
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.chunks = ChunkStore()
        self.texts = PrefixStore()
        self.stats = CacheStats()
        self.chunk_ttl_s = chunk_ttl_s
        self._clock = clock
        self._evictable = EvictionQueue()

    # Room ------------------------------------------------------------------------------------------------------------

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one span need."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        """True if so many blocks are free or can be made free now."""
        if num_blocks <= self.pool.num_free + self._evictable.num_blocks:
            return True
        num_chunk_blocks = sum(len(chunk.block_ids) for chunk in self.chunks if chunk in self._evictable)
        return num_blocks <= self.pool.num_free + num_chunk_blocks + self._num_evictable_text_blocks()

    def _num_evictable_text_blocks(self) -> int:
        """Count what goes leaf by leaf: blocks above an evictable leaf are not queued yet but follow it.

        A block above one that is in use stays, even if nobody uses it itself: its user may have computed a copy.
        """
        held = {node for node in self.texts if self.pool.ref_count(node.block_id) > 1}
        for node in list(held):
            while node.parent is not None and node.parent not in held:
                node = node.parent
                held.add(node)
        return len(self.texts) - len(held)

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks held by the user's pins alone or not; they cannot be had by waiting."""
        return sum(len(chunk.block_ids) for chunk in self.chunks if chunk.is_pinned)

    def allocate(self, num_blocks: int, *, after: int | None = None) -> list[int]:
        """Take blocks, evicting what is least worth keeping if needed; all or nothing.

        Raises:
            CapacityError: Not enough blocks even after evicting everything unused.
        """
        while self.pool.num_free < num_blocks:
            if not self._evict_one():
                raise CapacityError(
                    f"need {num_blocks} KV blocks, {self.pool.num_free} are free and none can be evicted"
                )
        return self.pool.allocate(num_blocks, after=after)

    def _evict_one(self) -> bool:
        entry = self._evictable.pop()
        if entry is None:
            return False
        if isinstance(entry, Chunk):
            self._forget_chunk(entry, "evicted")
            self.stats.num_evicted_chunks += 1
        else:
            assert isinstance(entry, PrefixNode)
            self._forget_text(entry)
            self.stats.num_evicted_text_blocks += 1
        return True

    # Chunks ----------------------------------------------------------------------------------------------------------

    def find_chunk(self, key: ChunkKey, token_ids: Sequence[int]) -> Chunk | None:
        """Return a stored (or just being encoded) chunk; expired ones are not found."""
        chunk = self.chunks.get(key, token_ids)
        if chunk is not None and self._is_expired(chunk):
            self.expire()
            chunk = self.chunks.get(key, token_ids)
        return chunk

    def insert_chunk(
        self,
        key: ChunkKey,
        token_ids: Sequence[int],
        *,
        scope: str,
        context: Sequence[Chunk] = (),
        keys_turned: bool = True,
    ) -> Chunk:
        """Make room for a new chunk and hold it once for the caller. It holds what it is encoded after until it is ready.

        Raises:
            CapacityError: No room; nothing changed but evictions.
        """
        block_ids = self.allocate(self.num_blocks_of(len(token_ids)))
        chunk = Chunk(
            key=key,
            token_ids=tuple(token_ids),
            scope=scope,
            content_id=content_id(scope, token_ids),
            base=sum(before.num_tokens for before in context),
            context=tuple(context),
            keys_turned=keys_turned,
            block_ids=block_ids,
            num_users=1,
            created_s=self._clock(),
            last_used_s=self._clock(),
        )
        for before in context:
            self.hold_chunk(before)
        self.chunks.insert(chunk)
        return chunk

    def hold_chunk(self, chunk: Chunk) -> None:
        """Make a chunk safe from eviction until `release_chunk`."""
        self._evictable.discard(chunk)
        chunk.num_users += 1
        chunk.last_used_s = self._clock()

    def release_chunk(self, chunk: Chunk) -> None:
        """Undo one hold. A chunk that nobody needs any more before it is ready is dropped: half a chunk serves nobody."""
        assert chunk.num_users > 0, "chunk released twice"
        chunk.num_users -= 1
        chunk.last_used_s = self._clock()
        if chunk.num_users:
            return
        if chunk.is_deleted:
            self._free_chunk(chunk)
        elif not chunk.is_ready:
            self._forget_chunk(chunk, "new")
        else:
            self._settle(chunk)

    def chunk_is_ready(self, chunk: Chunk) -> None:
        """Tell that the last token's KV was computed; what it was encoded after is no longer needed for it."""
        context, chunk.context = chunk.context, ()
        for before in context:
            self.release_chunk(before)

    def pin_chunk(self, chunk: Chunk, ttl_s: float | None) -> None:
        """Forbid eviction until `unpin_chunk` or for `ttl_s` seconds."""
        chunk.is_pinned = True
        chunk.pinned_until_s = None if ttl_s is None else self._clock() + ttl_s
        self._evictable.discard(chunk)

    def unpin_chunk(self, chunk: Chunk) -> None:
        """Allow eviction again."""
        chunk.is_pinned, chunk.pinned_until_s = False, None
        if chunk.num_users == 0 and not chunk.is_deleted:
            self._settle(chunk)

    def delete_document(self, scope: str, document_id: str) -> tuple[list[Chunk], int]:
        """Forget a document's chunks, in every encoding, and all text computed from or after it.

        Blocks still being read go when their last reader ends.

        Returns:
            The chunks forgotten, and the number of blocks that became free now.
        """
        before = self.pool.num_free
        chunks = self.chunks.of_document(scope, document_id)
        for chunk in chunks:
            self.delete_tagged(chunk.key.digest)
            self._forget_chunk(chunk, "deleted")
            self.stats.num_deleted_chunks += 1
        self.delete_tagged(document_tag(scope, document_id))
        return chunks, self.pool.num_free - before

    def delete_tagged(self, tag: bytes) -> int:
        """Forget all text that carries `tag`, and its continuations; return the number of blocks that became free."""
        before = self.pool.num_free
        removed = self.texts.remove_tagged(tag)
        for node in removed:
            self._evictable.discard(node)
            self.pool.release([node.block_id])
        for node in removed:
            if node.parent is not None:
                self._settle_text(node.parent)
        return self.pool.num_free - before

    def expire(self) -> None:
        """End pins and chunks whose time is over."""
        now = self._clock()
        for chunk in list(self.chunks):
            if chunk.is_pinned and chunk.pinned_until_s is not None and chunk.pinned_until_s <= now:
                self.unpin_chunk(chunk)
            if self._is_expired(chunk):
                self.delete_tagged(chunk.key.digest)
                self._forget_chunk(chunk, "expired")
                self.stats.num_expired_chunks += 1

    def _is_expired(self, chunk: Chunk) -> bool:
        if chunk.num_users or chunk.is_pinned or not chunk.is_ready:
            return False
        deadline = chunk.expires_at_s
        if self.chunk_ttl_s is not None:
            by_use = chunk.last_used_s + self.chunk_ttl_s
            deadline = by_use if deadline is None else min(deadline, by_use)
        return deadline is not None and deadline <= self._clock()

    def _settle(self, chunk: Chunk) -> None:
        """Nobody holds this ready chunk: it may be evicted unless pinned."""
        if not chunk.is_pinned:
            cost = recompute_cost(chunk.num_tokens, chunk.base)
            self._evictable.add(chunk, num_uses=1 + chunk.num_hits, cost=cost, num_blocks=len(chunk.block_ids))

    def _forget_chunk(self, chunk: Chunk, reason: str) -> None:
        """Take a chunk out of the index; its blocks go now, or with the last user."""
        self._evictable.discard(chunk)
        self.chunks.remove(chunk, reason)
        chunk.is_deleted = True
        if chunk.num_users == 0:
            self._free_chunk(chunk)

    def _free_chunk(self, chunk: Chunk) -> None:
        self.pool.release(chunk.block_ids)
        chunk.block_ids = []
        self.chunk_is_ready(chunk)  # a half-encoded chunk still holds what it is encoded after

    # Text ------------------------------------------------------------------------------------------------------------

    def hold_text(self, node: PrefixNode) -> None:
        """Let a request use a stored text block: one more reference on its block."""
        self._evictable.discard(node)
        self.pool.acquire([node.block_id])

    def insert_text(
        self,
        key: bytes,
        parent: PrefixNode | None,
        token_ids: Sequence[int],
        block_id: int,
        context_len: int,
        tags: frozenset[bytes],
    ) -> PrefixNode | None:
        """Keep a request's full text block for identical prompts: the store takes a reference on it.

        Returns:
            The node, or the one already stored under this key (then the request's own block stays private), or None if
            its parent is no longer stored.
        """
        existing = self.texts.get(key, token_ids)
        if existing is not None:
            return existing
        if parent is not None and self.texts.get(parent.key, parent.token_ids) is not parent:
            return None
        node = PrefixNode(key, parent, tuple(token_ids), block_id, context_len, tags=tags)
        if not self.texts.insert(node):
            return None
        if parent is not None:
            self._evictable.discard(parent)
        self.pool.acquire([block_id])
        return node

    def release_blocks(self, block_ids: Sequence[int], nodes: Sequence[PrefixNode]) -> None:
        """End a request's use of its text blocks; `nodes` are the stored ones among them, which stay, evictable.

        Args:
            block_ids: All text blocks the request holds a reference on.
            nodes: Stored nodes it found or made.
        """
        self.pool.release(block_ids)
        for node in reversed(nodes):
            self._settle_text(node)

    def _settle_text(self, node: PrefixNode) -> None:
        is_stored = self.texts.get(node.key, node.token_ids) is node
        if is_stored and not node.children and self.pool.ref_count(node.block_id) == 1:
            cost = recompute_cost(len(node.token_ids), node.context_len)
            self._evictable.add(node, num_uses=1 + node.num_hits, cost=cost, num_blocks=1)

    def _forget_text(self, node: PrefixNode) -> None:
        self.texts.remove(node)
        self.pool.release([node.block_id])
        if node.parent is not None:
            self._settle_text(node.parent)

    def forget_texts(self, nodes: Sequence[PrefixNode]) -> int:
        """Forget those of `nodes` that nothing continues, the last ones first; return how many.

        Blocks still being read go when their last reader ends.
        """
        num_forgotten = 0
        for node in reversed(nodes):
            if self.texts.get(node.key, node.token_ids) is node and not node.children:
                self._evictable.discard(node)
                self._forget_text(node)
                num_forgotten += 1
        return num_forgotten

    def forget_unused_texts(self) -> None:
        """Forget all text that nobody uses; chunks stay."""
        while unused := [node for node in self.texts if node in self._evictable]:
            self.forget_texts(unused)

    # Integrity -------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Evict everything that nobody holds, user's pins aside."""
        while self._evict_one():
            pass

    def check_idle(self) -> None:
        """Assert that no request holds anything: every taken block belongs to exactly one stored chunk or text node."""
        self.pool.check()
        owned = [block_id for chunk in self.chunks for block_id in chunk.block_ids]
        owned += [node.block_id for node in self.texts]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert len(owned) + self.pool.num_free == self.pool.num_blocks, "a block leaked"
        assert all(self.pool.ref_count(block_id) == 1 for block_id in owned), "a reference leaked"
        assert all(chunk.num_users == 0 and chunk.is_ready for chunk in self.chunks), "a chunk is still held"
        stuck = [chunk for chunk in self.chunks if not chunk.is_pinned and chunk not in self._evictable]
        assert not stuck, "a chunk can never be evicted"
        leaves = [node for node in self.texts if not node.children]
        assert all(node in self._evictable for node in leaves), "a text block can never be evicted"
