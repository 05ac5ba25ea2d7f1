# SPDX-License-Identifier: Apache-2.0
"""Host layout of chunk_prefill: query tiles of one request against key tiles of all its ranges.

Key tiles are sorted by the position of their keys, so what a query tile sees without a mask is one run of them.
"""

import functools
from dataclasses import dataclass, field

import numpy as np

from lazyattention.ops._layout import LayoutSpec, PlanArrays, concatenated_ranges
from lazyattention.ops._tiles import TileShape

# What starting a program and writing its result costs, in key tiles.
_PROGRAM_TILES = 1.5
_MAX_PARTS = 64
# Fewer tiles than this are not worth a task, and a partial state, of their own.
_MIN_APART_TILES = 4
# With more of its tiles in scattered blocks than this share, a run is left to the kernel that gathers.
_MAX_SCATTERED = 0.25


@dataclass(frozen=True, slots=True)
class TaskList:
    """Tasks int64 `[num_tasks, 10]`, and the query tile of each, int64 `[num_tasks]`."""

    tasks: np.ndarray
    q_tiles: np.ndarray


@dataclass(slots=True)
class PrefillLayout:
    """Tasks and tiles as `device_plan` describes them.

    Attributes:
        row_tokens: int64 `[num_rows]`, query token of each row.
        tile_rows: int64 `[num_q_tiles + 1]`, first row of each query tile.
        tile_parts: int64 `[num_q_tiles]`, parts of each query tile.
        tasks: Tasks of the kernel that does everything, and the query tile of each.
        apart: Tasks of the kernel for tiles without a mask, likewise.
        tiles: int64 `[num_tiles, 8]`.
        segments: int64 `[num_segments + 1]`.
        masked: int64.
        part_bases: int64 `[num_rows]`.
        is_contiguous: All tiles without a mask lie in consecutive slots.
    """

    row_tokens: np.ndarray
    tile_rows: np.ndarray
    tile_parts: np.ndarray
    tasks: TaskList
    apart: TaskList
    tiles: np.ndarray
    segments: np.ndarray
    masked: np.ndarray
    is_contiguous: bool
    part_bases: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def settle(self, rows_per_token: np.ndarray) -> np.ndarray:
        """Return parts per row: none where a query tile is all its tokens have and writes the output itself."""
        if len(self.tile_parts) == 0:
            return np.empty(0, np.int64)
        alone = np.maximum.reduceat(rows_per_token[self.row_tokens], self.tile_rows[:-1]) == 1
        is_direct = alone & (self.tile_parts == 1)
        for task_list in (self.tasks, self.apart):
            task_list.tasks[is_direct[task_list.q_tiles], 9] = -1
        parts = np.where(is_direct, 0, self.tile_parts)
        return np.repeat(parts, np.diff(self.tile_rows))

    def place(self, first_parts: np.ndarray) -> None:
        """Take the number of each row's first part."""
        self.part_bases = first_parts


@dataclass(slots=True)
class _Run:
    """Consecutive tokens that look at the same ranges: their query tiles and key tiles."""

    tiles: np.ndarray  # [num_full + num_tails, 8]
    num_full: int
    is_contiguous: bool
    q_tiles: np.ndarray  # [num_q_tiles, 4]: token_start, num_tokens, first and end of tiles without a mask
    masked_counts: np.ndarray  # [num_q_tiles]
    masked: np.ndarray  # tiles of this run


def lay_out_prefill(
    arrays: PlanArrays, chosen: np.ndarray | slice, positions: np.ndarray, spec: LayoutSpec, keys_turned: bool
) -> PrefillLayout:
    """Lay out the chosen groups."""
    shape = spec.prefill if keys_turned else spec.prefill_unturned
    starts, sizes = arrays.group_starts[chosen], arrays.group_sizes[chosen]
    if len(starts) == 0:
        return _empty()
    groups = np.arange(len(arrays.group_sizes))[chosen]
    order = np.lexsort((sizes, starts))
    groups, starts, sizes = groups[order], starts[order], sizes[order]
    borders = np.flatnonzero((np.diff(starts) != 0) | (np.diff(sizes) != 0)) + 1
    runs = [_lay_out_run(arrays, run_groups, positions, spec, shape) for run_groups in np.split(groups, borders)]

    tile_offsets = np.cumsum([0] + [len(run.tiles) for run in runs])
    tiles = np.concatenate([run.tiles for run in runs])
    q_tiles = np.concatenate([run.q_tiles for run in runs])
    tiles_per_run = [len(run.q_tiles) for run in runs]
    q_tiles[:, 2:] += np.repeat(tile_offsets[:-1], tiles_per_run)[:, None]
    masked_counts = np.concatenate([run.masked_counts for run in runs])
    masked = np.concatenate([run.masked + offset for run, offset in zip(runs, tile_offsets, strict=False)])
    # A segment ends where the delta changes, at the end of a run's tiles without a mask, and at the end of the run.
    changes = np.flatnonzero(np.diff(tiles[:, 5])) + 1
    full_ends = tile_offsets[:-1] + np.array([run.num_full for run in runs])
    segments = np.unique(np.concatenate(([0, len(tiles)], changes, full_ends, tile_offsets)))
    is_contiguous = all(run.is_contiguous for run in runs)
    may_be_apart = spec.has_unmasked_prefill and is_contiguous and keys_turned
    tasks, apart, tile_parts = _cut(q_tiles, masked_counts, segments, spec, may_be_apart)
    return PrefillLayout(
        row_tokens=concatenated_ranges(q_tiles[:, 0], q_tiles[:, 1]),
        tile_rows=np.concatenate(([0], np.cumsum(q_tiles[:, 1]))),
        tile_parts=tile_parts,
        tasks=tasks,
        apart=apart,
        tiles=tiles,
        segments=segments,
        masked=masked,
        is_contiguous=is_contiguous,
    )


@functools.cache
def _empty() -> PrefillLayout:
    nothing = np.empty(0, np.int64)
    no_tasks = TaskList(np.empty((0, 10), np.int64), nothing)
    return PrefillLayout(
        nothing, np.zeros(1, np.int64), nothing, no_tasks, no_tasks, np.empty((0, 8), np.int64), nothing, nothing, True
    )


def _lay_out_run(
    arrays: PlanArrays, groups: np.ndarray, positions: np.ndarray, spec: LayoutSpec, shape: TileShape
) -> _Run:
    full, tails, is_contiguous = _key_tiles(arrays, groups, shape.tile_kv, spec)
    start, size = int(arrays.group_starts[groups[0]]), int(arrays.group_sizes[groups[0]])
    tokens_per_tile = max(1, shape.tile_m // spec.group)
    firsts = np.arange(0, size, tokens_per_tile)
    num_tokens = np.minimum(tokens_per_tile, size - firsts)
    low = positions[start] + firsts  # first and last position of each query tile
    high = low + num_tokens - 1

    tile = shape.tile_kv
    stands, tail_stands = full[:, 3], tails[:, 3]
    seen_end = np.searchsorted(stands, high, side="right")
    full_end = np.searchsorted(stands + tile - 1, low, side="right")
    tail_end = np.searchsorted(tail_stands, high, side="right")
    seen_start = full_start = tail_start = np.zeros_like(low)
    if spec.sliding_window is not None:
        nearest = low - spec.sliding_window + 1
        seen_start = np.searchsorted(stands + tile - 1, nearest, side="left")
        full_start = np.searchsorted(stands, high - spec.sliding_window + 1, side="left")
        # Tails are shorter than a tile; one too many is only masked away.
        tail_start = np.minimum(np.searchsorted(tail_stands + tile - 1, nearest, side="left"), tail_end)
        seen_start = np.minimum(seen_start, seen_end)
        none_full = full_start > full_end
        full_start, full_end = np.where(none_full, seen_end, full_start), np.where(none_full, seen_end, full_end)
    range_starts = np.stack((tail_start + len(full), seen_start, full_end), axis=1)
    range_counts = np.stack((tail_end - tail_start, full_start - seen_start, seen_end - full_end), axis=1)
    return _Run(
        tiles=np.concatenate((full, tails)),
        num_full=len(full),
        is_contiguous=is_contiguous,
        q_tiles=np.stack((start + firsts, num_tokens, full_start, full_end), axis=1),
        masked_counts=range_counts.sum(1),
        masked=concatenated_ranges(range_starts.reshape(-1), range_counts.reshape(-1)),
    )


def _key_tiles(
    arrays: PlanArrays, groups: np.ndarray, tile: int, spec: LayoutSpec
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return whole tiles and tails of the groups' ranges, by position, and whether whole ones are contiguous.

    Tails need a mask. Where there is a kernel for contiguous tiles, a few whole ones that are not count as tails, too.
    """
    block_size = spec.block_size
    ranges, deltas = arrays.group_ranges[groups], arrays.group_deltas[groups]
    num_keys, tables = arrays.range_tokens[ranges], arrays.range_tables[ranges]
    first_stands = arrays.range_firsts[ranges] + deltas
    num_full, tail_lens = num_keys // tile, num_keys % tile

    def tiles_at(group: np.ndarray, key_starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
        first_blocks = tables[group] + key_starts // block_size
        tiles = np.zeros((len(group), 8), np.int64)
        tiles[:, 0] = arrays.blocks[first_blocks] * np.int64(block_size) + key_starts % block_size
        tiles[:, 1] = tables[group]
        tiles[:, 2] = key_starts
        tiles[:, 3] = first_stands[group] + key_starts
        tiles[:, 4] = lens
        tiles[:, 5] = deltas[group]
        return tiles[np.argsort(tiles[:, 3], kind="stable")]

    group = np.repeat(np.arange(len(groups)), num_full)
    key_starts = concatenated_ranges(np.zeros_like(num_full), num_full) * tile
    full = tiles_at(group, key_starts, np.full(len(group), tile))
    with_tail = np.flatnonzero(tail_lens)
    tails = tiles_at(with_tail, num_full[with_tail] * tile, tail_lens[with_tail])
    blocks_per_tile = tile // block_size
    if blocks_per_tile <= 1 or len(full) == 0:
        return full, tails, True
    first_blocks = full[:, 1] + full[:, 2] // block_size
    blocks = arrays.blocks[first_blocks[:, None] + np.arange(blocks_per_tile)]
    is_scattered = (np.diff(blocks, axis=1) != 1).any(1)
    num_scattered = int(is_scattered.sum())
    if num_scattered and spec.has_unmasked_prefill and num_scattered <= _MAX_SCATTERED * len(full):
        tails = np.concatenate((tails, full[is_scattered]))
        return full[~is_scattered], tails[np.argsort(tails[:, 3], kind="stable")], True
    return full, tails, num_scattered == 0


def _cut(
    q_tiles: np.ndarray, masked_counts: np.ndarray, segments: np.ndarray, spec: LayoutSpec, may_be_apart: bool
) -> tuple[TaskList, TaskList, np.ndarray]:
    """Cut each query tile's keys into tasks for the two kernels; return them and the parts per query tile."""
    num_full = q_tiles[:, 3] - q_tiles[:, 2]
    is_apart = (num_full >= _MIN_APART_TILES) & may_be_apart
    masked_starts = np.cumsum(masked_counts) - masked_counts
    row_starts = np.cumsum(q_tiles[:, 1]) - q_tiles[:, 1]
    parts_before = np.zeros(len(q_tiles), np.int64)

    def split(chosen: np.ndarray, full_counts: np.ndarray, mask_counts: np.ndarray) -> TaskList:
        """Split the chosen query tiles' keys, full tiles first, into parts; number the parts on."""
        if len(chosen) == 0:
            return TaskList(np.empty((0, 10), np.int64), chosen)
        work = full_counts[chosen] + mask_counts[chosen]
        parts = np.maximum(1, -(-work // _part_tiles(work, spec)))
        job = np.repeat(np.arange(len(chosen)), parts)
        part = concatenated_ranges(np.zeros_like(parts), parts)
        tile, num_full = chosen[job], full_counts[chosen][job]
        low, high = work[job] * part // parts[job], work[job] * (part + 1) // parts[job]
        tasks = np.empty((len(job), 10), np.int64)
        tasks[:, 0] = row_starts[tile]
        tasks[:, 1] = q_tiles[tile, 1]
        tasks[:, 2] = q_tiles[tile, 0]
        tasks[:, 3] = q_tiles[tile, 2] + np.minimum(low, num_full)
        tasks[:, 4] = q_tiles[tile, 2] + np.minimum(high, num_full)
        tasks[:, 5] = masked_starts[tile] + np.maximum(low - num_full, 0)
        tasks[:, 6] = masked_starts[tile] + np.maximum(high - num_full, 0)
        has_full = tasks[:, 4] > tasks[:, 3]
        tasks[:, 7] = np.where(has_full, np.searchsorted(segments, tasks[:, 3], side="right") - 1, 0)
        tasks[:, 8] = np.where(has_full, np.searchsorted(segments, tasks[:, 4], side="left"), 0)
        tasks[:, 9] = part + parts_before[tile]
        parts_before[chosen] += parts
        longest_first = np.argsort(low - high, kind="stable")
        return TaskList(tasks[longest_first], tile[longest_first])

    nothing = np.zeros_like(masked_counts)
    apart = split(np.flatnonzero(is_apart), num_full, nothing)
    rest = np.flatnonzero(~is_apart | (masked_counts > 0))
    tasks = split(rest, np.where(is_apart, 0, num_full), masked_counts)
    return tasks, apart, parts_before


def _part_tiles(work: np.ndarray, spec: LayoutSpec) -> int:
    """Return the part length, in key tiles, for which all programs are done soonest."""
    longest = max(1, int(work.max()))
    part_tiles = -(-longest // np.arange(1, min(longest, _MAX_PARTS) + 1))
    num_tasks = np.maximum(1, -(-work // part_tiles[:, None])).sum(1) * spec.num_kv_heads
    times = -(-num_tasks // spec.num_programs) * (part_tiles + _PROGRAM_TILES)
    best, best_time = longest, float("inf")
    for tiles, tasks, time in zip(part_tiles.tolist(), num_tasks.tolist(), times.tolist(), strict=True):
        if time < best_time * 0.97:  # more parts must pay for their merge
            best, best_time = tiles, time
        if tasks > 8 * spec.num_programs:
            break
    return best
