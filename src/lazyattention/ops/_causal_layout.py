# SPDX-License-Identifier: Apache-2.0
"""Host layout of causal_prefill: runs of new tokens that see all new tokens before them in the run.

A range whose first key goes to the slot of a group's first row, and that is as long as the group, holds just these rows'
keys. A span that follows directly, and whose rows see the ones before as well, belongs to the same causal sequence.
"""

from dataclasses import dataclass, field

import numpy as np

from lazyattention.ops._layout import LayoutSpec, PlanArrays, concatenated_ranges

# Sequences from here on are worth a launch each; shorter ones that lie side by side share one.
LONG = 1024


@dataclass(slots=True)
class CausalLayout:
    """Batches of sequences, consecutive tokens each.

    Attributes:
        row_tokens: int64 `[num_rows]`, every token of every batch.
        cum_seqs: int32, per batch the ends of its sequences, counted from its first token, 0 first; all after each other.
        batches: int64 `[num_batches, 3]`: first token, number of tokens, number of sequences.
        is_direct: bool `[num_batches]`: all its tokens see nothing else, and their output is written at once.
        parts: int64 `[num_rows]`, the part of each row; unused where direct.
    """

    row_tokens: np.ndarray
    cum_seqs: np.ndarray
    batches: np.ndarray
    is_direct: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    parts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def settle(self, rows_per_token: np.ndarray) -> np.ndarray:
        """Return parts per row: none where a whole batch sees nothing else."""
        if len(self.batches) == 0:
            return np.empty(0, np.int64)
        sizes = self.batches[:, 1]
        self.is_direct = np.maximum.reduceat(rows_per_token[self.row_tokens], np.cumsum(sizes) - sizes) == 1
        return np.repeat(np.where(self.is_direct, 0, 1), sizes)

    def place(self, first_parts: np.ndarray) -> None:
        """Take the number of each row's first part."""
        self.parts = first_parts


def lay_out_causal(
    arrays: PlanArrays, positions: np.ndarray, slots: np.ndarray | None, spec: LayoutSpec
) -> tuple[CausalLayout, np.ndarray]:
    """Lay out all runs that are long enough.

    Args:
        arrays: The step's row groups and ranges.
        positions: int64 `[num_tokens]`, true positions.
        slots: int64 `[num_tokens]`, where new keys go; None = leave all to the other kernels.
        spec: Of the layer.

    Returns:
        The layout, and bool `[num_groups]`: the groups that are part of it.
    """
    covered = np.zeros(len(arrays.group_sizes), bool)
    runs: list[tuple[int, int]] = []
    if slots is not None and spec.causal_min_tokens and len(positions) >= spec.causal_min_tokens:
        runs = _find_runs(arrays, positions, slots, spec, covered)
    if not runs:
        return CausalLayout(np.empty(0, np.int64), np.empty(0, np.int32), np.empty((0, 3), np.int64)), covered
    batches: list[tuple[int, int, int]] = []
    cum_seqs: list[int] = []
    joins = False
    for start, size in runs:
        if joins and size < LONG and start == batches[-1][0] + batches[-1][1]:
            first, num_tokens, num_seqs = batches[-1]
            batches[-1] = (first, num_tokens + size, num_seqs + 1)
            cum_seqs.append(num_tokens + size)
        else:
            batches.append((start, size, 1))
            cum_seqs += (0, size)
        joins = size < LONG
    table = np.array(batches, np.int64).reshape(-1, 3)
    return CausalLayout(concatenated_ranges(table[:, 0], table[:, 1]), np.array(cum_seqs, np.int32), table), covered


def _find_runs(
    arrays: PlanArrays, positions: np.ndarray, slots: np.ndarray, spec: LayoutSpec, covered: np.ndarray
) -> list[tuple[int, int]]:
    """Return first token and length of each run, in order, and mark its groups as covered."""
    starts, sizes, ranges = arrays.group_starts, arrays.group_sizes, arrays.group_ranges
    stands = arrays.range_firsts[ranges] + arrays.group_deltas
    first_slots = arrays.blocks[arrays.range_tables[ranges]] * np.int64(spec.block_size)
    is_own = (arrays.range_tokens[ranges] == sizes) & (stands == positions[starts]) & (first_slots == slots[starts])
    own = np.flatnonzero(is_own)
    own = own[np.argsort(starts[own], kind="stable")]
    # (first token, range, where it stands) -> group
    groups = {
        key: index for index, key in enumerate(zip(starts.tolist(), ranges.tolist(), stands.tolist(), strict=True))
    }
    runs: list[tuple[int, int]] = []
    members: list[tuple[int, int]] = []  # of the run under way: its spans' ranges and where they stand
    run_groups: list[int] = []
    run_start = run_end = -1

    def close() -> None:
        if run_end - run_start >= spec.causal_min_tokens:
            runs.append((run_start, run_end - run_start))
            covered[run_groups] = True

    for group in own.tolist():
        start, size = int(starts[group]), int(sizes[group])
        seen = [groups.get((start, *member)) for member in members]
        follows = start == run_end and positions[start] == positions[start - 1] + 1
        if follows and None not in seen:
            run_groups += [index for index in seen if index is not None]
        else:
            close()
            members, run_groups, run_start = [], [], start
        members.append((int(ranges[group]), int(stands[group])))
        run_groups.append(group)
        run_end = start + size
    close()
    return runs
