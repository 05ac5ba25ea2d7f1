# SPDX-License-Identifier: Apache-2.0
"""Plans for the kernels from state kept between steps, so that a step costs what changed since the last one.

The engine tells the builder of KV ranges and requests as they come, grow and go; `step` then only concatenates arrays.
While the same requests decode one token each, nothing but positions and slots is new, and the device keeps its tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, count, islice, repeat
from operator import is_, is_not

import numpy as np
import torch

from lazyattention.ops._layout import PlanArrays
from lazyattention.ops.device_plan import load, send
from lazyattention.ops.plan import AttentionPlan, first_slot, plan_of_arrays

# A text may outgrow the parts it was cut into by this many steps before it is cut anew.
_MAX_STEPS_PER_LAYOUT = 256
# Block-table entries that are sent at once, rather than picked out from among others.
_MAX_SENT_ENTRIES = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """What each new token of one request looks at; made anew when the request's ranges change.

    Attributes:
        range_ids: int64 `[num_spans]`, from `PlanBuilder.add_range`.
        deltas: int64 `[num_spans]`, position_delta of each.
    """

    range_ids: np.ndarray
    deltas: np.ndarray


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step on the host.

    Attributes:
        arrays: Row groups and ranges.
        positions: int64 `[num_tokens]`.
        slot_mapping: int64 `[num_tokens]`.
        store_turns: int64 `[num_tokens]` or None.
        version: Steps with equal versions have the same layout.
    """

    arrays: PlanArrays
    positions: np.ndarray
    slot_mapping: np.ndarray
    store_turns: np.ndarray | None
    version: int


@dataclass(slots=True)
class _Ranges:
    """Ranges by id, in arrays that double when full."""

    tokens: np.ndarray = field(default_factory=lambda: np.zeros(1024, np.int64))
    firsts: np.ndarray = field(default_factory=lambda: np.zeros(1024, np.int64))
    turned: np.ndarray = field(default_factory=lambda: np.ones(1024, bool))
    tables: np.ndarray = field(default_factory=lambda: np.zeros(1024, np.int64))
    table_sizes: np.ndarray = field(default_factory=lambda: np.zeros(1024, np.int64))
    num_blocks: np.ndarray = field(default_factory=lambda: np.zeros(1024, np.int64))
    slots: np.ndarray = field(default_factory=lambda: np.zeros(1024, np.int64))

    def grow(self) -> None:
        for name in ("tokens", "firsts", "turned", "tables", "table_sizes", "num_blocks", "slots"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros_like(array))))


class PlanBuilder:
    """Keeps the running ranges' block tables on host and device, and assembles steps.

    Not thread-safe: the engine's thread owns it. `add_range`, `grow_range` and `drop_range` may be called in any order
    between steps; a dropped id is used again.
    """

    def __init__(self, *, block_size: int, device: torch.device | str, table_entries: int = 1 << 16) -> None:
        """Start without ranges.

        Args:
            block_size: Tokens per KV block.
            device: Where plans go.
            table_entries: Block-table entries to reserve; `blocks` moves to a larger place when they are used up.
        """
        self._block_size = block_size
        self._device = torch.device(device)
        self._ranges = _Ranges()
        self._free_ids: list[int] = []
        self._num_ids = 0
        self._host_blocks = np.zeros(table_entries, np.int32)
        self._end = 0
        self._free_tables: dict[int, list[int]] = {}
        self._dirty: list[tuple[int, int]] = []  # runs of entries that the device has not got yet
        self.blocks = torch.zeros(table_entries, dtype=torch.int32, device=self._device)
        self.for_causal = True  # plans may make use of causal_prefill
        self._version = 0
        self._steps_in_version = 0
        self._structure_changed = True
        self._last_requests: list[RequestRows] = []
        # Of these, all after each other: range ids and deltas, and how many each has.
        self._rows = np.empty((2, 0), np.int64)
        self._spans = np.empty(0, np.int64)
        self._last_arrays: PlanArrays | None = None
        self._last_plan: tuple[int, AttentionPlan] | None = None

    def add_range(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        first_position: int,
        *,
        keys_turned: bool = True,
        max_tokens: int = 0,
    ) -> int:
        """Take a range and return its id.

        Args:
            block_ids: As in `KVRange`, as the next three.
            num_tokens: Tokens that are there; 0 is allowed.
            first_position: Position at which token 0 was stored.
            keys_turned: Keys are stored turned.
            max_tokens: Tokens it may grow to without its block table moving, which costs a new layout.
        """
        if self._free_ids:
            range_id = self._free_ids.pop()
        else:
            range_id = self._num_ids
            self._num_ids += 1
            if range_id == len(self._ranges.tokens):
                self._ranges.grow()
        self._ranges.tokens[range_id] = num_tokens
        self._ranges.firsts[range_id] = first_position
        self._ranges.turned[range_id] = keys_turned
        room = -(-max_tokens // self._block_size)
        table = np.asarray(block_ids, dtype=np.int32)
        self._ranges.slots[range_id] = first_slot(table, self._block_size)
        self._place_table(range_id, table, room)
        return range_id

    def grow_range(self, range_id: int, num_tokens: int, new_block_ids: Sequence[int] = ()) -> None:
        """Tell of a range's new length and of blocks appended to it; the one may come before the other."""
        self._ranges.tokens[range_id] = num_tokens
        if len(new_block_ids):
            self._ranges.slots[range_id] = -1
            start, used = int(self._ranges.tables[range_id]), int(self._ranges.num_blocks[range_id])
            end = used + len(new_block_ids)
            self._ranges.num_blocks[range_id] = end
            if end <= self._ranges.table_sizes[range_id]:
                self._host_blocks[start + used : start + end] = new_block_ids
                self._dirty.append((start + used, start + end))
            else:
                table = np.concatenate((self._host_blocks[start : start + used], np.asarray(new_block_ids, np.int32)))
                self._release_table(range_id)
                self._place_table(range_id, table)

    def drop_range(self, range_id: int) -> None:
        """Forget a range. No request of a later step may look at it."""
        self._release_table(range_id)
        self._free_ids.append(range_id)

    def step(
        self,
        requests: Sequence[RequestRows],
        query_lens: np.ndarray,
        positions: np.ndarray,
        slot_mapping: np.ndarray,
        *,
        store_turns: np.ndarray | None = None,
    ) -> HostStep:
        """Assemble one step.

        Args:
            requests: In order of their tokens.
            query_lens: int64 `[num_requests]`, new tokens of each.
            positions: int64 `[num_tokens]`, true positions; consecutive within a request.
            slot_mapping: int64 `[num_tokens]`, -1 = do not store.
            store_turns: int64 `[num_tokens]`: turn new keys by this before storing, or None.
        """
        self._send_tables()
        if not self._is_unchanged(requests, query_lens):
            self._collect(requests)
            self._last_arrays = self._assemble(query_lens)
            self._version += 1
            self._steps_in_version = 0
            self._structure_changed = int(query_lens.max(initial=0)) > 1
        self._steps_in_version += 1
        assert self._last_arrays is not None
        if store_turns is not None and not store_turns.any():
            store_turns = None
        return HostStep(self._last_arrays, positions, slot_mapping, store_turns, self._version)

    def step_ahead(self, requests: Sequence[RequestRows], positions: np.ndarray) -> HostStep | None:
        """Assemble a step of one token per request before it comes; `step` then finds it, if it comes so.

        Ranges must have the length they will have then; blocks may still be appended to them.

        Args:
            requests: As in `step`.
            positions: int64 `[num_requests]`.

        Returns:
            The step, of which nothing is to be stored; None if its layout is that of the last one.
        """
        query_lens = np.ones(len(requests), np.int64)
        if self._is_unchanged(requests, query_lens):
            return None
        step = self.step(requests, query_lens, positions, np.full(len(requests), -1))
        self._steps_in_version = 0
        return step

    def plan(self, step: HostStep) -> AttentionPlan:
        """Return a step's plan; it shares the device's tasks with the last plan of the same version."""
        plan = plan_of_arrays(
            step.arrays,
            step.positions,
            step.slot_mapping,
            block_size=self._block_size,
            store_turns=step.store_turns,
            device=self._device,
            blocks=self.blocks,
            for_causal=self.for_causal,
        )
        if self._last_plan is not None and self._last_plan[0] == step.version:
            plan._device_plans = self._last_plan[1]._device_plans
        self._last_plan = (step.version, plan)
        return plan

    def _is_unchanged(self, requests: Sequence[RequestRows], query_lens: np.ndarray) -> bool:
        return (
            not self._structure_changed
            and self._steps_in_version < _MAX_STEPS_PER_LAYOUT
            and int(query_lens.max(initial=0)) == 1
            and list(requests) == self._last_requests  # by identity
        )

    def _collect(self, requests: Sequence[RequestRows]) -> None:
        """Take the requests' rows: those of the last step that are still there in a few pieces, then the new ones'."""
        last = self._last_requests
        ends = self._spans.cumsum()
        pieces, kept = [], []
        index = num_kept = 0
        while index < len(last) and num_kept < len(requests):
            # Not list.index, which spells out what it does not find.
            found = next(compress(count(index), map(is_, islice(last, index, None), repeat(requests[num_kept]))), None)
            if found is None:
                break
            index = found
            run = _num_equal(last[index:], requests[num_kept:])
            pieces.append(self._rows[:, ends[index] - self._spans[index] : ends[index + run - 1]])
            kept.append(self._spans[index : index + run])
            index, num_kept = index + run, num_kept + run
        new = requests[num_kept:]
        pieces += [np.array((request.range_ids, request.deltas)) for request in new]
        kept.append(np.array([len(request.range_ids) for request in new], np.int64))
        self._rows = np.concatenate(pieces, axis=1) if pieces else np.empty((2, 0), np.int64)
        self._spans = np.concatenate(kept)
        self._last_requests = list(requests)

    def _assemble(self, query_lens: np.ndarray) -> PlanArrays:
        num_ids = self._num_ids
        range_ids, deltas = self._rows
        starts = np.repeat(np.cumsum(query_lens) - query_lens, self._spans)
        sizes = np.repeat(query_lens, self._spans)
        if not (self._ranges.tokens[:num_ids].all() and query_lens.all()):
            is_real = (self._ranges.tokens[range_ids] > 0) & (sizes > 0)
            range_ids, starts, sizes, deltas = (array[is_real] for array in (range_ids, starts, sizes, deltas))
        return PlanArrays(
            range_ids,
            starts,
            sizes,
            deltas,
            range_tokens=self._ranges.tokens[:num_ids],
            range_firsts=self._ranges.firsts[:num_ids],
            range_turned=self._ranges.turned[:num_ids],
            range_tables=self._ranges.tables[:num_ids],
            range_slots=self._ranges.slots[:num_ids],
            blocks=self._host_blocks,
        )

    def _place_table(self, range_id: int, table: np.ndarray, room: int = 0) -> None:
        """Copy a block table into a free place of a power-of-two size, so that texts can grow in place."""
        size = 1 << max(0, len(table) - 1, room - 1).bit_length()
        free = self._free_tables.get(size)
        if free:
            start = free.pop()
        else:
            start = self._end
            self._end += size
            if self._end > len(self._host_blocks):
                self._enlarge()
        self._host_blocks[start : start + len(table)] = table
        self._ranges.tables[range_id] = start
        self._ranges.table_sizes[range_id] = size
        self._ranges.num_blocks[range_id] = len(table)
        self._dirty.append((start, start + len(table)))
        self._structure_changed = True

    def _release_table(self, range_id: int) -> None:
        size = int(self._ranges.table_sizes[range_id])
        self._free_tables.setdefault(size, []).append(int(self._ranges.tables[range_id]))
        self._structure_changed = True

    def _enlarge(self) -> None:
        size = 2 * len(self._host_blocks)
        while size < self._end:
            size *= 2
        self._host_blocks = np.concatenate((self._host_blocks, np.zeros(size - len(self._host_blocks), np.int32)))
        self.blocks = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._dirty = [(0, self._end)]

    def _send_tables(self) -> None:
        if not self._dirty:
            return
        start, end = min(run[0] for run in self._dirty), max(run[1] for run in self._dirty)
        if end - start <= _MAX_SENT_ENTRIES:
            # What lies between is there already, and is the same.
            load(self.blocks[start:end], self._host_blocks[start:end])
        else:
            index = np.unique(np.concatenate([np.arange(*run) for run in self._dirty]))
            sent = send(np.stack((index, self._host_blocks[index])), self._device)
            self.blocks.index_copy_(0, sent[0], sent[1].to(torch.int32))
        self._dirty = []


def _num_equal(one: Sequence[RequestRows], other: Sequence[RequestRows]) -> int:
    """Return the length of the longest common beginning."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(compress(count(), map(is_not, one, other)), most)  # a list and a tuple are not equal
