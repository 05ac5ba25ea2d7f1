# SPDX-License-Identifier: Apache-2.0
"""One sequence's walk along the store of text KV: first matching what is there, then keeping what it computes.

The chain runs over all spans in prompt order. Text adds a link per block (a span that ended adds its last, shorter
block too); a stored chunk adds a boundary link, so that text behind other chunks, or the same chunks in another order,
is another chain.
"""

from collections.abc import Sequence

from lazyattention.cache.chunk_store import document_tag
from lazyattention.cache.manager import CacheManager
from lazyattention.cache.prefix_store import PrefixNode, block_key, boundary_key
from lazyattention.engine.request import SpanState
from lazyattention.reuse import ReusePlan, SpanUse


class TextChain:
    """A cursor over a sequence's spans: everything before it is stored, or known not to be storable."""

    def __init__(self, cache: CacheManager, root_key: bytes, plan: ReusePlan, scope: str) -> None:
        """Start at the prompt's beginning; `root_key` names all that text KV depends on besides what stands before it."""
        self._cache = cache
        self._plan = plan
        self._scope = scope
        self._key = root_key
        self._parent: PrefixNode | None = None
        self._chunks: list[SpanState] = []  # behind the last node
        self._span_index = 0
        self._done = 0  # tokens of the current span that are behind the cursor
        self._is_broken = False
        self.nodes: list[PrefixNode] = []

    def match(self, spans: Sequence[SpanState]) -> int:
        """Let `spans` use the stored text that fits, and hold it; return the number of tokens found.

        The prompt's last token is never taken from the store: its logits are needed.
        """
        num_found = 0
        while (piece := self._next_piece(spans, computed_only=False)) is not None:
            span, token_ids = piece
            is_last_token = span is spans[-1] and self._done + len(token_ids) >= len(span.token_ids)
            key = block_key(self._key, token_ids)
            node = None if is_last_token else self._cache.texts.get(key, token_ids)
            if node is None:
                break
            self._cache.hold_text(node)
            span.block_ids.append(node.block_id)
            span.num_computed += len(token_ids)
            num_found += len(token_ids)
            self._step(key, node, len(token_ids))
        return num_found

    def count_hits(self) -> None:
        """Note that a request which was admitted found what `match` matched."""
        for node in self.nodes:
            node.num_hits += 1

    def stop(self) -> None:
        """Keep nothing from here on."""
        self._is_broken = True

    def let_go(self) -> bool:
        """Keep nothing, not even what was kept before; True if there was any.

        Where another request stored the same text first, this one holds copies, and what it stored behind them keeps the
        originals from making room.
        """
        self.stop()
        return self._cache.forget_texts(self.nodes) > 0

    def keep(self, spans: Sequence[SpanState]) -> None:
        """Offer the store every block that has been computed since the last call."""
        while not self._is_broken and (piece := self._next_piece(spans, computed_only=True)) is not None:
            span, token_ids = piece
            key = block_key(self._key, token_ids)
            block_id = span.block_ids[self._done // self._cache.block_size]
            # The documents' tags, too: text may outlive the chunks that it was computed behind.
            digests = frozenset(chunk.chunk_key.digest for chunk in self._chunks if chunk.chunk_key is not None)
            tags = digests.union(*map(self._document_tags, (*self._chunks, span)))
            context_len = span.start + self._done
            node = self._cache.insert_text(key, self._parent, token_ids, block_id, context_len, tags)
            if node is None:
                self._is_broken = True
                return
            self._step(key, node, len(token_ids))

    def _next_piece(self, spans: Sequence[SpanState], *, computed_only: bool) -> tuple[SpanState, list[int]] | None:
        """Return the next block's span and tokens, or None where the chain cannot go on (yet)."""
        while self._span_index < len(spans):
            span = spans[self._span_index]
            if span.use is SpanUse.TEXT:
                token_ids = span.token_ids[self._done : self._done + self._cache.block_size]
                is_closed = span is not spans[-1]
                is_whole = len(token_ids) == self._cache.block_size or (is_closed and bool(token_ids))
                if is_whole:
                    computed = span.num_computed >= self._done + len(token_ids)
                    return (span, token_ids) if computed or not computed_only else None
                if not is_closed:
                    return None
            elif self._plan.spans[span.source].is_hidden:
                # Nobody sees it, but a document's hidden tokens take positions: what follows stands further on.
                if self._plan.spans[span.source].span.is_document:
                    self._key = boundary_key(self._key, b"hidden", (0, len(span.token_ids)))
            elif span.chunk_key is not None:
                part = (span.chunk_start, len(span.token_ids)) if span.is_part else ()
                self._key = boundary_key(self._key, span.chunk_key.digest, part)
                self._chunks.append(span)
            self._span_index += 1
            self._done = 0
        return None

    def _document_tags(self, span: SpanState) -> frozenset[bytes]:
        """Name the span's document, so that deleting it finds what is computed from it and what follows."""
        source = self._plan.spans[span.source].span
        if source.document_id is None:
            return frozenset()
        return frozenset([document_tag(source.scope or self._scope, source.document_id)])

    def _step(self, key: bytes, node: PrefixNode, num_tokens: int) -> None:
        self._key, self._parent, self._chunks = key, node, []
        self._done += num_tokens
        self.nodes.append(node)
