# SPDX-License-Identifier: Apache-2.0
"""A decode plan whose tensors never move, so that a captured CUDA graph runs whatever step was loaded last."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lazyattention.ops._decode_layout import DecodeLayout
from lazyattention.ops._layout import LayoutSpec, PlanArrays
from lazyattention.ops.device_plan import lay_out, pack, send
from lazyattention.ops.plan import AttentionPlan
from lazyattention.ops.plan_builder import HostStep


@dataclass(frozen=True, slots=True)
class StaticCapacity:
    """How large a step may be.

    Attributes:
        num_tokens: Query tokens, exactly; shorter steps are padded.
        max_rows: Rows (tokens x ranges they look at).
        max_tasks: Tasks of shared_decode over ranges with few rows, and again over ranges with many; every replay
            launches them all.
        max_parts: Partial states.
        has_unturned: Room for tasks over unturned keys, too.
    """

    num_tokens: int
    max_rows: int
    max_tasks: int
    max_parts: int
    has_unturned: bool = False

    def sizes(self) -> dict[str, int]:
        """Return elements to reserve per array of a packed layout."""
        unturned = int(self.has_unturned)
        prefill = {
            f"prefill{i}.{name}": 0 for i in range(2) for name in ("tasks", "apart", "tiles", "masked", "part_bases")
        }
        return prefill | {
            "counts": 4,
            "merge_tokens": self.num_tokens,
            "merge_starts": self.num_tokens + 1,
            "blocks": 0,
            "decode0.many": self.max_tasks * 8,
            "decode0.few": self.max_tasks * 8,
            "decode0.rows": self.max_rows * 4,
            "decode1.few": self.max_tasks * 8 * unturned,
            "decode1.rows": self.max_rows * 4 * unturned,
            "prefill0.segments": 0,
            "prefill1.segments": 0,
        }


class StaticPlan:
    """Holds `plan`, to be captured once per kind of step, and loads steps into it.

    Protocol: make it, `load` a step, run the model with `plan` under capture; from then on `load` and replay. `load`
    only issues copies on the current stream, which must be the one the graph is replayed on.
    """

    def __init__(
        self,
        capacity: StaticCapacity,
        specs: Sequence[LayoutSpec],
        *,
        block_size: int,
        blocks: torch.Tensor,
        has_store_turns: bool = False,
    ) -> None:
        """Reserve the memory.

        Args:
            capacity: How large a step may be.
            specs: One per kind of layer, from `layout_spec`.
            block_size: Tokens per KV block.
            blocks: The builder's block tables; when it moves, this plan is stale.
            has_store_turns: Keys are turned before they are stored.
        """
        self.capacity = capacity
        self._specs = tuple(specs)
        self._version = -1
        self._blocks = blocks
        num_tokens, device = capacity.num_tokens, blocks.device
        self._columns = torch.zeros((3, num_tokens), dtype=torch.int64, device=device)
        self._columns[1] = -1
        nothing, no_flags = np.empty(0, np.int64), np.empty(0, bool)
        empty = PlanArrays(
            nothing, nothing, nothing, nothing, nothing, nothing, no_flags, nothing, no_flags, np.empty(0, np.int32)
        )
        positions = np.zeros(num_tokens, np.int64)
        self._flats: dict[LayoutSpec, torch.Tensor] = {}
        device_plans = {}
        for spec in self._specs:
            packed = pack(lay_out(empty, positions, spec), None, capacity.sizes(), capacity.max_parts)
            self._flats[spec] = send(packed.flat, device)
            device_plans[spec] = packed.plan(self._flats[spec], blocks, spec)
        rows = torch.empty(0, dtype=torch.int64, device=device)
        self.plan = AttentionPlan(
            num_tokens=num_tokens,
            block_size=block_size,
            positions=self._columns[0],
            slot_mapping=self._columns[1],
            store_turns=self._columns[2] if has_store_turns else None,
            items=[],
            row_tokens=rows,
            row_deltas=rows,
            has_deltas=True,
            is_single_part=False,
            device=device,
            arrays=empty,
            host_positions=positions,
            blocks=blocks,
            _device_plans=device_plans,
        )

    def load(self, step: HostStep, blocks: torch.Tensor) -> bool:
        """Make `plan` the plan of this step.

        Args:
            step: From the builder; at most `capacity.num_tokens` tokens, few per request.
            blocks: The builder's block tables now.

        Returns:
            False, and `plan` is left as it was, if the step does not fit or the block tables have moved: then run the
            step without the graph.
        """
        num_real, num_tokens = len(step.positions), self.capacity.num_tokens
        turns_fit = step.store_turns is None or self.plan.store_turns is not None
        if num_real > num_tokens or blocks is not self._blocks or not turns_fit:
            return False
        columns = np.zeros((3, num_tokens), np.int64)
        columns[1] = -1
        columns[0, :num_real], columns[1, :num_real] = step.positions, step.slot_mapping
        if step.store_turns is not None:
            columns[2, :num_real] = step.store_turns
        if step.version != self._version:
            flats = []
            for spec in self._specs:
                layout = lay_out(step.arrays, columns[0], spec)
                if not self._fits(layout.num_parts, [len(part.row_tokens) for part in layout.prefill], layout.decode):
                    return False
                flats.append(pack(layout, None, self.capacity.sizes(), self.capacity.max_parts).flat)
            for spec, flat in zip(self._specs, flats, strict=True):
                self._flats[spec].copy_(send(flat, self._blocks.device), non_blocking=True)
            self._version = step.version
        self._columns.copy_(send(columns, self._blocks.device), non_blocking=True)
        return True

    def _fits(self, num_parts: int, prefill_rows: Sequence[int], decode: Sequence[DecodeLayout]) -> bool:
        capacity = self.capacity
        return (
            num_parts <= capacity.max_parts
            and not any(prefill_rows)
            and (capacity.has_unturned or len(decode[1].rows) == 0)
            and all(
                max(len(d.many), len(d.few)) <= capacity.max_tasks and len(d.rows) <= capacity.max_rows for d in decode
            )
        )
