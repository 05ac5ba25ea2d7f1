# SPDX-License-Identifier: Apache-2.0
"""Who runs in the next step, and how many tokens of whom. No tensors here.

Order of a step: decodes, then prefill of running sequences (their cold chunks first), then admissions. Tokens of a span
may be computed in the same step as everything they look at, since each layer stores keys and values before it attends.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from lazyattention.cache.chunk import Chunk
from lazyattention.cache.manager import CacheManager
from lazyattention.config import SchedulerConfig
from lazyattention.engine.admission import Admission
from lazyattention.engine.request import RequestStatus, Sequence, SpanState
from lazyattention.errors import CapacityError, LazyAttentionError, RequestError
from lazyattention.reuse import SpanUse
from lazyattention.reuse.recompute import Evidence

# Waiting sequences looked at per step once one of them does not fit.
_MAX_ADMISSION_TRIES = 16


@dataclass(slots=True)
class Piece:
    """Consecutive tokens of one span to compute in this step.

    Attributes:
        sequence: Whose span it is; None for a chunk that is encoded for all who wait for it.
        span_index: Which of the sequence's spans.
        chunk: The chunk that is encoded.
        offset: First token, index into the span or chunk.
        num_tokens: How many.
    """

    sequence: Sequence | None
    span_index: int
    chunk: Chunk | None
    offset: int
    num_tokens: int


@dataclass(slots=True)
class Step:
    """What one forward pass does.

    Attributes:
        budget: Tokens that may still be added.
        pieces: Work, in an order in which nothing looks at what comes later.
        copies: Spans whose stored chunk is copied (and turned) before the forward.
        chunk_tokens: Tokens of each chunk computed in this step.
        failed: Sequences that ended without running, and why.
    """

    budget: int
    pieces: list[Piece] = field(default_factory=list)
    copies: list[SpanState] = field(default_factory=list)
    chunk_tokens: dict[Chunk, int] = field(default_factory=dict)
    failed: list[tuple[Sequence, LazyAttentionError]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(piece.num_tokens for piece in self.pieces)

    def completes(self, chunk: Chunk) -> bool:
        """True if all of the chunk's KV exists once this step is done."""
        return chunk.num_computed + self.chunk_tokens.get(chunk, 0) == chunk.num_tokens


class Scheduler:
    """Holds waiting and running sequences; the cache manager holds their blocks."""

    def __init__(self, cache: CacheManager, admission: Admission, config: SchedulerConfig) -> None:
        """Nothing waits and nothing runs."""
        self._cache = cache
        self._admission = admission
        self._config = config
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """True while anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for admission.

        Raises:
            RequestError: It can never fit into the pool.
        """
        needed = self._admission.num_blocks_ever(sequence.group, sequence.max_tokens)
        if needed > self._cache.pool.num_blocks:
            raise RequestError(
                f"the request needs {needed} KV blocks of {self._cache.block_size} tokens (prompt "
                f"{sequence.group.layout.num_tokens} tokens, max_tokens {sequence.max_tokens}) and can never fit: the "
                f"pool has {self._cache.pool.num_blocks}; shorten it, lower max_tokens, or raise kv_memory_bytes"
            )
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """Choose the next step's work; it may be empty."""
        step = Step(self._config.max_num_batched_tokens)
        for sequence in list(self.running):
            if sequence.status is RequestStatus.RUNNING and sequence.is_decoding and step.budget:
                self._schedule_decode(sequence, step)
        for sequence in list(self.running):
            if sequence.status is RequestStatus.RUNNING and not sequence.is_decoding:
                self._schedule_prefill(sequence, step)
        self._admit(step)
        return step

    def advance(self, step: Step) -> None:
        """Note that the step's tokens were computed, and keep what others can use."""
        for chunk, num_tokens in step.chunk_tokens.items():
            chunk.num_computed += num_tokens
            if chunk.is_ready:
                self._cache.chunk_is_ready(chunk)
        for piece in step.pieces:
            if piece.sequence is not None:
                piece.sequence.spans[piece.span_index].num_computed += piece.num_tokens
        for sequence in {id(p.sequence): p.sequence for p in step.pieces if p.sequence is not None}.values():
            if sequence.chain is not None:
                sequence.chain.keep(sequence.spans)

    def finish(self, sequence: Sequence) -> None:
        """End a waiting or running sequence and give back all it holds."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_back(sequence)
        sequence.status = RequestStatus.FINISHED

    def restart(self, sequence: Sequence) -> None:
        """Let a running sequence give back all it holds; it is admitted anew before all others."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.status = RequestStatus.WAITING
        self.waiting.insert(0, sequence)

    # One sequence's work ---------------------------------------------------------------------------------------------

    def _schedule_decode(self, sequence: Sequence, step: Step) -> None:
        span = sequence.spans[-1]
        if len(span.token_ids) > len(span.block_ids) * self._cache.block_size and not self._grow(sequence, step):
            return
        index = len(sequence.spans) - 1
        step.pieces.append(Piece(sequence, index, None, span.num_computed, 1))
        step.budget -= 1

    def _grow(self, sequence: Sequence, step: Step) -> bool:
        """Give the sequence's last span one more block, taking blocks from the youngest others if needed."""
        span = sequence.spans[-1]
        while not self._cache.can_allocate(1):
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                if sequence.chain is not None and sequence.chain.let_go():
                    continue
                step.failed.append((sequence, CapacityError(self._no_room_message())))
                self.finish(sequence)
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        span.block_ids += self._cache.allocate(1, after=span.block_ids[-1] if span.block_ids else None)
        return True

    def _schedule_prefill(self, sequence: Sequence, step: Step) -> None:
        """Schedule the sequence's cold chunks and then its own tokens, as far as budget and dependencies allow."""
        needs_chunks_only = sequence.group.missing_evidence is Evidence.KV_DEVIATION
        complete: list[bool] = []
        for index, span in enumerate(sequence.spans):
            if not step.budget:
                return
            is_complete = True
            if span.chunk is not None and not step.completes(span.chunk):
                self._schedule_chunk(span.chunk, step)
                is_complete = step.completes(span.chunk)
            if span.use is SpanUse.COPIED and span.num_remaining:
                assert span.chunk is not None
                if span.chunk.is_ready:
                    step.copies.append(span)
                    span.num_computed = len(span.token_ids)
                else:
                    is_complete = False
            elif span.num_remaining and not needs_chunks_only:
                context = sequence.group.plan.spans[span.source].context
                may_run = all(complete if span.use is SpanUse.TEXT else [complete[before] for before in context])
                num_tokens = min(step.budget, span.num_remaining) if may_run else 0
                if num_tokens:
                    step.pieces.append(Piece(sequence, index, None, span.num_computed, num_tokens))
                    step.budget -= num_tokens
                is_complete = num_tokens == span.num_remaining
            complete.append(is_complete)

    def _schedule_chunk(self, chunk: Chunk, step: Step) -> None:
        """Schedule the next slice of a chunk, once per step, whoever asks first, and before it what it is encoded after."""
        for before in chunk.context:
            if not step.completes(before):
                self._schedule_chunk(before, step)
        if chunk in step.chunk_tokens or not all(map(step.completes, chunk.context)):
            return
        num_tokens = min(step.budget, chunk.num_tokens - chunk.num_computed)
        if num_tokens:
            step.pieces.append(Piece(None, 0, chunk, chunk.num_computed, num_tokens))
            step.chunk_tokens[chunk] = num_tokens
            step.budget -= num_tokens

    # Admission and preemption ----------------------------------------------------------------------------------------

    def _admit(self, step: Step) -> None:
        overtaken: list[Sequence] = []
        for sequence in self._admissible():
            if not step.budget or len(self.running) >= self._config.max_num_seqs:
                break
            if any(older.num_skipped >= self._config.max_skipped for older in overtaken):
                break
            if self._admission.admit(sequence):
                self.waiting.remove(sequence)
                sequence.status = RequestStatus.RUNNING
                self.running.append(sequence)
                if sequence.group.timings.first_scheduled_s is None:
                    sequence.group.timings.first_scheduled_s = time.monotonic()
                for older in overtaken:
                    older.num_skipped += 1
                self._schedule_prefill(sequence, step)
                continue
            if not self.running:
                # Nothing runs and everything unused was counted as free: waiting cannot help.
                self.waiting.remove(sequence)
                sequence.status = RequestStatus.FINISHED
                step.failed.append((sequence, CapacityError(self._no_room_message())))
                continue
            overtaken.append(sequence)
            if len(overtaken) >= _MAX_ADMISSION_TRIES:
                break

    def _admissible(self) -> Iterator[Sequence]:
        for sequence in list(self.waiting):
            if not sequence.is_waiting_for_sibling:
                yield sequence

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it waits first in line and recomputes what is not stored any more."""
        self.restart(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _give_back(self, sequence: Sequence) -> None:
        self._admission.release(sequence.spans, sequence.chain)
        sequence.spans, sequence.chain = [], None

    def _no_room_message(self) -> str:
        pool = self._cache.pool
        return (
            f"no room for the request: of {pool.num_blocks} KV blocks {self._cache.num_pinned_blocks} are pinned and "
            f"{pool.num_free} free; unpin documents, wait for other requests, or raise kv_memory_bytes"
        )
