# SPDX-License-Identifier: Apache-2.0
"""What both kernels' layouts share: the step as flat arrays, the numbers that shape a layout, and part numbering."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lazyattention.ops._tiles import TileShape

# Keys of a growing text have no end: kernels stop at the last key a row may see.
NO_END = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PlanArrays:
    """The step's row groups and KV ranges as flat arrays.

    Attributes:
        group_ranges: int64 `[num_groups]`, range of each group.
        group_starts: int64 `[num_groups]`, first query token.
        group_sizes: int64 `[num_groups]`, number of query tokens; at least 1.
        group_deltas: int64 `[num_groups]`, position_delta.
        range_tokens: int64 `[num_ranges]`, tokens of each range; at least 1 for every range a group names.
        range_firsts: int64 `[num_ranges]`, position at which token 0 was stored.
        range_turned: bool `[num_ranges]`, keys are stored turned.
        range_tables: int64 `[num_ranges]`, where the range's block table starts in `blocks`.
        range_slots: int64 `[num_ranges]`, first slot of the range if its blocks are consecutive in memory, else -1.
        blocks: int32, block tables of all ranges.
    """

    group_ranges: np.ndarray
    group_starts: np.ndarray
    group_sizes: np.ndarray
    group_deltas: np.ndarray
    range_tokens: np.ndarray
    range_firsts: np.ndarray
    range_turned: np.ndarray
    range_tables: np.ndarray
    range_slots: np.ndarray
    blocks: np.ndarray


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """What shapes a layout.

    Attributes:
        num_kv_heads: KV heads of the layer; every task runs once per KV head.
        group: Query heads per KV head; they are rows of a tile.
        block_size: Tokens per KV block; a power of two.
        sliding_window: Of the layer, tokens, or None.
        decode_few: Tiles of shared_decode over ranges whose rows fit into one of these.
        decode_many: Tiles of shared_decode over ranges with more rows.
        decode_unturned: Tiles of shared_decode over keys stored unturned.
        prefill: Tiles of chunk_prefill over keys stored turned.
        prefill_unturned: Likewise, unturned.
        num_programs: Programs the device runs at once.
        prefill_min_tokens: Query tokens from which a group goes to chunk_prefill.
        has_unmasked_prefill: There is a faster kernel for chunk_prefill's tiles without a mask in consecutive slots.
        causal_min_tokens: Sequences of new tokens from which causal_prefill takes them; 0 = never.
    """

    num_kv_heads: int
    group: int
    block_size: int
    sliding_window: int | None
    decode_few: TileShape
    decode_many: TileShape
    decode_unturned: TileShape
    prefill: TileShape
    prefill_unturned: TileShape
    num_programs: int
    prefill_min_tokens: int
    has_unmasked_prefill: bool = False
    causal_min_tokens: int = 0


class PartRows(Protocol):
    """Rows whose partial states need numbers: `row_tokens[i]` has `row_parts[i]` of them.

    A row alone on its token with one part may write the output itself; it is asked by `settle`, told how often each
    token occurs, and answers with its final part counts. `place` then receives the first part of each row.
    """

    row_tokens: np.ndarray

    def settle(self, rows_per_token: np.ndarray) -> np.ndarray: ...

    def place(self, first_parts: np.ndarray) -> None: ...


def number_parts(num_tokens: int, layouts: Sequence[PartRows]) -> tuple[int, np.ndarray, np.ndarray]:
    """Number partial states so that those of one token are consecutive.

    Returns:
        Number of parts; tokens to merge (those with parts, and those no row belongs to, whose output is 0); first part
        of each merge, with the end of the last one appended.
    """
    layouts = [layout for layout in layouts if len(layout.row_tokens)]
    tokens = _concatenate([layout.row_tokens for layout in layouts])
    order = None if (tokens[1:] >= tokens[:-1]).all() else stable_order(tokens, num_tokens)
    # Rows of all tokens before each and of them all, then likewise parts, once of all rows and once of all tokens.
    row_bounds = (tokens if order is None else tokens[order]).searchsorted(np.arange(num_tokens + 1))
    rows_per_token = row_bounds[1:] - row_bounds[:-1]
    parts = [layout.settle(rows_per_token) for layout in layouts]
    row_parts = _concatenate(parts)
    bounds = np.zeros(len(tokens) + 1, np.int64)
    (row_parts if order is None else row_parts[order]).cumsum(out=bounds[1:])
    first_parts = bounds[:-1]
    if order is not None:
        first_parts = np.empty_like(first_parts)
        first_parts[order] = bounds[:-1]
    start = 0
    for layout, counts in zip(layouts, parts, strict=True):
        layout.place(first_parts[start : start + len(counts)])
        start += len(counts)
    token_bounds = bounds[row_bounds]
    has_parts = token_bounds[1:] > token_bounds[:-1]
    merge_tokens = (has_parts | (rows_per_token == 0)).nonzero()[0]
    merge_starts = np.zeros(len(merge_tokens) + 1, np.int64)
    merge_starts[1:] = token_bounds[merge_tokens + 1]
    return int(merge_starts[-1]), merge_tokens, merge_starts


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return int64 arrays after each other; a single one as it is."""
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.int64), *arrays])


def concatenated_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return `start, start + 1, ...` (`count` of them) for every pair, one after the other."""
    ends = counts.cumsum()
    values = np.repeat(starts - ends + counts, counts)
    values += np.arange(len(values))
    return values


def stable_order(keys: np.ndarray, end: int) -> np.ndarray:
    """Return the stable order of keys in `[0, end)`; numpy sorts 16-bit keys by digits, about ten times as fast."""
    return np.argsort(keys.astype(np.uint16) if end <= 1 << 16 else keys, kind="stable")
