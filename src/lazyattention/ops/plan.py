# SPDX-License-Identifier: Apache-2.0
"""Plan once per step: which query rows look at which stored KV, and turned by how much.

The plan is a list of work items. One work item is one KV range with all the query rows of the step that look at it,
whichever request they belong to; each row carries its own position_delta. So a range is read once per step.

Conventions, stated here and nowhere else:
- key `j` of a range was stored at position `first_position + j` and stands, for a given row, at
  `first_position + j + position_delta`;
- it is visible to a query at position `p` exactly when it stands at or before `p` (and within the sliding window);
- the score is right once the query is turned by `-position_delta` (keys stored turned), or once the key is turned by
  where it stands (keys stored unturned).

A plan holds its work in one of two forms: as items (the CPU), or as flat arrays from which each kind of layer gets its
device plan when it first runs (the GPU kernels).
"""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from lazyattention.ops._layout import LayoutSpec, PlanArrays
from lazyattention.ops.device_plan import DevicePlan, build_device_plan, send
from lazyattention.ops.rotary import LayerRotary, turn_table


@dataclass(slots=True)
class KVRange:
    """Consecutive tokens whose KV lies in blocks: one chunk, or one text span of one request.

    Attributes:
        key: Ranges with equal keys are the same memory and are read together.
        block_ids: Blocks in token order; slots past `num_tokens` in the last one are empty.
        num_tokens: Tokens whose KV is there once this step's KV is stored.
        first_position: Position at which token 0 was stored.
        keys_turned: False when keys are stored without any rotation and must be turned whenever they are read.
    """

    key: Hashable
    block_ids: Sequence[int]
    num_tokens: int
    first_position: int
    keys_turned: bool = True


@dataclass(slots=True)
class RowGroup:
    """Consecutive query tokens of the step that look at one KV range with one position_delta.

    Attributes:
        range_index: Index into the step's ranges.
        token_start: First query token, index into the flat batch.
        num_tokens: Number of query tokens; their positions are consecutive.
        position_delta: What is added to a stored position to get the position here, tokens.
        temperature: What scores are divided by, before any cap.
        bias: What is added to scores after it. The kernels know neither: for items only.
    """

    range_index: int
    token_start: int
    num_tokens: int
    position_delta: int
    temperature: float = 1.0
    bias: float = 0.0


@dataclass(slots=True)
class WorkItem:
    """One KV range and the rows `row_start:row_end` of the plan that look at it.

    Attributes:
        kv_range: The keys and values.
        row_start: First row.
        row_end: One past the last row.
        is_causal: True when some key may stand after some row; then the rows are consecutive tokens that end with the
            range's last token.
        min_distance: Smallest (query position - key position) over all pairs, tokens; negative when is_causal.
        max_distance: Largest.
        position_delta: Delta shared by all rows; only meaningful (and only needed) for unturned keys.
        contiguous_start: First slot when the range's blocks are consecutive in memory, else -1.
        slots: int64 `[num_tokens]` on the plan's device, the slot of each key; None when contiguous.
    """

    kv_range: KVRange
    row_start: int
    row_end: int
    is_causal: bool
    min_distance: int
    max_distance: int
    position_delta: int
    contiguous_start: int
    slots: torch.Tensor | None


@dataclass(slots=True)
class AttentionPlan:
    """Everything attention needs to know about one step; the same object serves every layer.

    Attributes:
        num_tokens: Query tokens in the step.
        block_size: Tokens per KV block.
        positions: int64 `[num_tokens]`, true position of each query token.
        slot_mapping: int64 `[num_tokens]`, slot for each new token's K and V; -1 = do not store.
        store_turns: int64 `[num_tokens]` or None: turn each new key by this before storing it (unturned storage).
        items: Work items; their rows lie in `row_tokens` in item order. Empty in a plan made for the kernels.
        row_tokens: int64 `[num_rows]`, query token of each row.
        row_deltas: int64 `[num_rows]`, position_delta of each row.
        has_deltas: False when every row_delta is 0, so that no query needs turning.
        is_single_part: True when every token has exactly one row, in token order: nothing to merge.
        device: Where the tensors live.
        arrays: The step as flat arrays, in a plan made for the kernels, else None.
        host_positions: As positions, on the host.
        host_slots: As slot_mapping, on the host; None = nothing goes through causal_prefill.
        blocks: int32, the block tables of `arrays` on the device, if they are there already.
        row_temperatures: float64 `[num_rows]`, what each row's scores are divided by; None = nothing is.
        row_biases: float64 `[num_rows]`, what is added to them; None likewise.
    """

    num_tokens: int
    block_size: int
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    store_turns: torch.Tensor | None
    items: list[WorkItem]
    row_tokens: torch.Tensor
    row_deltas: torch.Tensor
    has_deltas: bool
    is_single_part: bool
    device: torch.device
    arrays: PlanArrays | None = None
    host_positions: np.ndarray | None = None
    host_slots: np.ndarray | None = None
    blocks: torch.Tensor | None = None
    row_temperatures: torch.Tensor | None = None
    row_biases: torch.Tensor | None = None
    _device_plans: dict[LayoutSpec, DevicePlan] = field(default_factory=dict)
    _tables: dict[tuple[int, str, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def device_plan(self, spec: LayoutSpec) -> DevicePlan:
        """Return the device form for one kind of layer; laid out and sent once."""
        device_plan = self._device_plans.get(spec)
        if device_plan is None:
            assert self.arrays is not None
            assert self.host_positions is not None
            device_plan = build_device_plan(
                self.arrays, self.host_positions, spec, self.device, self.blocks, self.host_slots
            )
            self._device_plans[spec] = device_plan
        return device_plan

    def query_turns(self, rotary: LayerRotary, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin that turn each row's query by minus its delta; computed once per frequency table."""
        return self._table("query", rotary, -self.row_deltas, dtype)

    def key_store_turns(self, rotary: LayerRotary, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin that turn each new key before it is stored; call only when `store_turns` is set."""
        assert self.store_turns is not None
        return self._table("store", rotary, self.store_turns, dtype)

    def key_read_turns(
        self, item: WorkItem, rotary: LayerRotary, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin that turn an unturned item's keys to where they stand."""
        first = item.kv_range.first_position + item.position_delta
        where = torch.arange(first, first + item.kv_range.num_tokens, device=self.device)
        return self._table(f"read{item.row_start}", rotary, where, dtype)

    def _table(
        self, use: str, rotary: LayerRotary, deltas: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert rotary.inv_freq is not None
        table_key = (id(rotary.inv_freq), use, dtype)
        if table_key not in self._tables:
            self._tables[table_key] = turn_table(rotary.inv_freq, deltas, dtype)
        return self._tables[table_key]


def make_plan(
    positions: np.ndarray,
    slot_mapping: np.ndarray,
    ranges: Sequence[KVRange],
    row_groups: Sequence[RowGroup],
    *,
    block_size: int,
    store_turns: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    for_kernels: bool | None = None,
) -> AttentionPlan:
    """Group the step's rows by the KV they read and lay them out for the kernels.

    Rows of several requests over one chunk become one work item. Rows over unturned keys share an item only at equal
    position_delta, since there the keys are turned.

    Args:
        positions: int64 `[num_tokens]`, true positions.
        slot_mapping: int64 `[num_tokens]`, -1 = do not store.
        ranges: KV ranges; entries with equal keys are merged.
        row_groups: Which tokens look at which range. Groups over empty ranges are dropped.
        block_size: Tokens per KV block.
        store_turns: int64 `[num_tokens]`: turn new keys by this before storing, or None.
        device: Where the plan's tensors go.
        for_kernels: Keep flat arrays for the kernels in place of items; None = on CUDA devices.

    Raises:
        ValueError: A group has a temperature or a bias, but the plan is for the kernels.
    """
    device = torch.device(device)
    if store_turns is not None and not store_turns.any():
        store_turns = None
    is_scaled = any(group.temperature != 1 or group.bias != 0 for group in row_groups)
    if for_kernels or (for_kernels is None and device.type == "cuda"):
        if is_scaled:
            raise ValueError("kernels know no temperature and no bias; make a plan with for_kernels=False")
        return plan_of_arrays(
            flatten(ranges, row_groups, block_size),
            positions,
            slot_mapping,
            block_size=block_size,
            store_turns=store_turns,
            device=device,
        )
    grouped: dict[Hashable, list[RowGroup]] = {}
    for group in row_groups:
        kv_range = ranges[group.range_index]
        if kv_range.num_tokens == 0 or group.num_tokens == 0:
            continue
        last_key = kv_range.first_position + kv_range.num_tokens - 1 + group.position_delta
        is_causal = last_key > positions[group.token_start]
        # A causal group's rows must be consecutive tokens, so it is an item of its own.
        item_key: Hashable = (kv_range.key, group.token_start) if is_causal else (kv_range.key, None)
        if not kv_range.keys_turned:
            item_key = (item_key, group.position_delta)
        grouped.setdefault(item_key, []).append(group)

    items: list[WorkItem] = []
    tokens: list[np.ndarray] = []
    deltas: list[np.ndarray] = []
    scaling: list[np.ndarray] = []
    num_rows = 0
    for groups in grouped.values():
        kv_range = ranges[groups[0].range_index]
        first_key = kv_range.first_position
        last_key = first_key + kv_range.num_tokens - 1
        row_start = num_rows
        nearest_pairs, farthest_pairs = [], []
        for group in groups:
            tokens.append(np.arange(group.token_start, group.token_start + group.num_tokens))
            deltas.append(np.full(group.num_tokens, group.position_delta))
            scaling.append(np.full((group.num_tokens, 2), (group.temperature, group.bias)))
            num_rows += group.num_tokens
            low = int(positions[group.token_start]) - group.position_delta
            high = low + group.num_tokens - 1
            nearest_pairs.append(low - last_key)
            farthest_pairs.append(high - first_key)
        contiguous_start, slots = _slots_of(kv_range, block_size)
        items.append(
            WorkItem(
                kv_range=kv_range,
                row_start=row_start,
                row_end=num_rows,
                is_causal=min(nearest_pairs) < 0,
                min_distance=min(nearest_pairs),
                max_distance=max(farthest_pairs),
                position_delta=groups[0].position_delta,
                contiguous_start=contiguous_start,
                slots=None if slots is None else torch.from_numpy(slots).to(device),
            )
        )
    row_tokens = np.concatenate(tokens) if tokens else np.empty(0, np.int64)
    row_deltas = np.concatenate(deltas) if deltas else np.empty(0, np.int64)
    num_tokens = len(positions)
    temperatures, biases = torch.from_numpy(np.concatenate(scaling)).to(device).T if is_scaled else (None, None)
    return AttentionPlan(
        num_tokens=num_tokens,
        block_size=block_size,
        positions=_to_device(positions, device),
        slot_mapping=_to_device(slot_mapping, device),
        store_turns=None if store_turns is None else _to_device(store_turns, device),
        items=items,
        row_tokens=_to_device(row_tokens, device),
        row_deltas=_to_device(row_deltas, device),
        has_deltas=bool(row_deltas.any()),
        is_single_part=num_rows == num_tokens and bool((row_tokens == np.arange(num_tokens)).all()),
        device=device,
        row_temperatures=temperatures,
        row_biases=biases,
    )


def plan_of_arrays(
    arrays: PlanArrays,
    positions: np.ndarray,
    slot_mapping: np.ndarray,
    *,
    block_size: int,
    store_turns: np.ndarray | None,
    device: torch.device,
    blocks: torch.Tensor | None = None,
    for_causal: bool = True,
) -> AttentionPlan:
    """Return a plan for the kernels; arguments as in `make_plan` and `AttentionPlan`. `for_causal`: may use causal_prefill."""
    columns = [positions, slot_mapping] if store_turns is None else [positions, slot_mapping, store_turns]
    sent = send(np.array(columns, dtype=np.int64), device).unbind()
    nothing = _nothing(device)
    return AttentionPlan(
        num_tokens=len(positions),
        block_size=block_size,
        positions=sent[0],
        slot_mapping=sent[1],
        store_turns=None if store_turns is None else sent[2],
        items=[],
        row_tokens=nothing,
        row_deltas=nothing,
        has_deltas=False,
        is_single_part=False,
        device=device,
        arrays=arrays,
        host_positions=positions,
        host_slots=slot_mapping if for_causal else None,
        blocks=blocks,
    )


@functools.cache
def _nothing(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device=device)


def flatten(ranges: Sequence[KVRange], row_groups: Sequence[RowGroup], block_size: int) -> PlanArrays:
    """Return ranges, merged by key, and groups as flat arrays; groups over nothing are dropped."""
    id_of_key: dict[Hashable, int] = {}
    ids: list[int] = []
    distinct: list[KVRange] = []
    for kv_range in ranges:
        range_id = id_of_key.setdefault(kv_range.key, len(distinct))
        if range_id == len(distinct):
            distinct.append(kv_range)
        ids.append(range_id)
    groups = np.array(
        [(ids[g.range_index], g.token_start, g.num_tokens, g.position_delta) for g in row_groups], dtype=np.int64
    ).reshape(-1, 4)
    range_tokens = np.array([kv_range.num_tokens for kv_range in distinct], dtype=np.int64)
    groups = groups[(groups[:, 2] > 0) & (range_tokens[groups[:, 0]] > 0)]
    table_lens = np.array([len(kv_range.block_ids) for kv_range in distinct], dtype=np.int64)
    table_ends = np.cumsum(table_lens)
    blocks = np.fromiter(chain.from_iterable(kv_range.block_ids for kv_range in distinct), dtype=np.int32)
    return PlanArrays(
        group_ranges=groups[:, 0].copy(),
        group_starts=groups[:, 1].copy(),
        group_sizes=groups[:, 2].copy(),
        group_deltas=groups[:, 3].copy(),
        range_tokens=range_tokens,
        range_firsts=np.array([kv_range.first_position for kv_range in distinct], dtype=np.int64),
        range_turned=np.array([kv_range.keys_turned for kv_range in distinct], dtype=bool),
        range_tables=table_ends - table_lens,
        range_slots=np.array([first_slot(r.block_ids, block_size) for r in distinct], dtype=np.int64),
        blocks=blocks,
    )


def first_slot(block_ids: Sequence[int] | np.ndarray, block_size: int) -> int:
    """Return the first slot of blocks that are consecutive in memory, else -1."""
    blocks = np.asarray(block_ids)
    if len(blocks) == 0:
        return -1
    first = int(blocks[0])
    is_consecutive = len(blocks) == 1 or bool((blocks[1:] == blocks[:-1] + 1).all())
    return first * block_size if is_consecutive else -1


def _slots_of(kv_range: KVRange, block_size: int) -> tuple[int, np.ndarray | None]:
    """Return (first slot, None) for blocks that are consecutive in memory, else (-1, slots of every key)."""
    num_blocks = -(-kv_range.num_tokens // block_size)
    start = first_slot(kv_range.block_ids[:num_blocks], block_size)
    if start >= 0:
        return start, None
    blocks = np.asarray(kv_range.block_ids[:num_blocks], dtype=np.int64)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[: kv_range.num_tokens]
    return -1, slots


def _to_device(x: np.ndarray, device: torch.device) -> torch.Tensor:
    return send(np.ascontiguousarray(x, dtype=np.int64), device)
