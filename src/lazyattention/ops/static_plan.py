# SPDX-License-Identifier: Apache-2.0
"""A plan whose tensors never move, so that a captured CUDA graph runs whatever step was loaded last."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lazyattention.ops._layout import LayoutSpec, PlanArrays
from lazyattention.ops.device_plan import IDLE_APART_TASK, Layout, PackedLayout, lay_out, load, pack, send
from lazyattention.ops.plan import AttentionPlan
from lazyattention.ops.plan_builder import HostStep

# More tokens than any group of rows has: none goes to chunk_prefill.
_NEVER = 2**30


@dataclass(frozen=True, slots=True)
class StaticCapacity:
    """How large a step may be.

    Attributes:
        num_tokens: Query tokens, exactly; shorter steps are padded.
        max_rows: Rows (tokens x ranges they look at) of shared_decode.
        max_few_tasks: Tasks of shared_decode over ranges with few rows; every replay launches them all.
        max_many_tasks: Tasks of shared_decode over ranges with many rows; 0 = no launch for them.
        max_parts: Partial states.
        has_unturned: Room for tasks over unturned keys, too.
        max_prefill_tasks: Tasks of chunk_prefill; every replay launches them all. 0 = no launch for them: all rows go
            through shared_decode, however many a request has.
        max_apart_tasks: Likewise, of its kernel for tiles without a mask, whose idle tasks cost a tile each.
        max_tiles: Key tiles of chunk_prefill.
        max_masked: Key tiles with a mask, counted for each query tile that sees them.
    """

    num_tokens: int
    max_rows: int
    max_few_tasks: int
    max_many_tasks: int
    max_parts: int
    has_unturned: bool = False
    max_prefill_tasks: int = 0
    max_apart_tasks: int = 0
    max_tiles: int = 0
    max_masked: int = 0

    def sizes(self, spec: LayoutSpec) -> dict[str, int]:
        """Return elements to reserve per array of a packed layout."""
        unturned = int(self.has_unturned)
        has_prefill = int(self.max_prefill_tasks > 0)
        return {
            "counts": 4,
            "merge_tokens": self.num_tokens,
            "merge_starts": self.num_tokens + 1,
            "blocks": 0,
            "causal.cum_seqs": 0,
            "causal.parts": 0,
            "decode0.many": self.max_many_tasks * 8,
            "decode0.few": self.max_few_tasks * 8,
            "decode0.rows": self.max_rows * 4,
            "decode1.few": self.max_few_tasks * 8 * unturned,
            "decode1.rows": self.max_rows * 4 * unturned,
            "prefill0.tasks": self.max_prefill_tasks * 10,
            "prefill0.apart": self.max_apart_tasks * 10 * int(spec.has_unmasked_prefill),
            "prefill0.tiles": self.max_tiles * 8,
            "prefill0.segments": (self.max_tiles + 1) * has_prefill,
            "prefill0.masked": self.max_masked,
            "prefill0.part_bases": self.num_tokens * has_prefill,
        } | {f"prefill1.{name}": 0 for name in ("tasks", "apart", "tiles", "segments", "masked", "part_bases")}

    def holding(self, needs: dict[str, int]) -> "StaticCapacity":
        """Return this capacity, doubled wherever a step needs more until it suffices."""
        grown = {}
        for name, need in needs.items():
            size = getattr(self, name)
            while size < need:
                size = max(2 * size, 16)
            grown[name] = size
        return replace(self, **grown)


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
        num_inputs: int = 0,
    ) -> None:
        """Reserve the memory.

        Args:
            capacity: How large a step may be.
            specs: One per kind of layer, from `layout_spec`, by which layers ask for their part of the plan.
            block_size: Tokens per KV block.
            blocks: The builder's block tables; when it moves, this plan is stale.
            has_store_turns: Keys are turned before they are stored.
            num_inputs: Size of `inputs`, int64, whatever else a step brings: it goes over in the same copy.
        """
        self.capacity = capacity
        self._version = -1
        self._blocks = blocks
        num_tokens, device = capacity.num_tokens, blocks.device
        self._loaded = torch.zeros(3 * num_tokens + num_inputs, dtype=torch.int64, device=device)
        columns, self.inputs = self._loaded[: 3 * num_tokens].view(3, -1), self._loaded[3 * num_tokens :]
        columns[1] = -1
        nothing, no_flags = np.empty(0, np.int64), np.empty(0, bool)
        empty = PlanArrays(
            nothing, nothing, nothing, nothing, nothing, nothing, no_flags, nothing, no_flags, np.empty(0, np.int32)
        )
        positions = np.zeros(num_tokens, np.int64)
        # Layers ask by their own spec, however this plan is laid out.
        self._laid_out = {
            spec: spec if capacity.max_prefill_tasks else replace(spec, prefill_min_tokens=_NEVER) for spec in specs
        }
        self._flats: dict[LayoutSpec, torch.Tensor] = {}
        device_plans = {}
        for spec in self._laid_out:
            packed = self._pack(lay_out(empty, positions, self._laid_out[spec]), spec)
            self._flats[spec] = send(packed.flat, device)
            device_plans[spec] = packed.plan(self._flats[spec], blocks, spec)
        rows = torch.empty(0, dtype=torch.int64, device=device)
        self.plan = AttentionPlan(
            num_tokens=num_tokens,
            block_size=block_size,
            positions=columns[0],
            slot_mapping=columns[1],
            store_turns=columns[2] if has_store_turns else None,
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

    def load(self, step: HostStep, blocks: torch.Tensor, inputs: np.ndarray | None = None) -> bool:
        """Make `plan` the plan of this step.

        Args:
            step: From the builder.
            blocks: The builder's block tables now.
            inputs: int64 `[num_inputs]`, or None to fill `inputs` with 0.

        Returns:
            False, and `plan` is left as it was, if the step does not fit or the block tables have moved: then run the
            step without the graph.
        """
        num_real, num_tokens = len(step.positions), self.capacity.num_tokens
        turns_fit = step.store_turns is None or self.plan.store_turns is not None
        if num_real > num_tokens or blocks is not self._blocks or not turns_fit:
            return False
        loaded = np.zeros(len(self._loaded), np.int64)
        columns = loaded[: 3 * num_tokens].reshape(3, -1)
        columns[1] = -1
        columns[0, :num_real], columns[1, :num_real] = step.positions, step.slot_mapping
        if step.store_turns is not None:
            columns[2, :num_real] = step.store_turns
        if not self.load_layout(step):
            return False
        if inputs is not None:
            loaded[3 * num_tokens :] = inputs
        load(self._loaded, loaded)
        return True

    def load_layout(self, step: HostStep) -> bool:
        """Load what steps of equal versions share; False, and all is left as it was, if it does not fit."""
        if step.version == self._version:
            return True
        positions = self._padded(step.positions)
        flats = []
        for spec, laid_out in self._laid_out.items():
            layout = lay_out(step.arrays, positions, laid_out)
            if not self._fits(layout):
                return False
            flats.append(self._pack(layout, spec).flat)
        for flat, host in zip(self._flats.values(), flats, strict=True):
            load(flat, host)
        self._version = step.version
        return True

    def capacity_for(self, step: HostStep) -> StaticCapacity:
        """Return this plan's capacity, grown so that the step fits if it has as few tokens."""
        positions, capacity = self._padded(step.positions), self.capacity
        for laid_out in self._laid_out.values():
            capacity = capacity.holding(_needs(lay_out(step.arrays, positions, laid_out)))
        return capacity

    def _padded(self, positions: np.ndarray) -> np.ndarray:
        padded = np.zeros(max(self.capacity.num_tokens, len(positions)), np.int64)
        padded[: len(positions)] = positions
        return padded

    def _fits(self, layout: Layout) -> bool:
        capacity = self.capacity
        return (
            all(need <= getattr(capacity, name) for name, need in _needs(layout).items())
            and (capacity.has_unturned or len(layout.decode[1].rows) == 0)
            and len(layout.prefill[1].row_tokens) == 0
        )

    def _pack(self, layout: Layout, spec: LayoutSpec) -> PackedLayout:
        packed = pack(layout, None, self.capacity.sizes(spec), self.capacity.max_parts)
        start, size = packed.offsets["prefill0.apart"]
        packed.flat[start : start + size].reshape(-1, 10)[len(layout.prefill[0].apart.tasks) :] = IDLE_APART_TASK
        # The next step's keys may lie anywhere.
        return replace(packed, prefill_is_contiguous=(False, False))


def _needs(layout: Layout) -> dict[str, int]:
    """Return what a layout needs of each capacity."""
    turned, unturned, prefill = *layout.decode, layout.prefill[0]
    return {
        "max_rows": max(len(turned.rows), len(unturned.rows)),
        "max_few_tasks": max(len(turned.few), len(unturned.few)),
        "max_many_tasks": len(turned.many),
        "max_parts": layout.num_parts,
        "max_prefill_tasks": len(prefill.tasks.tasks),
        "max_apart_tasks": len(prefill.apart.tasks),
        "max_tiles": len(prefill.tiles),
        "max_masked": len(prefill.masked),
    }
