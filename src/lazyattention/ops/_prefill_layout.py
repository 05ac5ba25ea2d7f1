# SPDX-License-Identifier: Apache-2.0
"""Host layout of chunk_prefill: query tiles of one request against key tiles of all its ranges.

Key tiles are sorted by the position of their keys, so what a query tile sees without a mask is one run of them.
"""

import functools
import itertools
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
        parts = self.tile_parts
        if (parts == 1).any():
            alone = np.maximum.reduceat(rows_per_token[self.row_tokens], self.tile_rows[:-1]) == 1
            is_direct = alone & (parts == 1)
            for task_list in (self.tasks, self.apart):
                task_list.tasks[is_direct[task_list.q_tiles], 9] = -1
            parts = np.where(is_direct, 0, parts)
        return np.repeat(parts, self.tile_rows[1:] - self.tile_rows[:-1])

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
    order = np.lexsort((sizes, starts))
    groups, starts, sizes = np.arange(len(arrays.group_sizes))[chosen][order], starts[order], sizes[order]
    borders = ((starts[1:] != starts[:-1]) | (sizes[1:] != sizes[:-1])).nonzero()[0] + 1
    runs = [
        _lay_out_run(arrays, groups[start:end], positions, spec, shape)
        for start, end in itertools.pairwise((0, *borders.tolist(), len(groups)))
    ]
    tile_offsets = list(itertools.accumulate((len(run.tiles) for run in runs), initial=0))
    for run, offset in zip(runs, tile_offsets, strict=False):
        run.q_tiles[:, 2:] += offset
        run.masked += offset
    tiles = np.concatenate([run.tiles for run in runs])
    q_tiles = np.concatenate([run.q_tiles for run in runs])
    masked_counts = np.concatenate([run.masked_counts for run in runs])
    # A segment ends where the delta changes, at the end of a run's tiles without a mask, and at the end of the run.
    is_border = np.zeros(len(tiles) + 1, bool)
    is_border[1:-1] = tiles[1:, 5] != tiles[:-1, 5]
    is_border[tile_offsets] = True
    is_border[[offset + run.num_full for run, offset in zip(runs, tile_offsets, strict=False)]] = True
    segments = is_border.nonzero()[0]
    is_contiguous = all(run.is_contiguous for run in runs)
    may_be_apart = spec.has_unmasked_prefill and is_contiguous and keys_turned
    tile_rows = np.zeros(len(q_tiles) + 1, np.int64)
    q_tiles[:, 1].cumsum(out=tile_rows[1:])
    tasks, apart, tile_parts = _cut(q_tiles, tile_rows[:-1], masked_counts, segments, spec, may_be_apart)
    return PrefillLayout(
        row_tokens=concatenated_ranges(q_tiles[:, 0], q_tiles[:, 1]),
        tile_rows=tile_rows,
        tile_parts=tile_parts,
        tasks=tasks,
        apart=apart,
        tiles=tiles,
        segments=segments,
        masked=np.concatenate([run.masked for run in runs]),
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
    tile = shape.tile_kv
    tiles, num_full, is_contiguous = _key_tiles(arrays, groups, tile, spec)
    start, size = int(arrays.group_starts[groups[0]]), int(arrays.group_sizes[groups[0]])
    tokens_per_tile = max(1, shape.tile_m // spec.group)
    firsts = np.arange(0, size, tokens_per_tile)
    num_tokens = np.minimum(tokens_per_tile, size - firsts)
    low = positions[start] + firsts  # first and last position of each query tile
    high = low + num_tokens - 1

    stands, tail_stands = tiles[:num_full, 3], tiles[num_full:, 3]
    seen_end = stands.searchsorted(high, side="right")
    full_end = stands.searchsorted(low - tile + 1, side="right")
    tail_end = tail_stands.searchsorted(high, side="right")
    seen_start = full_start = tail_start = np.zeros_like(low)
    if spec.sliding_window is not None:
        nearest = low - spec.sliding_window + 1
        seen_start = stands.searchsorted(nearest - tile + 1, side="left")
        full_start = stands.searchsorted(high - spec.sliding_window + 1, side="left")
        # Tails are shorter than a tile; one too many is only masked away.
        tail_start = np.minimum(tail_stands.searchsorted(nearest - tile + 1, side="left"), tail_end)
        seen_start = np.minimum(seen_start, seen_end)
        none_full = full_start > full_end
        full_start, full_end = np.where(none_full, seen_end, full_start), np.where(none_full, seen_end, full_end)
    range_starts = np.array((tail_start + num_full, seen_start, full_end)).T
    range_counts = np.array((tail_end - tail_start, full_start - seen_start, seen_end - full_end)).T
    return _Run(
        tiles=tiles,
        num_full=num_full,
        is_contiguous=is_contiguous,
        q_tiles=np.array((start + firsts, num_tokens, full_start, full_end)).T,
        masked_counts=range_counts.sum(1),
        masked=concatenated_ranges(range_starts.reshape(-1), range_counts.reshape(-1)),
    )


def _key_tiles(arrays: PlanArrays, groups: np.ndarray, tile: int, spec: LayoutSpec) -> tuple[np.ndarray, int, bool]:
    """Return the tiles of the groups' ranges, whole ones and then tails, each by position, and how many are whole.

    And whether whole ones are contiguous. Tails need a mask. Where there is a kernel for contiguous tiles, a few whole
    ones that are not count as tails, too.
    """
    block_size = spec.block_size
    ranges, deltas = arrays.group_ranges[groups], arrays.group_deltas[groups]
    num_keys = arrays.range_tokens[ranges]
    of_groups = np.zeros((len(groups), 8), np.int64)
    of_groups[:, 1] = arrays.range_tables[ranges]
    of_groups[:, 3] = arrays.range_firsts[ranges] + deltas
    of_groups[:, 4] = num_keys
    of_groups[:, 5] = deltas
    counts = -(-num_keys // tile)
    tiles = np.repeat(of_groups, counts, axis=0)
    key_starts = concatenated_ranges(np.zeros_like(counts), counts) * tile
    first_blocks = tiles[:, 1] + key_starts // block_size
    tiles[:, 0] = arrays.blocks[first_blocks] * np.int64(block_size) + key_starts % block_size
    tiles[:, 2] = key_starts
    tiles[:, 3] += key_starts
    tiles[:, 4] = np.minimum(tiles[:, 4] - key_starts, tile)
    is_full = tiles[:, 4] == tile
    is_contiguous = True
    may_be_scattered = arrays.range_slots[ranges] < 0
    if tile > block_size and may_be_scattered.any():
        asked = (np.repeat(may_be_scattered, counts) & is_full).nonzero()[0]
        blocks = arrays.blocks[first_blocks[asked, None] + np.arange(tile // block_size)]
        scattered = asked[(blocks[:, 1:] != blocks[:, :-1] + 1).any(1)]
        if len(scattered) and spec.has_unmasked_prefill and len(scattered) <= _MAX_SCATTERED * is_full.sum():
            is_full[scattered] = False
        else:
            is_contiguous = len(scattered) == 0
    return tiles[np.lexsort((tiles[:, 3], ~is_full))], int(is_full.sum()), is_contiguous


def _cut(
    q_tiles: np.ndarray,
    row_starts: np.ndarray,
    masked_counts: np.ndarray,
    segments: np.ndarray,
    spec: LayoutSpec,
    may_be_apart: bool,
) -> tuple[TaskList, TaskList, np.ndarray]:
    """Cut each query tile's keys into tasks for the two kernels; return them and the parts per query tile."""
    num_full = q_tiles[:, 3] - q_tiles[:, 2]
    is_apart = (num_full >= _MIN_APART_TILES) & may_be_apart
    apart, rest = is_apart.nonzero()[0], (~is_apart | (masked_counts > 0)).nonzero()[0]
    # A job is a query tile's work for one of the kernels: first those apart, then the others.
    num_apart = len(apart)
    full_counts = np.concatenate((num_full[apart], np.where(is_apart, 0, num_full)[rest]))
    work = full_counts.copy()
    work[num_apart:] += masked_counts[rest]
    parts = np.empty_like(work)
    for jobs in (slice(num_apart), slice(num_apart, None)):
        if len(work[jobs]):
            parts[jobs] = -(-work[jobs] // _part_tiles(work[jobs], spec))
    parts = np.maximum(parts, 1)
    tile_parts = np.zeros_like(num_full)
    tile_parts[apart] = parts[:num_apart]
    tile = np.concatenate((apart, rest))
    of_jobs = np.zeros((len(tile), 10), np.int64)
    of_jobs[:, 0] = row_starts[tile]
    of_jobs[:, 1:4] = q_tiles[tile][:, (1, 0, 2)]
    of_jobs[:, 4] = of_jobs[:, 3]
    of_jobs[:, 5] = of_jobs[:, 6] = (masked_counts.cumsum() - masked_counts)[tile]
    of_jobs[num_apart:, 9] = tile_parts[rest]
    tile_parts[rest] += parts[num_apart:]

    job = np.repeat(np.arange(len(tile)), parts)
    part = concatenated_ranges(np.zeros_like(parts), parts)
    job_parts, job_work, job_full = parts[job], work[job], full_counts[job]
    low, high = job_work * part // job_parts, job_work * (part + 1) // job_parts
    tasks = of_jobs[job]
    tasks[:, 3] += np.minimum(low, job_full)
    tasks[:, 4] += np.minimum(high, job_full)
    tasks[:, 5] += np.maximum(low - job_full, 0)
    tasks[:, 6] += np.maximum(high - job_full, 0)
    has_full = tasks[:, 4] > tasks[:, 3]
    tasks[:, 7] = (segments.searchsorted(tasks[:, 3], side="right") - 1) * has_full
    tasks[:, 8] = segments.searchsorted(tasks[:, 4], side="left") * has_full
    tasks[:, 9] += part
    is_rest = job >= num_apart
    order = np.lexsort((low - high, is_rest))  # longest first
    tasks, tile, end = tasks[order], tile[job][order], len(job) - int(is_rest.sum())
    return TaskList(tasks[end:], tile[end:]), TaskList(tasks[:end], tile[:end]), tile_parts


def _part_tiles(work: np.ndarray, spec: LayoutSpec) -> int:
    """Return the part length, in key tiles, for which all programs are done soonest."""
    tiles: list[int] = work.tolist()
    longest = max(1, *tiles)
    best, best_time, part_tiles = longest, float("inf"), 0
    for num_parts in range(1, min(longest, _MAX_PARTS) + 1):
        if part_tiles == -(-longest // num_parts):
            continue
        part_tiles = -(-longest // num_parts)
        num_tasks = sum([-(-count // part_tiles) or 1 for count in tiles]) * spec.num_kv_heads
        time = -(-num_tasks // spec.num_programs) * (part_tiles + _PROGRAM_TILES)
        if time < best_time * 0.97:  # more parts must pay for their merge
            best, best_time = part_tiles, time
        if num_tasks > 8 * spec.num_programs:
            break
    return best
