# SPDX-License-Identifier: Apache-2.0
"""The kernels' way from the scheduler's step to a batch: what stays between steps is kept, not laid out anew.

What batch.py says about who sees whom holds here too; it is asked there. While the same sequences decode, a step costs a
few list entries per sequence, however many documents each of them reads.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from lazyattention.cache.chunk import Chunk
from lazyattention.engine.batch import Batch, copies_of, slots_of, spans_seen_from
from lazyattention.engine.request import RequestStatus, Sequence, SpanState
from lazyattention.engine.scheduler import Piece, Step
from lazyattention.ops.plan import AttentionPlan
from lazyattention.ops.plan_builder import HostStep, PlanBuilder, RequestRows
from lazyattention.reuse import SpanUse

# Ranges that nothing refers to are looked for when so many are new since the last time.
_SWEEP_AFTER = 512


@dataclass(slots=True)
class PlannedBatch(Batch):
    """A batch whose plan's arrays are there already; `ranges` and `row_groups` stay empty.

    Attributes:
        host_step: The arrays.
        query_lens: int64 `[num_pieces]`, consecutive tokens that see the same ranges.
    """

    host_step: HostStep | None = None
    query_lens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(slots=True, eq=False)
class _Range:
    """A chunk or span whose block table the plan builder has. It keeps its owner alive, so that `id(owner)` stays its own."""

    owner: Chunk | SpanState
    range_id: int
    num_tokens: int
    num_blocks: int


@dataclass(slots=True, eq=False)
class _Decoding:
    """What the next tokens of a sequence's last span look at."""

    sequence: Sequence
    span: SpanState
    rows: RequestRows
    own: _Range
    seen: list[_Range]


class StepPlanner:
    """Builds batches for the kernels. Owned by the model runner; one engine's thread calls it."""

    def __init__(self, *, num_blocks: int, block_size: int, device: torch.device, track_reads: bool = False) -> None:
        """Know of nothing yet.

        Args:
            num_blocks: Blocks of the KV pool.
            block_size: Tokens per block.
            device: Where plans go.
            track_reads: Fill in `read_chunks`, for checksums.
        """
        self._block_size = block_size
        self._track_reads = track_reads
        # Tables are padded to powers of two and texts shared by requests are listed for each.
        table_entries = max(1 << 16, 1 << (4 * num_blocks - 1).bit_length())
        self._plans = PlanBuilder(block_size=block_size, device=device, table_entries=table_entries)
        self._ranges: dict[Hashable, _Range] = {}
        self._decoding: dict[int, _Decoding] = {}
        self._num_after_sweep = 0

    @property
    def blocks(self) -> torch.Tensor:
        """Block tables on the device; the tensor may be another one after a step."""
        return self._plans.blocks

    def plan(self, host_step: HostStep) -> AttentionPlan:
        """Return the plan of a step, for a run without a graph."""
        return self._plans.plan(host_step)

    def empty_step(self, num_tokens: int) -> HostStep:
        """Return a step whose tokens see and store nothing, for warming up."""
        nothing = RequestRows(np.empty(0, np.int64), np.empty(0, np.int64))
        positions = np.arange(num_tokens)
        return self._plans.step([nothing], np.array([num_tokens]), positions, np.full(num_tokens, -1))

    def leave_out_causal(self) -> None:
        """Plan without causal_prefill from now on."""
        self._plans.for_causal = False

    def cold_step(self, num_tokens: int) -> HostStep:
        """Return a step with one text of which nothing is stored, for warming up; its KV goes to the first blocks."""
        range_id = self._plans.add_range(range(-(-num_tokens // self._block_size)), num_tokens, 0)
        text = RequestRows(np.array([range_id]), np.zeros(1, np.int64))
        positions = np.arange(num_tokens)
        step = self._plans.step([text], np.array([num_tokens]), positions, positions)
        self._plans.drop_range(range_id)
        return step

    def build(self, step: Step) -> PlannedBatch:
        """Lay out a step that has at least one piece; as `batch.build_batch`."""
        parts = _Parts()
        remaining: dict[int, int] = {}
        for piece in step.pieces:
            sequence = piece.sequence
            if sequence is None:
                self._add_chunk_piece(parts, piece)
                continue
            if sequence.is_decoding:
                self._add_decode(parts, piece, sequence)
                parts.sampled.append(sequence)
                parts.sample_rows.append(parts.num_tokens - 1)
                continue
            self._add_prefill_piece(parts, piece, sequence)
            left = remaining.get(id(sequence), sequence.num_remaining) - piece.num_tokens
            remaining[id(sequence)] = left
            if left == 0 and sequence.group.missing_evidence is None:
                parts.sampled.append(sequence)
                parts.sample_rows.append(parts.num_tokens - 1)
        query_lens = np.array(parts.query_lens)
        positions, slots = np.array(parts.positions), np.array(parts.slots)
        store_turns = np.zeros(len(positions), np.int64)
        for start, turns in parts.store_turns:
            store_turns[start : start + len(turns)] = turns
        host_step = self._plans.step(
            parts.rows, query_lens, positions, slots, store_turns=store_turns if parts.store_turns else None
        )
        sources, targets, deltas = copies_of(step, self._block_size)
        batch = PlannedBatch(
            token_ids=np.array(parts.token_ids),
            positions=positions,
            slot_mapping=slots,
            store_turns=store_turns,
            ranges=[],
            row_groups=[],
            sampled=parts.sampled,
            sample_rows=parts.sample_rows,
            copy_sources=sources,
            copy_targets=targets,
            copy_deltas=deltas,
            read_chunks=self._read_chunks(parts) if self._track_reads else [],
            host_step=host_step,
            query_lens=query_lens,
        )
        if len(self._ranges) > self._num_after_sweep + _SWEEP_AFTER:
            self.forget()
        return batch

    def plan_ahead(self, batch: PlannedBatch, running: Iterable[Sequence]) -> HostStep | None:
        """Assemble the step after `batch` if all that run and do not end by their length decode one token each in it.

        Args:
            batch: The last step; its tokens count as computed.
            running: All running sequences, in the order in which they are scheduled.

        Returns:
            None if some sequence has more to compute than that, or the layout is that of the last step.
        """
        sampled = {id(sequence) for sequence in batch.sampled}
        rows: list[RequestRows] = []
        positions: list[int] = []
        for sequence in running:
            if id(sequence) not in sampled:
                return None
            if len(sequence.output_token_ids) + 1 >= sequence.max_tokens:
                continue
            known = self._decoding_of(sequence)
            index = known.span.num_computed
            self._extend(known.own, index + 1, known.span.block_ids)
            rows.append(known.rows)
            positions.append(known.span.start + index)
        return self._plans.step_ahead(rows, np.array(positions)) if rows else None

    # Pieces ----------------------------------------------------------------------------------------------------------

    def _add_decode(self, parts: "_Parts", piece: Piece, sequence: Sequence) -> None:
        known, span, index = self._decoding_of(sequence), sequence.spans[-1], piece.offset
        self._extend(known.own, index + 1, span.block_ids)
        block, inside = divmod(index, self._block_size)
        parts.add(
            known.rows,
            known.seen,
            (span.token_ids[index],),
            (span.start + index,),
            (span.block_ids[block] * self._block_size + inside,),
        )

    def _decoding_of(self, sequence: Sequence) -> _Decoding:
        span = sequence.spans[-1]
        known = self._decoding.get(id(span))
        if known is None:
            seen, deltas = self._seen_by(sequence, len(sequence.spans) - 1)
            max_tokens = len(span.token_ids) + sequence.max_tokens
            own = self._range_of_span(span, span.num_computed, max_tokens=max_tokens)
            known = _Decoding(sequence, span, _rows([*seen, own], [*deltas, 0]), own, seen)
            self._decoding[id(span)] = known
        return known

    def _add_prefill_piece(self, parts: "_Parts", piece: Piece, sequence: Sequence) -> None:
        span = sequence.spans[piece.span_index]
        seen, deltas = self._seen_by(sequence, piece.span_index)
        num_keys = piece.offset + piece.num_tokens
        is_last = piece.span_index == len(sequence.spans) - 1
        own = self._range_of_span(span, num_keys, max_tokens=len(span.token_ids) + sequence.max_tokens * is_last)
        parts.add(
            _rows([*seen, own], [*deltas, 0]),
            seen,
            span.token_ids[piece.offset : num_keys],
            range(span.start + piece.offset, span.start + num_keys),
            slots_of(span.block_ids, np.arange(piece.offset, num_keys), self._block_size).tolist(),
        )

    def _add_chunk_piece(self, parts: "_Parts", piece: Piece) -> None:
        chunk = piece.chunk
        assert chunk is not None
        num_keys = piece.offset + piece.num_tokens
        seen = [self._range_of_chunk(before, before.num_tokens) for before in chunk.context]
        own = self._range_of_chunk(chunk, num_keys)
        positions = range(chunk.base + piece.offset, chunk.base + num_keys)
        if not chunk.keys_turned:
            parts.store_turns.append((parts.num_tokens, -np.array(positions)))
        parts.add(
            _rows([*seen, own], [0] * (len(seen) + 1)),
            seen,
            chunk.token_ids[piece.offset : num_keys],
            positions,
            slots_of(chunk.block_ids, np.arange(piece.offset, num_keys), self._block_size).tolist(),
        )

    # Ranges ----------------------------------------------------------------------------------------------------------

    def _seen_by(self, sequence: Sequence, span_index: int) -> tuple[list[_Range], list[int]]:
        """Return the ranges of all earlier spans that one span's tokens see, and their deltas; empty ones left out."""
        ranges: list[_Range] = []
        deltas: list[int] = []
        for index, delta in spans_seen_from(sequence, span_index):
            span = sequence.spans[index]
            if not span.token_ids:
                continue
            if span.use is SpanUse.SHARED:
                assert span.chunk is not None
                ranges.append(self._range_of_run(span, span.chunk))
            else:
                ranges.append(self._range_of_span(span, len(span.token_ids)))
            deltas.append(delta)
        return ranges, deltas

    def _range_of_chunk(self, chunk: Chunk, num_tokens: int) -> _Range:
        known = self._ranges.get(id(chunk))
        if known is None:
            range_id = self._plans.add_range(
                chunk.block_ids, num_tokens, chunk.base, keys_turned=chunk.keys_turned, max_tokens=chunk.num_tokens
            )
            known = self._ranges[id(chunk)] = _Range(chunk, range_id, num_tokens, len(chunk.block_ids))
        elif known.num_tokens != num_tokens:
            self._plans.grow_range(known.range_id, num_tokens)
            known.num_tokens = num_tokens
        return known

    def _range_of_run(self, span: SpanState, chunk: Chunk) -> _Range:
        """Return the range of the part of a chunk that a span reads; other requests that read the same part share it."""
        num_tokens = len(span.token_ids)
        if not span.is_part:
            return self._range_of_chunk(chunk, num_tokens)
        key = (id(chunk), span.chunk_start, num_tokens)
        known = self._ranges.get(key)
        if known is None:
            blocks = span.chunk_blocks(self._block_size)
            first_position = chunk.base + span.chunk_start
            range_id = self._plans.add_range(blocks, num_tokens, first_position, keys_turned=chunk.keys_turned)
            known = self._ranges[key] = _Range(chunk, range_id, num_tokens, len(blocks))
        return known

    def _range_of_span(self, span: SpanState, num_tokens: int, *, max_tokens: int = 0) -> _Range:
        known = self._ranges.get(id(span))
        if known is None:
            range_id = self._plans.add_range(span.block_ids, num_tokens, span.start, max_tokens=max_tokens)
            known = self._ranges[id(span)] = _Range(span, range_id, num_tokens, len(span.block_ids))
        else:
            self._extend(known, num_tokens, span.block_ids)
        return known

    def _extend(self, known: _Range, num_tokens: int, block_ids: list[int]) -> None:
        """Tell of a span's new length, and of blocks it got since."""
        if known.num_tokens == num_tokens and known.num_blocks == len(block_ids):
            return
        self._plans.grow_range(known.range_id, num_tokens, block_ids[known.num_blocks :])
        known.num_tokens, known.num_blocks = num_tokens, len(block_ids)

    def forget(self) -> None:
        """Between steps: drop what no running sequence decodes over; what is needed after all comes back by itself."""
        self._decoding = {
            key: entry
            for key, entry in self._decoding.items()
            if entry.sequence.status is RequestStatus.RUNNING
            and entry.sequence.spans
            and entry.sequence.spans[-1] is entry.span
        }
        used = {id(r) for entry in self._decoding.values() for r in (entry.own, *entry.seen)}
        for key, known in list(self._ranges.items()):
            if id(known) not in used:
                self._plans.drop_range(known.range_id)
                del self._ranges[key]
        self._num_after_sweep = len(self._ranges)

    def _read_chunks(self, parts: "_Parts") -> list[Chunk]:
        seen = {id(r): r.owner for ranges in parts.seen for r in ranges}
        return [owner for owner in seen.values() if isinstance(owner, Chunk) and owner.is_ready]


@dataclass(slots=True)
class _Parts:
    """A batch under construction."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    store_turns: list[tuple[int, np.ndarray]] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    rows: list[RequestRows] = field(default_factory=list)
    seen: list[list[_Range]] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def add(
        self,
        rows: RequestRows,
        seen: list[_Range],
        token_ids: Iterable[int],
        positions: Iterable[int],
        slots: Iterable[int],
    ) -> None:
        num_before = len(self.token_ids)
        self.token_ids += token_ids
        self.positions += positions
        self.slots += slots
        self.rows.append(rows)
        self.seen.append(seen)
        self.query_lens.append(len(self.token_ids) - num_before)


def _rows(ranges: Iterable[_Range], deltas: list[int]) -> RequestRows:
    return RequestRows(np.array([known.range_id for known in ranges], np.int64), np.array(deltas, np.int64))
