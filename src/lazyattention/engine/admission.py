# SPDX-License-Identifier: Apache-2.0
"""From waiting to running: find what is stored, make room for the rest, all or nothing."""

from dataclasses import dataclass

from lazyattention.cache.chunk import ISOLATED, Chunk, ChunkKey
from lazyattention.cache.manager import CacheManager
from lazyattention.engine.outputs import DocumentReuse
from lazyattention.engine.request import RequestGroup, Sequence, SpanState
from lazyattention.engine.text_chain import TextChain
from lazyattention.reuse import PromptLayout, ReuseMethod, ReusePlan, SpanUse
from lazyattention.utils.hashing import digest_fields


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What all KV of this engine depends on, besides tokens and scope.

    Attributes:
        weights_id: Fingerprint of weights, adapters and RoPE settings.
        kv_dtype: Dtype of stored KV.
        bytes_per_token: KV bytes of one token over all layers.
    """

    weights_id: str
    kv_dtype: str
    bytes_per_token: int

    def root_key(self, scope: str) -> bytes:
        """Where the chains of one scope's text begin."""
        return digest_fields(("root", self.weights_id, self.kv_dtype, scope))

    def chunk_key(
        self, token_ids: list[int], method: ReuseMethod, preamble_key: ChunkKey | None, scope: str
    ) -> ChunkKey:
        """Key of a chunk encoded after the preamble of this key (None: isolated) for this method."""
        encoding = ISOLATED if preamble_key is None else f"after:{preamble_key.hex}"
        if not method.keys_turned:
            encoding += ";keys unturned"
        return ChunkKey.of(
            token_ids, weights_id=self.weights_id, encoding=encoding, kv_dtype=self.kv_dtype, scope=scope
        )


class Admission:
    """Turns a waiting sequence into a running one, or leaves everything as it was."""

    def __init__(self, cache: CacheManager, identity: CacheIdentity) -> None:
        """Keeps both; owns nothing."""
        self._cache = cache
        self._identity = identity

    def num_blocks_ever(self, layout: PromptLayout, plan: ReusePlan, max_tokens: int) -> int:
        """Blocks the sequence holds at its end, if it shares nothing with anybody: what must fit at all."""
        seen: set[tuple[int, ...]] = set()
        num_blocks = 0
        for index, (span, use) in enumerate(zip(layout.spans, plan.uses, strict=True)):
            num_tokens = len(span.token_ids) + (max_tokens if index == len(layout.spans) - 1 else 0)
            if use in (SpanUse.SHARED, SpanUse.COPIED) and span.token_ids not in seen:
                seen.add(span.token_ids)
                num_blocks += self._cache.num_blocks_of(num_tokens)
            if use is not SpanUse.SHARED:
                num_blocks += self._cache.num_blocks_of(num_tokens)
        return num_blocks

    def admit(self, sequence: Sequence) -> bool:
        """Give the sequence its spans, holding all KV it needs; False (and nothing held) when there is no room now."""
        group = sequence.group
        plan = group.method.plan(group.layout, group.encoding)
        spans = self._new_spans(sequence, plan)
        found = self._find_chunks(group, spans)
        chain = None
        num_text_found = 0
        if group.method.reuses_text:
            chain = TextChain(self._cache, self._identity.root_key(group.scope), group.layout, group.scope)
            num_text_found = chain.match(spans)
        if not self._cache.can_allocate(self._num_blocks_needed(spans)):
            self.release(spans, chain)
            return False
        self._insert_cold_chunks(group, spans, plan.preamble_index)
        for span in spans:
            if span.use is not SpanUse.SHARED:
                num_missing = self._cache.num_blocks_of(len(span.token_ids)) - len(span.block_ids)
                after = span.block_ids[-1] if span.block_ids else None
                span.block_ids += self._cache.allocate(num_missing, after=after)
        if chain is not None:
            chain.count_hits()
        sequence.reuse_plan, sequence.spans, sequence.chain = plan, spans, chain
        if not group.documents and sequence.num_preemptions == 0 and sequence.index == 0:
            self._report(group, spans, found, num_text_found)
        return True

    def release(self, spans: list[SpanState], chain: TextChain | None) -> None:
        """Give back everything a sequence holds."""
        own_blocks = [block_id for span in spans for block_id in span.block_ids]
        self._cache.release_blocks(own_blocks, chain.nodes if chain is not None else [])
        for span in spans:
            if span.chunk is not None:
                self._cache.release_chunk(span.chunk)
            span.chunk, span.block_ids = None, []

    def _new_spans(self, sequence: Sequence, plan: ReusePlan) -> list[SpanState]:
        group = sequence.group
        spans: list[SpanState] = []
        start = 0
        preamble_keys: dict[str, ChunkKey] | None = None  # by scope: a shared document's readers can meet
        for index, (span, use) in enumerate(zip(group.layout.spans, plan.uses, strict=True)):
            # An empty document has no KV: it is a text span without tokens.
            state = SpanState(use if span.token_ids else SpanUse.TEXT, list(span.token_ids), start)
            if state.use in (SpanUse.SHARED, SpanUse.COPIED):
                scope = span.scope or group.scope
                preamble_key = None if preamble_keys is None else preamble_keys[scope]
                state.chunk_key = self._identity.chunk_key(state.token_ids, group.method, preamble_key, scope)
                if index == plan.preamble_index:
                    scopes = {group.scope} | {later.scope for later in group.layout.spans if later.scope}
                    preamble_keys = {
                        name: self._identity.chunk_key(state.token_ids, group.method, None, name) for name in scopes
                    }
            spans.append(state)
            start += len(span.token_ids)
        spans[-1].token_ids += sequence.output_token_ids
        return spans

    def _find_chunks(self, group: RequestGroup, spans: list[SpanState]) -> list[str]:
        """Hold every stored chunk; return per span "reused", "in flight", or why it was missed ("" for other spans)."""
        found = []
        for span, source in zip(spans, group.layout.spans, strict=True):
            reason = ""
            if span.chunk_key is not None:
                span.chunk = self._cache.find_chunk(span.chunk_key, span.token_ids)
                if span.chunk is None:
                    reason = self._cache.chunks.miss_reason(span.chunk_key, source.scope or group.scope, span.token_ids)
                else:
                    reason = "reused" if span.chunk.is_ready else "in flight"
                    self._cache.hold_chunk(span.chunk)
            found.append(reason)
        return found

    def _num_blocks_needed(self, spans: list[SpanState]) -> int:
        cold = {span.chunk_key: len(span.token_ids) for span in spans if span.chunk_key and span.chunk is None}
        num_blocks = sum(self._cache.num_blocks_of(num_tokens) for num_tokens in cold.values())
        for span in spans:
            if span.use is not SpanUse.SHARED:
                num_blocks += self._cache.num_blocks_of(len(span.token_ids)) - len(span.block_ids)
        return num_blocks

    def _insert_cold_chunks(self, group: RequestGroup, spans: list[SpanState], preamble_index: int | None) -> None:
        preamble: Chunk | None = None
        for index, (span, source) in enumerate(zip(spans, group.layout.spans, strict=True)):
            if span.chunk_key is None:
                continue
            if span.chunk is None:
                # Look again: the same document may stand in this prompt twice.
                span.chunk = self._cache.find_chunk(span.chunk_key, span.token_ids)
                if span.chunk is not None:
                    self._cache.hold_chunk(span.chunk)
                else:
                    base = 0 if preamble is None else preamble.num_tokens
                    span.chunk = self._cache.insert_chunk(
                        span.chunk_key,
                        span.token_ids,
                        scope=source.scope or group.scope,
                        base=base,
                        preamble=preamble,
                        keys_turned=group.method.keys_turned,
                    )
            if index == preamble_index:
                preamble = span.chunk
            if source.document_id is not None:
                self._cache.chunks.label(span.chunk, source.document_id, source.title)

    def _report(self, group: RequestGroup, spans: list[SpanState], found: list[str], num_text_found: int) -> None:
        """Fill in what the request found; counted once, at its first admission."""
        stats = self._cache.stats
        stats.num_hit_text_tokens += num_text_found
        seen: set[bytes] = set()
        num_reused = 0
        for span, source, reason in zip(spans, group.layout.spans, found, strict=True):
            num_tokens = len(source.token_ids)
            if span.chunk is not None:
                if span.chunk.key.digest in seen and reason not in ("reused", "in flight"):
                    reason = "same request"
                seen.add(span.chunk.key.digest)
                is_hit = reason in ("reused", "in flight", "same request")
                status = "hit" if is_hit else "miss"
                span.chunk.num_hits += is_hit
                num_reused_here = num_tokens if is_hit else 0
            else:
                num_reused_here = span.num_computed
                status, reason = self._text_status(group.method, num_tokens, num_reused_here)
            num_reused += num_reused_here
            if source.document_id is None:
                continue
            stats.num_hit_tokens += num_reused_here
            stats.num_miss_tokens += num_tokens - num_reused_here
            group.documents.append(
                DocumentReuse(
                    document_id=source.document_id,
                    title=source.title,
                    chunk_index=source.chunk_index,
                    num_tokens=num_tokens,
                    status=status,
                    reason=reason,
                    num_reused_tokens=num_reused_here,
                    num_bytes=num_tokens * self._identity.bytes_per_token,
                )
            )
        group.num_reused_tokens = num_reused

    @staticmethod
    def _text_status(method: ReuseMethod, num_tokens: int, num_found: int) -> tuple[str, str]:
        if not num_tokens:
            return "computed", "empty"
        if not method.reuses_text:
            return "computed", f"not reused by {method.name}"
        return ("hit", "identical prefix") if num_found else ("miss", "no identical prefix")
