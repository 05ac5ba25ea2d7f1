# SPDX-License-Identifier: Apache-2.0
"""Host layout of shared_decode: rows sorted by the range they look at, cut into tasks of about equal work."""

from dataclasses import dataclass

import numpy as np

from lazyattention.ops._layout import NO_END, LayoutSpec, PlanArrays, concatenated_ranges, stable_order

# A part this long hides the start of its program; a longer one would leave too few programs to balance.
_MAX_PART_KEYS = 1024
_MIN_PART_TILES = 2
# Programs over few rows that one multiprocessor holds.
_PROGRAMS_PER_MULTIPROCESSOR = 4


@dataclass(slots=True)
class DecodeLayout:
    """Tasks and rows as `device_plan` describes them.

    Attributes:
        row_tokens: int64 `[num_rows]`, query token of each row, in order of the groups.
        row_parts: int64 `[num_rows]`, parts of each row.
        sorted_rows: int64 `[num_rows]`, the same rows in order of the range.
        few: int32 `[num_tasks, 8]`, tasks over ranges with few rows.
        many: int32 `[num_tasks, 8]`, tasks over ranges with many.
        rows: int32 `[num_rows, 4]`, in order of the range.
    """

    row_tokens: np.ndarray
    row_parts: np.ndarray
    sorted_rows: np.ndarray
    few: np.ndarray
    many: np.ndarray
    rows: np.ndarray

    def settle(self, rows_per_token: np.ndarray) -> np.ndarray:
        """Return the parts of each row: every row of this kernel goes through the merge."""
        return self.row_parts

    def place(self, first_parts: np.ndarray) -> None:
        """Take the number of each row's first part."""
        self.rows[:, 2] = first_parts[self.sorted_rows]


def lay_out_decode(
    arrays: PlanArrays, chosen: np.ndarray, positions: np.ndarray, spec: LayoutSpec, keys_turned: bool
) -> DecodeLayout:
    """Lay out the chosen groups: one task per range, tile of rows and part of the keys."""
    ranges, tokens, deltas = _rows_of(arrays, chosen)
    last_keys = positions[tokens] - deltas
    last_keys -= arrays.range_firsts[ranges]
    if spec.sliding_window is not None and len(tokens):
        # Rows too far from all of the range see nothing; moving on, they never will.
        near = last_keys - spec.sliding_window + 1 < arrays.range_tokens[ranges]
        ranges, tokens, deltas, last_keys = ranges[near], tokens[near], deltas[near], last_keys[near]
    num_rows = len(tokens)
    if num_rows == 0:
        nothing, no_tasks = np.empty(0, np.int64), np.empty((0, 8), np.int32)
        return DecodeLayout(nothing, nothing, nothing, no_tasks, no_tasks, np.empty((0, 4), np.int32))
    # Keys stored unturned are turned when read, so rows share a task only at equal deltas.
    item_keys = ranges if keys_turned else ranges * 2**32 + (deltas - deltas.min())
    order = stable_order(item_keys)
    sorted_keys = item_keys[order]
    borders = np.concatenate(([0], np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1, [num_rows]))
    starts, counts = borders[:-1], borders[1:] - borders[:-1]
    item_ranges = ranges[order[starts]]
    # Where every row ends within the range, the rows say where keys end, also after the text has grown.
    ends_inside = np.maximum.reduceat(last_keys[order], starts) < arrays.range_tokens[item_ranges]
    tasks, num_many, num_parts = _tasks(arrays, item_ranges, starts, counts, ends_inside, spec, keys_turned)
    rows = np.zeros((num_rows, 4), np.int32)
    rows[:, 0] = tokens[order]
    rows[:, 1] = deltas[order]
    row_parts = np.empty(num_rows, np.int64)
    row_parts[order] = np.repeat(num_parts, counts)
    return DecodeLayout(tokens, row_parts, order, tasks[num_many:], tasks[:num_many], rows)


def _tasks(
    arrays: PlanArrays,
    item_ranges: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    ends_inside: np.ndarray,
    spec: LayoutSpec,
    keys_turned: bool,
) -> tuple[np.ndarray, int, np.ndarray]:
    """Cut items, each all rows over one range, into tasks.

    Returns:
        Tasks int32 `[num_tasks, 8]`, those over many rows first and the longest first among each; how many of them are
        over many rows; parts of each item.
    """
    few, many = (spec.decode_few, spec.decode_many) if keys_turned else (spec.decode_unturned, spec.decode_unturned)
    rows_few, rows_many = max(1, few.tile_m // spec.group), max(1, many.tile_m // spec.group)
    num_keys = arrays.range_tokens[item_ranges]
    tables = arrays.range_tables[item_ranges]
    is_many = (counts > rows_few) & keys_turned
    row_tiles = np.where(is_many, -(-counts // rows_many), -(-counts // rows_few))
    num_parts = _num_parts(num_keys, row_tiles, max(few.tile_kv, many.tile_kv), spec)
    # A text's next blocks can lie anywhere, so only ranges that are complete count as contiguous.
    is_contiguous = arrays.range_contiguous[item_ranges] & ~ends_inside
    of_items = np.empty((8, len(starts)), np.int32)
    of_items[0] = starts
    of_items[1] = counts
    of_items[2] = tables
    of_items[3] = 0
    of_items[4] = np.where(ends_inside, NO_END, num_keys)
    of_items[5] = arrays.range_firsts[item_ranges]
    of_items[6] = 0
    of_items[7] = np.where(is_contiguous, arrays.blocks[tables] * np.int64(spec.block_size), -1)
    work = num_keys
    task_counts = row_tiles * num_parts
    is_cut = task_counts > 1
    if not is_cut.any():
        tasks, is_many_task = of_items, is_many
    else:
        item = np.repeat(np.arange(len(starts)), task_counts)
        tasks, is_many_task, work = of_items[:, item], is_many[item], work[item]
        inner = concatenated_ranges(np.zeros_like(task_counts), task_counts)
        if int(num_parts.max()) == 1:
            row_tile = inner
        else:
            part, row_tile = np.divmod(inner, row_tiles[item])
            parts, tile_kv = num_parts[item], np.where(is_many_task, many.tile_kv, few.tile_kv)
            key_tiles = -(-work // tile_kv)
            key_starts = key_tiles * part // parts * tile_kv
            part_ends = key_tiles * (part + 1) // parts * tile_kv
            tasks[3] = key_starts
            tasks[4] = np.where(part == parts - 1, tasks[4], part_ends)
            tasks[6] = part
            tasks[7] += np.where(tasks[7] >= 0, tasks[3], 0)
            work = np.minimum(part_ends, work) - key_starts
        rows_per_tile = np.where(is_many_task, rows_many, rows_few)
        first_rows = row_tile * rows_per_tile
        tasks[0] += first_rows
        tasks[1] = np.minimum(rows_per_tile, tasks[1] - first_rows)
    # Longest first, so that no long task starts last.
    longest = int(work.max())
    order = stable_order(np.where(is_many_task, longest - work, 2 * longest + 1 - work))
    return np.ascontiguousarray(tasks.T)[order], int(np.count_nonzero(is_many_task)), num_parts


def _rows_of(arrays: PlanArrays, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return range, token and delta of every row of the chosen groups."""
    if chosen.all():
        ranges, starts, deltas = arrays.group_ranges, arrays.group_starts, arrays.group_deltas
        sizes = arrays.group_sizes
    else:
        ranges, starts, deltas = arrays.group_ranges[chosen], arrays.group_starts[chosen], arrays.group_deltas[chosen]
        sizes = arrays.group_sizes[chosen]
    if len(sizes) == 0 or sizes.max() == 1:
        return ranges, starts, deltas
    return np.repeat(ranges, sizes), concatenated_ranges(starts, sizes), np.repeat(deltas, sizes)


def _num_parts(num_keys: np.ndarray, row_tiles: np.ndarray, tile: int, spec: LayoutSpec) -> np.ndarray:
    """Return parts per item: enough programs to fill the device."""
    work = int((num_keys * row_tiles).sum()) * spec.num_kv_heads
    wanted = -(-work // (_PROGRAMS_PER_MULTIPROCESSOR * spec.num_programs * tile)) * tile
    longest = min(max(wanted, _MIN_PART_TILES * tile), _MAX_PART_KEYS)
    return -(-num_keys // longest)
