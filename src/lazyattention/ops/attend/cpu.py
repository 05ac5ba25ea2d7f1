# SPDX-License-Identifier: Apache-2.0
"""Attention of every query row over its KV range on the CPU: one call of ATen's flash kernel per work item.

Query heads that share a KV head fold into the query dimension, so that keys are neither repeated nor read twice. What
the flash kernel cannot say (sliding windows that bite, soft caps) runs in plain PyTorch, as does everything on a
torch build without the operator.
"""

import torch

from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.plan import AttentionPlan, WorkItem
from lazyattention.ops.rotary import LayerRotary, turn

_HAS_FLASH = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
# Rows per tile where scores are materialised: bounds memory at TILE_ROWS * num_keys * num_q_heads scores.
_TILE_ROWS = 256


def attend_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    rotary: LayerRotary,
    options: AttendOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attend`; any device and float dtype works here, the CPU is what it is fast on."""
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_rows = q if plan.is_single_part else q.index_select(0, plan.row_tokens)
    if plan.row_temperatures is not None:
        q_rows = q_rows / plan.row_temperatures.to(q.dtype)[:, None, None]
    if plan.has_deltas and rotary.inv_freq is not None:
        turned = turn(q_rows, *plan.query_turns(rotary, accumulate), rotary)
    else:
        turned = q_rows
    outputs = q.new_empty((q_rows.shape[0], q.shape[1], v_cache.shape[3]))
    lses = torch.empty((q_rows.shape[0], q.shape[1]), dtype=accumulate, device=q.device)
    flat_k = k_cache.view(-1, *k_cache.shape[2:])
    flat_v = v_cache.view(-1, *v_cache.shape[2:])
    for item in plan.items:
        rows = slice(item.row_start, item.row_end)
        # KV may be stored in another dtype than q's; it is read in q's.
        k, v = _gather(flat_k, item).to(q.dtype), _gather(flat_v, item).to(q.dtype)
        if item.kv_range.keys_turned:
            item_q = turned[rows]
        else:
            item_q = q_rows[rows]
            if rotary.inv_freq is not None:
                k = turn(k, *plan.key_read_turns(item, rotary, accumulate), rotary)
        window = options.sliding_window
        window_bites = window is not None and item.max_distance >= window
        if window_bites and window is not None and item.min_distance >= window:
            outputs[rows].zero_()
            lses[rows].fill_(float("-inf"))
        elif window_bites or options.logit_softcap is not None or not (_HAS_FLASH and q.is_cpu):
            _attend_masked(item_q, k, v, plan, item, options, outputs[rows], lses[rows])
        elif item.is_causal:
            _attend_causal(item_q, k, v, options.softmax_scale, outputs[rows], lses[rows])
        else:
            _attend_all(item_q, k, v, options.softmax_scale, outputs[rows], lses[rows])
    if plan.row_biases is not None:
        lses += plan.row_biases.to(lses.dtype)[:, None]  # as if added to each score
    return outputs, lses


def _gather(flat_cache: torch.Tensor, item: WorkItem) -> torch.Tensor:
    """Return the item's keys or values `[num_keys, num_kv_heads, head_dim]`; a view when its blocks are consecutive."""
    if item.slots is None:
        return flat_cache[item.contiguous_start : item.contiguous_start + item.kv_range.num_tokens]
    return flat_cache.index_select(0, item.slots)


def _attend_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, output: torch.Tensor, lse: torch.Tensor
) -> None:
    """Every row sees every key. Query heads of one KV head become rows: `[num_kv_heads, rows * group, head_dim]`."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_q_heads // num_kv_heads
    folded = q.view(num_rows, num_kv_heads, group, head_dim).transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)
    part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], 0.0, False, scale=softmax_scale
    )
    output.copy_(part[0].view(num_kv_heads, num_rows, group, -1).transpose(0, 1).reshape(output.shape))
    lse.copy_(part_lse[0].view(num_kv_heads, num_rows, group).transpose(0, 1).reshape(lse.shape))


def _attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, output: torch.Tensor, lse: torch.Tensor
) -> None:
    """Rows are the range's last tokens: they see all earlier keys, and their own causally. Two parts, then merged."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_q_heads // num_kv_heads
    num_before = k.shape[0] - num_rows
    # [num_kv_heads, group, num_rows, head_dim] against keys repeated by a zero stride, so that rows stay in order.
    by_group = q.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    own_k, own_v = (
        x[num_before:].transpose(0, 1)[:, None].expand(num_kv_heads, group, num_rows, x.shape[-1]) for x in (k, v)
    )
    part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        by_group, own_k, own_v, 0.0, True, scale=softmax_scale
    )
    output.copy_(part.permute(2, 0, 1, 3).reshape(output.shape))
    lse.copy_(part_lse.permute(2, 0, 1).reshape(lse.shape))
    if num_before:
        before, before_lse = torch.empty_like(output), torch.empty_like(lse)
        _attend_all(q, k[:num_before], v[:num_before], softmax_scale, before, before_lse)
        both = torch.logaddexp(lse, before_lse)
        output.mul_((lse - both).exp()[..., None]).add_(before * (before_lse - both).exp()[..., None])
        lse.copy_(both)


def _attend_masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    item: WorkItem,
    options: AttendOptions,
    output: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attend with explicit visibility, in tiles of rows. Positions decide; slots never do."""
    num_kv_heads = k.shape[1]
    group = q.shape[1] // num_kv_heads
    seen_from = plan.positions[plan.row_tokens[item.row_start : item.row_end]]
    seen_from = seen_from - plan.row_deltas[item.row_start : item.row_end]  # the query's place among stored positions
    first = item.kv_range.first_position
    stored_at = torch.arange(first, first + item.kv_range.num_tokens, device=q.device)
    k_heads, v_heads = k.transpose(0, 1).to(lse.dtype), v.transpose(0, 1).to(lse.dtype)
    for start in range(0, q.shape[0], _TILE_ROWS):
        tile = q[start : start + _TILE_ROWS]
        folded = tile.view(len(tile), num_kv_heads, group, -1).transpose(0, 1).reshape(num_kv_heads, -1, tile.shape[-1])
        scores = folded.to(lse.dtype) @ k_heads.transpose(1, 2) * options.softmax_scale
        if options.logit_softcap is not None:
            scores = options.logit_softcap * torch.tanh(scores / options.logit_softcap)
        distance = seen_from[start : start + _TILE_ROWS, None] - stored_at
        visible = distance >= 0
        if options.sliding_window is not None:
            visible &= distance < options.sliding_window
        scores.masked_fill_(~visible.repeat_interleave(group, 0), float("-inf"))
        tile_lse = scores.logsumexp(-1)  # [num_kv_heads, rows * group]
        # A row without visible keys: -inf - -inf is nan; with a finite pivot its weights are 0.
        pivot = tile_lse.masked_fill(tile_lse == float("-inf"), 0.0)
        part = (scores - pivot[..., None]).exp() @ v_heads
        shape = (num_kv_heads, len(tile), group)
        lse[start : start + _TILE_ROWS] = tile_lse.view(shape).transpose(0, 1).reshape(len(tile), -1)
        merged = part.view(*shape, -1).transpose(0, 1).reshape(len(tile), num_kv_heads * group, -1)
        output[start : start + _TILE_ROWS] = merged.to(output.dtype)
