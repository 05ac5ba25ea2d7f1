# SPDX-License-Identifier: Apache-2.0
"""Host layout of shared_decode: rows sorted by the range they look at, cut into tasks of about equal work."""

import functools
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
        few: int32 `[num_tasks, 8]`, tasks over ranges with few rows.
        many: int32 `[num_tasks, 8]`, tasks over ranges with many.
        rows: int32 `[num_rows, 4]`, in order of the groups until they are placed, then in order of the range.
        order: int64 `[num_rows]`, that order.
    """

    row_tokens: np.ndarray
    row_parts: np.ndarray
    few: np.ndarray
    many: np.ndarray
    rows: np.ndarray
    order: np.ndarray

    def settle(self, rows_per_token: np.ndarray) -> np.ndarray:
        """Return the parts of each row: every row of this kernel goes through the merge."""
        return self.row_parts

    def place(self, first_parts: np.ndarray) -> None:
        """Take the number of each row's first part, and bring rows into the order in which tasks name them."""
        self.rows[:, 2] = first_parts
        self.rows = self.rows.take(self.order, axis=0)


def lay_out_decode(
    arrays: PlanArrays, chosen: np.ndarray | slice, positions: np.ndarray, spec: LayoutSpec, keys_turned: bool
) -> DecodeLayout:
    """Lay out the chosen groups: one task per range, tile of rows and part of the keys."""
    ranges, tokens, deltas = _rows_of(arrays, chosen)
    if len(ranges) == 0:
        return _empty()
    # Where the last key that a row may see was stored, and where its range ends.
    last_keys = positions.take(tokens) - deltas
    range_ends = (arrays.range_firsts + arrays.range_tokens).take(ranges)
    if spec.sliding_window is not None:
        # Rows too far from all of the range see nothing; moving on, they never will.
        near = last_keys - spec.sliding_window + 1 < range_ends
        ranges, tokens, deltas = ranges[near], tokens[near], deltas[near]
        last_keys, range_ends = last_keys[near], range_ends[near]
        if len(ranges) == 0:
            return _empty()
    items = ranges
    if not keys_turned:
        # They are turned when read, so rows share a task only at equal deltas.
        items = np.unique(ranges * 2**32 + (deltas - deltas.min()), return_inverse=True)[1]
    counts = np.bincount(items)
    order = stable_order(items, len(counts))
    present = counts.nonzero()[0]
    row_counts = counts[present]
    starts = row_counts.cumsum() - row_counts
    item_ranges = present if keys_turned else ranges[order[starts]]
    # Where every row ends within the range, the rows say where keys end, also after the text has grown.
    counts_inside = np.bincount(items[(last_keys < range_ends).nonzero()[0]], minlength=len(counts))
    ends_inside = counts_inside[present] == row_counts
    tasks, num_many, num_parts = _tasks(arrays, item_ranges, starts, row_counts, ends_inside, spec, keys_turned)
    rows = np.zeros((len(tokens), 4), np.int32)
    rows[:, 0] = tokens
    rows[:, 1] = deltas
    parts_of_items = np.zeros_like(counts)
    parts_of_items[present] = num_parts
    return DecodeLayout(tokens, parts_of_items.take(items), tasks[num_many:], tasks[:num_many], rows, order)


@functools.cache
def _empty() -> DecodeLayout:
    nothing, no_tasks = np.empty(0, np.int64), np.empty((0, 8), np.int32)
    return DecodeLayout(nothing, nothing, no_tasks, no_tasks, np.empty((0, 4), np.int32), nothing)


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
    num_keys = arrays.range_tokens.take(item_ranges)
    is_many = counts > rows_few
    row_tiles = np.where(is_many, (counts + (rows_many - 1)) // rows_many, 1)
    if not keys_turned:
        is_many = np.zeros_like(is_many)
    num_parts = _num_parts(num_keys, row_tiles, max(few.tile_kv, many.tile_kv), spec)
    tasks = np.zeros((len(starts), 8), np.int32)
    tasks[:, 0] = starts
    tasks[:, 1] = counts
    tasks[:, 2] = arrays.range_tables.take(item_ranges)
    tasks[:, 4] = np.where(ends_inside, NO_END, num_keys)
    tasks[:, 5] = arrays.range_firsts.take(item_ranges)
    # A text's next blocks can lie anywhere, so only ranges that are complete count as contiguous.
    tasks[:, 7] = np.where(ends_inside, -1, arrays.range_slots.take(item_ranges))
    work = num_keys
    task_counts = row_tiles * num_parts
    if int(task_counts.max()) > 1:
        item = np.repeat(np.arange(len(starts)), task_counts)
        tasks, is_many, work = tasks.take(item, axis=0), is_many[item], work[item]
        inner = concatenated_ranges(np.zeros_like(task_counts), task_counts)
        if int(num_parts.max()) == 1:
            row_tile = inner
        else:
            part, row_tile = np.divmod(inner, row_tiles[item])
            parts, tile_kv = num_parts[item], np.where(is_many, many.tile_kv, few.tile_kv)
            key_tiles = -(-work // tile_kv)
            key_starts = key_tiles * part // parts * tile_kv
            part_ends = key_tiles * (part + 1) // parts * tile_kv
            tasks[:, 3] = key_starts
            tasks[:, 4] = np.where(part == parts - 1, tasks[:, 4], part_ends)
            tasks[:, 6] = part
            tasks[:, 7] += np.where(tasks[:, 7] >= 0, tasks[:, 3], 0)
            work = np.minimum(part_ends, work) - key_starts
        rows_per_tile = np.where(is_many, rows_many, rows_few)
        first_rows = row_tile * rows_per_tile
        tasks[:, 0] += first_rows
        tasks[:, 1] = np.minimum(rows_per_tile, tasks[:, 1] - first_rows)
    # Longest first, so that no long task starts last.
    longest = int(work.max())
    order = stable_order(np.where(is_many, longest, 2 * longest + 1) - work, 2 * longest + 2)
    return tasks.take(order, axis=0), int(np.count_nonzero(is_many)), num_parts


def _rows_of(arrays: PlanArrays, chosen: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return range, token and delta of every row of the chosen groups."""
    ranges, starts, deltas = arrays.group_ranges[chosen], arrays.group_starts[chosen], arrays.group_deltas[chosen]
    sizes = arrays.group_sizes[chosen]
    if len(sizes) == 0 or sizes.max() == 1:
        return ranges, starts, deltas
    return np.repeat(ranges, sizes), concatenated_ranges(starts, sizes), np.repeat(deltas, sizes)


def _num_parts(num_keys: np.ndarray, row_tiles: np.ndarray, tile: int, spec: LayoutSpec) -> np.ndarray:
    """Return parts per item: enough programs to fill the device."""
    work = int(num_keys @ row_tiles) * spec.num_kv_heads
    wanted = -(-work // (_PROGRAMS_PER_MULTIPROCESSOR * spec.num_programs * tile)) * tile
    longest = min(max(wanted, _MIN_PART_TILES * tile), _MAX_PART_KEYS)
    return (num_keys + (longest - 1)) // longest
