# SPDX-License-Identifier: Apache-2.0
"""From waiting to running: find what is stored, make room for the rest, all or nothing."""

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from lazyattention.cache.chunk import ISOLATED, Chunk, ChunkKey
from lazyattention.cache.manager import CacheManager
from lazyattention.engine.outputs import DocumentReuse
from lazyattention.engine.request import RequestGroup, Sequence, SpanState
from lazyattention.engine.text_chain import TextChain
from lazyattention.reuse import PlannedSpan, ReuseMethod, ReusePlan, SpanUse
from lazyattention.reuse.recompute import RECOMPUTE_POLICIES, Evidence
from lazyattention.utils.hashing import digest_fields

_HITS = ("reused", "in flight", "same request")


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

    def root_key(self, scope: str, plan: ReusePlan) -> bytes:
        """Where the chains of one scope's text begin, for prompts whose text sees chunks in the plan's way."""
        options = plan.options
        seen_how = (options.positions, repr(options.chunk_temperature), repr(options.chunk_bias))
        return digest_fields(("root", self.weights_id, self.kv_dtype, scope, *seen_how))

    def chunk_key(self, tokens_digest: bytes, method: ReuseMethod, after: ChunkKey | None, scope: str) -> ChunkKey:
        """Key of a chunk encoded after the chunk of this key, and all that was encoded after (None: isolated)."""
        encoding = ISOLATED if after is None else f"after:{after.hex}"
        if not method.keys_turned:
            encoding += ";keys unturned"
        return ChunkKey.of(
            tokens_digest, weights_id=self.weights_id, encoding=encoding, kv_dtype=self.kv_dtype, scope=scope
        )


class Admission:
    """Turns a waiting sequence into a running one, or leaves everything as it was."""

    def __init__(self, cache: CacheManager, identity: CacheIdentity) -> None:
        """Keeps both; owns nothing."""
        self._cache = cache
        self._identity = identity

    def num_blocks_ever(self, group: RequestGroup, max_tokens: int) -> int:
        """Blocks a sequence holds at its end, if it shares nothing with anybody: what must fit at all."""
        plan = group.plan
        block_counts = self.block_counts(plan)
        seen: set[tuple[bytes, ...]] = set()
        num_blocks = 0
        if group.recompute is not None:
            policy = RECOMPUTE_POLICIES[group.recompute.policy]
            num_blocks = policy.num_blocks(group.recompute.amount, block_counts, self._cache.block_size)
        for index, planned in enumerate(plan.spans):
            num_tokens = planned.num_tokens + (max_tokens if index == len(plan.spans) - 1 else 0)
            is_recomputed = (
                group.chosen_blocks is not None and len(group.chosen_blocks[index]) == block_counts[index] > 0
            )
            if planned.use in (SpanUse.SHARED, SpanUse.COPIED) and not is_recomputed:
                content = tuple(plan.spans[place].span.digest for place in (*planned.context, index))
                if content not in seen:
                    seen.add(content)
                    num_blocks += self._cache.num_blocks_of(num_tokens)
            if planned.use is not SpanUse.SHARED:
                num_blocks += self._cache.num_blocks_of(num_tokens)
        return num_blocks

    def block_counts(self, plan: ReusePlan) -> list[int]:
        """Return the blocks of each span that may be recomputed: a document's visible blocks; none for text."""
        return [
            self._cache.num_blocks_of(planned.num_tokens) if planned.span.is_document and not planned.is_hidden else 0
            for planned in plan.spans
        ]

    def choose(self, group: RequestGroup, scores: Seq[Seq[float]] | None = None) -> None:
        """Choose which blocks a request computes anew; they stay chosen, through preemption too.

        Args:
            group: A request with `recompute`.
            scores: Per span of its plan one number per block; None for policies that need no evidence.
        """
        assert group.recompute is not None
        block_counts = self.block_counts(group.plan)
        block_size = self._cache.block_size
        policy = RECOMPUTE_POLICIES[group.recompute.policy]
        group.chosen_blocks = policy.choose(group.recompute.amount, block_counts, block_size, scores)
        group.must_report = True

    def admit(self, sequence: Sequence) -> bool:
        """Give the sequence its spans, holding all KV it needs; False (and nothing held) when there is no room now."""
        group = sequence.group
        spans = self._new_spans(sequence)
        found = self._find_chunks(group, spans)
        chain = None
        num_text_found = 0
        if group.method.reuses_text:
            root_key = self._identity.root_key(group.scope, group.plan)
            chain = TextChain(self._cache, root_key, group.plan, group.scope)
            # Whoever watches the question's attention must compute the question.
            is_watched = group.missing_evidence is Evidence.QUESTION_ATTENTION
            num_text_found = chain.match(spans[:-1] if is_watched else spans)
        if not self._cache.can_allocate(self._num_blocks_needed(group, spans)):
            self.release(spans, chain)
            return False
        self._insert_cold_chunks(group, spans)
        for span in spans:
            if span.use is not SpanUse.SHARED:
                num_missing = self._cache.num_blocks_of(len(span.token_ids)) - len(span.block_ids)
                after = span.block_ids[-1] if span.block_ids else None
                span.block_ids += self._cache.allocate(num_missing, after=after)
        if chain is not None:
            chain.count_hits()
        sequence.spans, sequence.chain = spans, chain
        sequence.question_attention = None
        if group.must_report:
            if group.found is None:
                group.found = found
                in_front = itertools.takewhile(lambda span: not group.plan.spans[span.source].span.is_document, spans)
                group.num_found_before = sum(span.num_computed for span in in_front)
                self._count(group, spans, num_text_found)
            self._report(group, spans, group.found)
        return True

    def release(self, spans: list[SpanState], chain: TextChain | None) -> None:
        """Give back everything a sequence holds."""
        own_blocks = [block_id for span in spans for block_id in span.block_ids]
        self._cache.release_blocks(own_blocks, chain.nodes if chain is not None else [])
        for span in spans:
            if span.chunk is not None:
                self._cache.release_chunk(span.chunk)
            span.chunk, span.block_ids = None, []

    def _new_spans(self, sequence: Sequence) -> list[SpanState]:
        group = sequence.group
        spans: list[SpanState] = []
        keys: dict[tuple[int, str], ChunkKey] = {}

        def key_of(index: int, scope: str) -> ChunkKey:
            """Key of a planned span in a scope: a shared document's readers can meet, whatever scope they are of."""
            if (index, scope) not in keys:
                planned = group.plan.spans[index]
                after = key_of(planned.context[-1], scope) if planned.context else None
                keys[index, scope] = self._identity.chunk_key(planned.span.digest, group.method, after, scope)
            return keys[index, scope]

        for index, planned in enumerate(group.plan.spans):
            state = SpanState(planned.use, list(planned.span.token_ids), planned.start, index)
            if planned.use in (SpanUse.SHARED, SpanUse.COPIED):
                state.chunk_key = key_of(index, planned.span.scope or group.scope)
            spans += self._cut(state, group.chosen_blocks[index]) if group.chosen_blocks is not None else [state]
        spans[-1].token_ids += sequence.output_token_ids
        return spans

    def _cut(self, span: SpanState, chosen: tuple[int, ...]) -> list[SpanState]:
        """Cut a document where chosen blocks meet others: these are read in place, those are text of the request."""
        if not chosen:
            return [span]
        block_size = self._cache.block_size
        num_tokens = len(span.token_ids)
        blocks = range(self._cache.num_blocks_of(num_tokens))
        parts = []
        for is_chosen, run in itertools.groupby(blocks, set(chosen).__contains__):
            first, *rest = run
            start, end = first * block_size, min(num_tokens, (first + len(rest) + 1) * block_size)
            part = SpanState(SpanUse.TEXT, span.token_ids[start:end], span.start + start, span.source)
            if not is_chosen:
                part.use, part.is_part, part.chunk_start, part.chunk_key = span.use, True, start, span.chunk_key
            parts.append(part)
        return parts

    def _find_chunks(self, group: RequestGroup, spans: list[SpanState]) -> list[str]:
        """Hold every stored chunk.

        Hidden ones are looked for only where the chunk behind them was missed; elsewhere their span has no key left.

        Returns:
            Per span of the plan "reused", "in flight", "same request", or why its chunk was missed; "" without one.
        """
        found = [""] * len(group.plan.spans)
        missed: set[ChunkKey] = set()
        needed: set[int] = set()
        for is_hidden in (False, True):
            for span in spans:
                planned = group.plan.spans[span.source]
                if span.chunk_key is None or planned.is_hidden is not is_hidden:
                    continue
                if is_hidden and span.source not in needed:
                    span.chunk_key = None
                    continue
                span.chunk = self._cache.find_chunk(span.chunk_key, planned.span.token_ids)
                if span.chunk is not None:
                    found[span.source] = "reused" if span.chunk.is_ready else "in flight"
                    self._cache.hold_chunk(span.chunk)
                    continue
                needed.update(planned.context)
                if not found[span.source]:
                    scope = planned.span.scope or group.scope
                    reason = self._cache.chunks.miss_reason(span.chunk_key, scope, planned.span.token_ids)
                    found[span.source] = "same request" if span.chunk_key in missed else reason
                    missed.add(span.chunk_key)
        return found

    def _num_blocks_needed(self, group: RequestGroup, spans: list[SpanState]) -> int:
        cold = {
            span.chunk_key: group.plan.spans[span.source].num_tokens
            for span in spans
            if span.chunk_key and span.chunk is None
        }
        num_blocks = sum(self._cache.num_blocks_of(num_tokens) for num_tokens in cold.values())
        for span in spans:
            if span.use is not SpanUse.SHARED:
                num_blocks += self._cache.num_blocks_of(len(span.token_ids)) - len(span.block_ids)
        return num_blocks

    def _insert_cold_chunks(self, group: RequestGroup, spans: list[SpanState]) -> None:
        chunks: dict[int, Chunk] = {}
        for span in spans:
            if span.chunk_key is None:
                continue
            planned = group.plan.spans[span.source]
            if span.chunk is None:
                # Look again: the same document may stand in this prompt twice, or be read in several parts.
                span.chunk = self._cache.find_chunk(span.chunk_key, planned.span.token_ids)
                if span.chunk is not None:
                    self._cache.hold_chunk(span.chunk)
                else:
                    span.chunk = self._cache.insert_chunk(
                        span.chunk_key,
                        planned.span.token_ids,
                        scope=planned.span.scope or group.scope,
                        context=[chunks[index] for index in planned.context],
                        keys_turned=group.method.keys_turned,
                    )
            chunks[span.source] = span.chunk
            if planned.span.document_id is not None:
                self._cache.chunks.label(span.chunk, planned.span.document_id, planned.span.title)

    def _count(self, group: RequestGroup, spans: list[SpanState], num_text_found: int) -> None:
        """Count what a request found, once."""
        stats = self._cache.stats
        stats.num_hit_text_tokens += num_text_found
        assert group.found is not None
        parts_of = _by_source(spans)
        for index, (planned, reason) in enumerate(zip(group.plan.spans, group.found, strict=True)):
            if planned.is_hidden:
                continue  # counted with the chunk behind it
            parts = parts_of[index]
            chunk = next((span.chunk for span in parts if span.chunk is not None), None)
            num_tokens = planned.num_tokens + self._num_hidden(group.plan, planned)
            if chunk is not None:
                chunk.num_hits += reason in _HITS
                num_found = num_tokens if reason in _HITS else 0
            else:
                num_found = sum(span.num_computed for span in parts)
            if planned.span.is_document:
                stats.num_hit_tokens += num_found
                stats.num_miss_tokens += num_tokens - num_found

    def _report(self, group: RequestGroup, spans: list[SpanState], found: list[str]) -> None:
        """Say what becomes of each document; again once it is known which blocks are computed anew."""
        group.must_report = False
        group.documents, group.num_reused_tokens, group.num_recomputed_tokens = [], 0, 0
        # In front of all documents a second admission finds what the request itself has computed since the first.
        num_found_before = group.num_found_before
        parts_of = _by_source(spans)
        for index, (planned, reason) in enumerate(zip(group.plan.spans, found, strict=True)):
            if planned.is_hidden:
                continue  # reported with the chunk behind it
            source, parts = planned.span, parts_of[index]
            num_hidden = self._num_hidden(group.plan, planned)
            num_tokens = planned.num_tokens + num_hidden
            num_found = sum(span.num_computed for span in parts)
            if not source.is_document and not group.documents:
                num_found = min(num_found, num_found_before)
                num_found_before -= num_found
            num_recomputed = 0
            if group.recompute is not None and source.is_document:
                num_recomputed = sum(len(span.token_ids) for span in parts if span.use is SpanUse.TEXT)
            if reason:
                status = "hit" if reason in _HITS else "miss"
                num_read = sum(len(span.token_ids) for span in parts if span.chunk is not None)
                num_reused = num_found + (num_hidden + num_read if status == "hit" else 0)
            elif num_recomputed:
                status, reason, num_reused = "computed", "recomputed", num_found
            else:
                status, reason = self._text_status(group.method, num_tokens, num_found)
                num_reused = num_found
            group.num_reused_tokens += num_reused
            group.num_recomputed_tokens += num_recomputed
            if source.document_id is None:
                continue
            group.documents.append(
                DocumentReuse(
                    document_id=source.document_id,
                    title=source.title,
                    chunk_index=source.chunk_index,
                    num_tokens=num_tokens,
                    status=status,
                    reason=reason,
                    num_reused_tokens=num_reused,
                    num_bytes=num_tokens * self._identity.bytes_per_token,
                    num_recomputed_tokens=num_recomputed,
                )
            )

    @staticmethod
    def _num_hidden(plan: ReusePlan, planned: PlannedSpan) -> int:
        """Count the tokens of the prompt that only this chunk sees."""
        before = [plan.spans[index] for index in planned.context]
        return sum(one.num_tokens for one in before if one.span.is_document)

    @staticmethod
    def _text_status(method: ReuseMethod, num_tokens: int, num_found: int) -> tuple[str, str]:
        if not num_tokens:
            return "computed", "empty"
        if not method.reuses_text:
            return "computed", f"not reused by {method.name}"
        return ("hit", "identical prefix") if num_found else ("miss", "no identical prefix")


def _by_source(spans: list[SpanState]) -> dict[int, list[SpanState]]:
    """Return the parts of each span of the plan, in order."""
    parts_of: dict[int, list[SpanState]] = {}
    for span in spans:
        parts_of.setdefault(span.source, []).append(span)
    return parts_of
