# SPDX-License-Identifier: Apache-2.0
"""The device form of an attention plan: flat int32 arrays that kernels index, sent over in one copy.

Built once per step and per kind of layer (heads, head_dim, window). What the kernels find in it:

- shared_decode: `tasks [n, 8]` = row_start, num_rows, first block-table entry, key_start, key_end, first_position,
  part, slot of key_start if the keys lie in consecutive slots, else -1; `rows [n, 4]` = token, position_delta, first part, 0. Key indices count from the range's first token. A
  task's keys end at `key_end` or at the last key its rows may see, so a text can grow under an unchanged plan.
- chunk_prefill: `tiles [n, 8]` = first slot, first block-table entry of the range, key_start, position of the first key,
  number of keys, position_delta, 0, 0; `tasks [n, 10]` = row_start, num_tokens, token_start, tiles without a mask from
  .. to, entries of `masked` from .. to, segments from .. to, part (-1 = write the output itself). `apart` holds tasks
  of the same form that have no masked tiles, for a kernel of their own. A task of zeros does nothing; the kernel for
  tiles without a mask needs a tile, so that there IDLE_APART_TASK does nothing: the first tile, for no token.
- causal_prefill: `cum_seqs` = ends of the sequences of a batch, counted from its first token; `parts` = part of each
  token.
- merge_states: parts of one token are consecutive; merge `i` covers parts `merge_starts[i] : merge_starts[i + 1]`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lazyattention.ops._causal_layout import CausalLayout, lay_out_causal
from lazyattention.ops._decode_layout import DecodeLayout, lay_out_decode
from lazyattention.ops._layout import LayoutSpec, PlanArrays, number_parts
from lazyattention.ops._prefill_layout import PrefillLayout, lay_out_prefill
from lazyattention.ops._tiles import TileShape

_ALL, _NONE = slice(None), slice(0)
_NOWHERE = (0, 0)
IDLE_APART_TASK = (0, 0, 0, 0, 1, 0, 0, 0, 1, 0)


@dataclass(frozen=True, slots=True)
class DecodeTasks:
    """What one launch of shared_decode works on; arrays are described in the module's docstring."""

    tasks: torch.Tensor
    rows: torch.Tensor
    blocks: torch.Tensor
    num_tasks: torch.Tensor
    keys_turned: bool
    shape: TileShape


@dataclass(frozen=True, slots=True)
class PrefillTasks:
    """What one launch of chunk_prefill works on; arrays are described in the module's docstring."""

    tasks: torch.Tensor
    apart: torch.Tensor
    tiles: torch.Tensor
    segments: torch.Tensor
    masked: torch.Tensor
    part_bases: torch.Tensor
    blocks: torch.Tensor
    keys_turned: bool
    is_contiguous: bool
    shape: TileShape


@dataclass(frozen=True, slots=True)
class CausalBatch:
    """What one launch of causal_prefill works on: consecutive tokens, one or more sequences.

    Attributes:
        token_start: First token.
        num_tokens: Tokens of all its sequences.
        num_seqs: Sequences.
        max_len: Length of the longest.
        cum_seqs: int32 `[num_seqs + 1]`.
        parts: int64 `[num_tokens]`, or None if the output is written at once.
    """

    token_start: int
    num_tokens: int
    num_seqs: int
    max_len: int
    cum_seqs: torch.Tensor
    parts: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Everything the kernels of one kind of layer need for one step.

    Attributes:
        decode: Launches of shared_decode: over turned keys with many rows each and with few, then over unturned keys;
            only those that have tasks.
        prefill: Launches of chunk_prefill, likewise.
        causal: Launches of causal_prefill.
        num_parts: Rows of the buffer of partial states.
        num_merges: int32 `[1]`, merges that are real.
        merge_tokens: int32 `[max_merges]`.
        merge_starts: int32 `[max_merges + 1]`.
    """

    decode: tuple[DecodeTasks, ...]
    prefill: tuple[PrefillTasks, ...]
    causal: tuple[CausalBatch, ...]
    num_parts: int
    num_merges: torch.Tensor
    merge_tokens: torch.Tensor
    merge_starts: torch.Tensor


def build_device_plan(
    arrays: PlanArrays,
    positions: np.ndarray,
    spec: LayoutSpec,
    device: torch.device,
    blocks: torch.Tensor | None = None,
    slots: np.ndarray | None = None,
) -> DevicePlan:
    """Lay out a step for one kind of layer and send it to the device without waiting for it.

    Args:
        arrays: The step's row groups and ranges.
        positions: int64 `[num_tokens]`, true positions.
        spec: Heads, tiles and window of the layer.
        device: Where the kernels run.
        blocks: Block tables that are on the device already, or None to send `arrays.blocks`.
        slots: int64 `[num_tokens]`, where new keys go; None = nothing for causal_prefill.
    """
    layout = lay_out(arrays, positions, spec, slots)
    buffer = pack(layout, None if blocks is not None else arrays.blocks)
    return buffer.plan(send(buffer.flat, device), blocks, spec)


@dataclass(frozen=True, slots=True)
class Layout:
    """A step laid out on the host: decode and prefill work over turned and unturned keys, causal work, the merges."""

    decode: tuple[DecodeLayout, DecodeLayout]
    prefill: tuple[PrefillLayout, PrefillLayout]
    causal: CausalLayout
    num_parts: int
    merge_tokens: np.ndarray
    merge_starts: np.ndarray


def lay_out(arrays: PlanArrays, positions: np.ndarray, spec: LayoutSpec, slots: np.ndarray | None = None) -> Layout:
    """Divide the step between the kernels and number the partial states."""
    causal, is_causal = lay_out_causal(arrays, positions, slots, spec)
    # Groups of shared_decode and of chunk_prefill, over turned and over unturned keys.
    chosen: list[np.ndarray | slice] = [_ALL, _NONE, _NONE, _NONE]
    longest = int(arrays.group_sizes.max(initial=0))
    if len(causal.batches) or longest >= spec.prefill_min_tokens or not arrays.range_turned.all():
        is_prefill = arrays.group_sizes >= spec.prefill_min_tokens
        is_turned = arrays.range_turned[arrays.group_ranges]
        is_decode = ~(is_prefill | is_causal)
        is_prefill &= ~is_causal
        chosen = [is_decode & is_turned, is_decode & ~is_turned, is_prefill & is_turned, is_prefill & ~is_turned]
    decode = (
        lay_out_decode(arrays, chosen[0], positions, spec, True),
        lay_out_decode(arrays, chosen[1], positions, spec, False),
    )
    prefill = (
        lay_out_prefill(arrays, chosen[2], positions, spec, True),
        lay_out_prefill(arrays, chosen[3], positions, spec, False),
    )
    numbering = number_parts(len(positions), [*decode, *prefill, causal])
    return Layout(decode, prefill, causal, *numbering)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A layout as one flat int32 array, and where in it each array lies."""

    flat: np.ndarray
    offsets: dict[str, tuple[int, int]]
    num_parts: int
    prefill_is_contiguous: tuple[bool, bool]
    causal: CausalLayout

    def plan(self, flat: torch.Tensor, blocks: torch.Tensor | None, spec: LayoutSpec) -> DevicePlan:
        """Return the plan as views of `flat`, the same array on the device."""

        def view(name: str, columns: int = 0) -> torch.Tensor:
            start, size = self.offsets.get(name, _NOWHERE)
            if columns:
                return flat.as_strided((size // columns, columns), (columns, 1), start)
            return flat[start : start + size]

        tables = view("blocks") if blocks is None else blocks
        counts = view("counts")
        rows = [view(f"decode{i}.rows", 4) if f"decode{i}.rows" in self.offsets else flat[:0] for i in range(2)]
        decode = tuple(
            DecodeTasks(view(f"decode{i}.{kind}", 8), rows[i], tables, counts[j : j + 1], i == 0, shape)
            for i, kind, j, shape in _decode_launches(spec)
            if self.offsets.get(f"decode{i}.{kind}", _NOWHERE)[1]
        )
        prefill = tuple(
            PrefillTasks(
                view(f"prefill{i}.tasks", 10),
                view(f"prefill{i}.apart", 10),
                view(f"prefill{i}.tiles", 8),
                view(f"prefill{i}.segments"),
                view(f"prefill{i}.masked"),
                view(f"prefill{i}.part_bases"),
                tables,
                i == 0,
                self.prefill_is_contiguous[i],
                spec.prefill if i == 0 else spec.prefill_unturned,
            )
            for i in range(2)
            if self.offsets.get(f"prefill{i}.tasks", _NOWHERE)[1] or self.offsets.get(f"prefill{i}.apart", _NOWHERE)[1]
        )
        causal = self._causal(view("causal.cum_seqs"), view("causal.parts")) if len(self.causal.batches) else ()
        return DevicePlan(
            decode, prefill, causal, self.num_parts, counts[3:], view("merge_tokens"), view("merge_starts")
        )

    def _causal(self, cum_seqs: torch.Tensor, parts: torch.Tensor) -> tuple[CausalBatch, ...]:
        batches, first_seq, first_row = [], 0, 0
        for (start, size, num_seqs), is_direct in zip(
            self.causal.batches.tolist(), self.causal.is_direct.tolist(), strict=True
        ):
            ends = slice(first_seq, first_seq + num_seqs + 1)
            rows = None if is_direct else parts[first_row : first_row + size].to(torch.int64)
            max_len = int(np.diff(self.causal.cum_seqs[ends]).max())
            batches.append(CausalBatch(start, size, num_seqs, max_len, cum_seqs[ends], rows))
            first_seq, first_row = ends.stop, first_row + size
        return tuple(batches)


def pack(
    layout: Layout,
    blocks: np.ndarray | None,
    capacities: dict[str, int] | None = None,
    max_parts: int | None = None,
) -> PackedLayout:
    """Put all arrays of a layout into one, each at a 16-byte border.

    Args:
        layout: From `lay_out`.
        blocks: Block tables to send along, or None.
        capacities: Elements reserved per array; None = as many as there are. Every capacity must suffice.
        max_parts: Rows to reserve in the buffer of partial states; None = as many as there are.
    """
    named = {name: array for name, array in _named_arrays(layout, blocks) if array.size}
    sizes = {name: array.size for name, array in named.items()} if capacities is None else capacities
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name, size in sizes.items():
        offsets[name] = (end, size)
        end += -(-size // 4) * 4
    flat = np.zeros(end, dtype=np.int32)
    for name, array in named.items():
        start, size = offsets[name]
        assert array.size <= size, name
        flat[start : start + array.size] = array.reshape(-1)
    contiguous = (layout.prefill[0].is_contiguous, layout.prefill[1].is_contiguous)
    return PackedLayout(flat, offsets, layout.num_parts if max_parts is None else max_parts, contiguous, layout.causal)


def _decode_launches(spec: LayoutSpec) -> list[tuple[int, str, int, TileShape]]:
    """Return, per launch of shared_decode: which layout, which of its tasks, where its count is, and its tiles."""
    return [
        (0, "many", 0, spec.decode_many),
        (0, "few", 1, spec.decode_few),
        (1, "few", 2, spec.decode_unturned),
    ]


def _named_arrays(layout: Layout, blocks: np.ndarray | None) -> Iterator[tuple[str, np.ndarray]]:
    turned, unturned = layout.decode
    counts = [len(turned.many), len(turned.few), len(unturned.few), len(layout.merge_tokens)]
    yield "counts", np.array(counts, dtype=np.int32)
    yield "decode0.many", turned.many
    yield "merge_tokens", layout.merge_tokens
    yield "merge_starts", layout.merge_starts
    if blocks is not None:
        yield "blocks", blocks
    if len(layout.causal.batches):
        yield "causal.cum_seqs", layout.causal.cum_seqs
        yield "causal.parts", layout.causal.parts
    for i, decode in enumerate(layout.decode):
        if len(decode.rows):
            yield f"decode{i}.few", decode.few
            yield f"decode{i}.rows", decode.rows
    for i, prefill in enumerate(layout.prefill):
        if len(prefill.row_tokens):
            yield f"prefill{i}.tasks", prefill.tasks.tasks
            yield f"prefill{i}.apart", prefill.apart.tasks
            yield f"prefill{i}.tiles", prefill.tiles
            yield f"prefill{i}.segments", prefill.segments
            yield f"prefill{i}.masked", prefill.masked
            yield f"prefill{i}.part_bases", prefill.part_bases


def load(target: torch.Tensor, array: np.ndarray) -> None:
    """Overwrite a tensor with an array of its dtype and size, without waiting where that is possible."""
    host = torch.from_numpy(array)
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device; from pinned memory and without waiting when that is a GPU."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
