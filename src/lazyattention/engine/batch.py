# SPDX-License-Identifier: Apache-2.0
"""From the scheduler's step to flat arrays: token ids, positions, slots, and who looks at which KV."""

from dataclasses import dataclass, field

import numpy as np

from lazyattention.cache.chunk import Chunk
from lazyattention.engine.request import Sequence, SpanState
from lazyattention.engine.scheduler import Piece, Step
from lazyattention.ops import KVRange, Observer, RowGroup
from lazyattention.reuse import SpanUse

Scaling = tuple[float, float]
"""Temperature and bias of attention scores."""
UNSCALED: Scaling = (1.0, 0.0)


@dataclass(slots=True)
class Batch:
    """One forward pass.

    Attributes:
        token_ids: int64 `[num_tokens]`.
        positions: int64 `[num_tokens]`, what the model turns by.
        slot_mapping: int64 `[num_tokens]`.
        store_turns: int64 `[num_tokens]`, turn of each new key before it is stored; 0 = as it comes.
        ranges: KV ranges looked at.
        row_groups: Which tokens look at which range.
        sampled: Sequences whose next token is sampled.
        sample_rows: Their last token, index into the batch.
        copy_sources: int64 `[num_copies]`, slots to copy before the forward.
        copy_targets: int64 `[num_copies]`.
        copy_deltas: int64 `[num_copies]`, turn of each copied key.
        read_chunks: Stored chunks that are only read in this step.
        observer: Watches the layers of this forward pass, or None.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    store_turns: np.ndarray
    ranges: list[KVRange]
    row_groups: list[RowGroup]
    sampled: list[Sequence]
    sample_rows: list[int]
    copy_sources: np.ndarray
    copy_targets: np.ndarray
    copy_deltas: np.ndarray
    read_chunks: list[Chunk]
    observer: Observer | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch."""
        return len(self.token_ids)


@dataclass(slots=True)
class _Builder:
    block_size: int
    token_ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    slots: list[np.ndarray] = field(default_factory=list)
    store_turns: list[np.ndarray] = field(default_factory=list)
    ranges: list[KVRange] = field(default_factory=list)
    row_groups: list[RowGroup] = field(default_factory=list)
    chunk_ranges: dict[int, int] = field(default_factory=dict)
    read_chunks: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0

    def add_tokens(
        self, token_ids: "list[int] | tuple[int, ...]", first_position: int, block_ids: list[int], offset: int
    ) -> None:
        """Append tokens `offset ...` of a span whose first token stands (or is encoded) at `first_position`."""
        num_tokens = len(token_ids)
        index = np.arange(offset, offset + num_tokens)
        self.token_ids.append(np.asarray(token_ids, dtype=np.int64))
        self.positions.append(first_position + index)
        self.slots.append(slots_of(block_ids, index, self.block_size))
        self.store_turns.append(np.zeros(num_tokens, dtype=np.int64))

    def look_at(self, kv_range: KVRange, num_tokens: int, position_delta: int, scaling: Scaling = UNSCALED) -> None:
        """Let the batch's last `num_tokens` tokens look at a range."""
        self.ranges.append(kv_range)
        self._add_group(len(self.ranges) - 1, num_tokens, position_delta, scaling)

    def look_at_chunk(
        self, chunk: Chunk, num_tokens: int, position_delta: int, scaling: Scaling = UNSCALED, *, keys_turned: bool
    ) -> None:
        """Let the batch's last `num_tokens` tokens look at a whole chunk."""
        index = self.chunk_ranges.get(id(chunk))
        if index is None:
            self.ranges.append(
                KVRange(("chunk", id(chunk)), chunk.block_ids, chunk.num_tokens, chunk.base, keys_turned)
            )
            index = self.chunk_ranges[id(chunk)] = len(self.ranges) - 1
            if chunk.is_ready:
                self.read_chunks.append(chunk)
        self._add_group(index, num_tokens, position_delta, scaling)

    def look_at_run(self, span: SpanState, num_tokens: int, position_delta: int, scaling: Scaling) -> None:
        """Let the batch's last `num_tokens` tokens look at the part of a chunk that a span reads."""
        chunk = span.chunk
        assert chunk is not None
        if not span.is_part:
            self.look_at_chunk(chunk, num_tokens, position_delta, scaling, keys_turned=chunk.keys_turned)
            return
        key = ("run", id(chunk), span.chunk_start, len(span.token_ids))
        blocks = span.chunk_blocks(self.block_size)
        first_position = chunk.base + span.chunk_start
        kv_range = KVRange(key, blocks, len(span.token_ids), first_position, chunk.keys_turned)
        self.look_at(kv_range, num_tokens, position_delta, scaling)
        if chunk.is_ready:
            self.read_chunks.append(chunk)

    def _add_group(self, range_index: int, num_tokens: int, position_delta: int, scaling: Scaling) -> None:
        self.row_groups.append(RowGroup(range_index, self.num_tokens, num_tokens, position_delta, *scaling))


def build_batch(step: Step, block_size: int) -> Batch:
    """Lay out a step that has at least one piece.

    The text of a sequence sees every earlier span that is not hidden and, causally, its own. A chunk sees what it is
    encoded after, and itself.
    """
    builder = _Builder(block_size)
    sampled: list[Sequence] = []
    sample_rows: list[int] = []
    remaining = {
        id(piece.sequence): piece.sequence.num_remaining for piece in step.pieces if piece.sequence is not None
    }
    for piece in step.pieces:
        if piece.sequence is None:
            _add_chunk_piece(builder, piece)
        else:
            _add_sequence_piece(builder, piece, piece.sequence)
        builder.num_tokens += piece.num_tokens
        if piece.sequence is not None:
            remaining[id(piece.sequence)] -= piece.num_tokens
            if remaining[id(piece.sequence)] == 0 and piece.sequence.group.missing_evidence is None:
                sampled.append(piece.sequence)
                sample_rows.append(builder.num_tokens - 1)
    sources, targets, deltas = copies_of(step, block_size)
    return Batch(
        token_ids=np.concatenate(builder.token_ids),
        positions=np.concatenate(builder.positions),
        slot_mapping=np.concatenate(builder.slots),
        store_turns=np.concatenate(builder.store_turns),
        ranges=builder.ranges,
        row_groups=builder.row_groups,
        sampled=sampled,
        sample_rows=sample_rows,
        copy_sources=sources,
        copy_targets=targets,
        copy_deltas=deltas,
        read_chunks=builder.read_chunks,
    )


def _add_chunk_piece(builder: _Builder, piece: Piece) -> None:
    chunk = piece.chunk
    assert chunk is not None
    token_ids = chunk.token_ids[piece.offset : piece.offset + piece.num_tokens]
    builder.add_tokens(token_ids, chunk.base, chunk.block_ids, piece.offset)
    if not chunk.keys_turned:
        builder.store_turns[-1] = -builder.positions[-1]
    for before in chunk.context:
        builder.look_at_chunk(before, piece.num_tokens, 0, keys_turned=chunk.keys_turned)
    num_keys = piece.offset + piece.num_tokens
    if num_keys == chunk.num_tokens:
        builder.look_at_chunk(chunk, piece.num_tokens, 0, keys_turned=chunk.keys_turned)
    else:
        own = KVRange(("slice", id(chunk)), chunk.block_ids, num_keys, chunk.base, chunk.keys_turned)
        builder.look_at(own, piece.num_tokens, 0)


def _add_sequence_piece(builder: _Builder, piece: Piece, sequence: Sequence) -> None:
    span = sequence.spans[piece.span_index]
    token_ids = span.token_ids[piece.offset : piece.offset + piece.num_tokens]
    builder.add_tokens(token_ids, span.start, span.block_ids, piece.offset)
    for index, delta in spans_seen_from(sequence, piece.span_index):
        seen = sequence.spans[index]
        scaling = scaling_of(sequence, piece.span_index, index)
        if seen.chunk is not None and seen.use is SpanUse.SHARED:
            builder.look_at_run(seen, piece.num_tokens, delta, scaling)
        else:
            kv_range = KVRange((id(sequence), index), seen.block_ids, len(seen.token_ids), seen.start)
            builder.look_at(kv_range, piece.num_tokens, delta, scaling)
    num_keys = piece.offset + piece.num_tokens
    own = KVRange((id(sequence), piece.span_index, num_keys), span.block_ids, num_keys, span.start)
    builder.look_at(own, piece.num_tokens, 0)


def spans_seen_from(sequence: Sequence, span_index: int) -> list[tuple[int, int]]:
    """Return index and position_delta of every earlier span that one span's tokens see."""
    planned, span = sequence.group.plan.spans, sequence.spans[span_index]
    found = []
    if span.use is SpanUse.PRIVATE:
        # As when encoded apart, the chunk directly follows what it sees: that is moved up to it.
        ends_at = span.start
        for index in reversed(planned[span.source].context):
            seen = sequence.spans[index]
            ends_at -= len(seen.token_ids)
            found.append((index, ends_at - seen.start))
        return found[::-1]
    for index in range(span_index):
        seen = sequence.spans[index]
        if planned[seen.source].is_hidden:
            continue
        delta = 0
        if seen.use is SpanUse.SHARED:
            assert seen.chunk is not None
            delta = seen.start - seen.chunk_start - seen.chunk.base
        found.append((index, delta))
    return found


def scaling_of(sequence: Sequence, span_index: int, seen_index: int) -> Scaling:
    """Return temperature and bias of the scores of one span's tokens on an earlier span: text's on documents' chunks."""
    plan, seen = sequence.group.plan, sequence.spans[seen_index]
    is_text = sequence.spans[span_index].use is SpanUse.TEXT
    if is_text and seen.use is not SpanUse.TEXT and plan.spans[seen.source].span.is_document:
        return plan.options.chunk_temperature, plan.options.chunk_bias
    return UNSCALED


def copies_of(step: Step, block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return source slots, target slots and turns of everything that is copied before the forward."""
    copies = [_copy_slots(span, block_size) for span in step.copies]
    if not copies:
        return (np.empty(0, dtype=np.int64),) * 3
    sources, targets, deltas = (np.concatenate(arrays) for arrays in zip(*copies, strict=True))
    return sources, targets, deltas


def _copy_slots(span: SpanState, block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    assert span.chunk is not None
    index = np.arange(len(span.token_ids))
    sources = slots_of(span.chunk.block_ids, index, block_size)
    targets = slots_of(span.block_ids, index, block_size)
    return sources, targets, np.full(len(index), span.start - span.chunk.base, dtype=np.int64)


def slots_of(block_ids: list[int], index: np.ndarray, block_size: int) -> np.ndarray:
    """Return the slots of a span's consecutive tokens `index`."""
    first, last = int(index[0]) // block_size, int(index[-1]) // block_size
    blocks = np.asarray(block_ids[first : last + 1], dtype=np.int64)
    slots: np.ndarray = blocks[index // block_size - first] * block_size + index % block_size
    return slots
