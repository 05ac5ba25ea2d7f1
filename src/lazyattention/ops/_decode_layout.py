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
    last_keys = positions[tokens] - deltas - arrays.range_firsts[ranges]
    if spec.sliding_window is not None:
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
    starts = np.flatnonzero(np.concatenate(([True], sorted_keys[1:] != sorted_keys[:-1])))
    counts = np.diff(np.append(starts, num_rows))
    item_ranges = ranges[order[starts]]
    num_keys = arrays.range_tokens[item_ranges]
    # Where every row ends within the range, the rows say where keys end, also after the text has grown.
    ends_inside = np.maximum.reduceat(last_keys[order], starts) < num_keys

    few, many = (spec.decode_few, spec.decode_many) if keys_turned else (spec.decode_unturned, spec.decode_unturned)
    rows_few, rows_many = max(1, few.tile_m // spec.group), max(1, many.tile_m // spec.group)
    is_many = (counts > rows_few) & keys_turned
    rows_per_tile = np.where(is_many, rows_many, rows_few)
    row_tiles = -(-counts // rows_per_tile)
    tile_kv = np.where(is_many, many.tile_kv, few.tile_kv)
    key_tiles = -(-num_keys // tile_kv)
    num_parts = _num_parts(num_keys, row_tiles, max(few.tile_kv, many.tile_kv), spec)
    task_counts = row_tiles * num_parts
    item = np.repeat(np.arange(len(starts)), task_counts)
    inner = concatenated_ranges(np.zeros_like(task_counts), task_counts)
    part, row_tile = np.divmod(inner, row_tiles[item])

    tasks = np.empty((len(item), 8), np.int32)
    first_row = row_tile * rows_per_tile[item]
    tasks[:, 0] = starts[item] + first_row
    tasks[:, 1] = np.minimum(rows_per_tile[item], counts[item] - first_row)
    tables = arrays.range_tables[item_ranges]
    tasks[:, 2] = tables[item]
    key_starts = key_tiles[item] * part // num_parts[item] * tile_kv[item]
    tasks[:, 3] = key_starts
    part_ends = key_tiles[item] * (part + 1) // num_parts[item] * tile_kv[item]
    last_end = np.where(ends_inside, NO_END, num_keys)[item]
    tasks[:, 4] = np.where(part == num_parts[item] - 1, last_end, part_ends)
    tasks[:, 5] = arrays.range_firsts[item_ranges][item]
    tasks[:, 6] = part
    # A text's next blocks can lie anywhere, so only ranges that are complete count as contiguous.
    first_slots = np.where(
        arrays.range_contiguous[item_ranges] & ~ends_inside, arrays.blocks[tables] * np.int64(spec.block_size), -1
    )[item]
    tasks[:, 7] = np.where(first_slots >= 0, first_slots + key_starts, -1)
    # Longest first, so that no long task starts last.
    work = np.minimum(part_ends, num_keys[item]) - key_starts
    in_order = stable_order(work.max() - work)
    is_many_task = is_many[item][in_order]
    tasks = tasks[in_order]

    rows = np.zeros((num_rows, 4), np.int32)
    rows[:, 0] = tokens[order]
    rows[:, 1] = deltas[order]
    row_parts = np.empty(num_rows, np.int64)
    row_parts[order] = np.repeat(num_parts, counts)
    return DecodeLayout(tokens, row_parts, order, tasks[~is_many_task], tasks[is_many_task], rows)


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
