# SPDX-License-Identifier: Apache-2.0
"""Turning inside kernels, and the fused copy + turn in Triton.

How a head turns is told to a kernel by constants: TURN says which of three ways its code takes.
"""

import torch
import triton
import triton.language as tl

from lazyattention.ops._tiles import next_power_of_2
from lazyattention.ops._turn_tables import LOG2_NUM_LOW, NUM_HIGH, NUM_LOW, turn_tables
from lazyattention.ops.rotary import LayerRotary

# The layer has no RoPE: heads are one piece, nothing turns.
TURN_NONE = tl.constexpr(0)
# Pairs are (i, i + head_dim / 2): heads are handled as two halves, whose products add up.
TURN_HALVES = tl.constexpr(1)
# Any other pairing: heads are one piece, and each dimension's partner is loaded beside it.
TURN_PARTNERS = tl.constexpr(2)

_LOW_ROWS = tl.constexpr(NUM_LOW)
_LOG2_LOW_ROWS = tl.constexpr(LOG2_NUM_LOW)
_ZERO_ROW = tl.constexpr(NUM_LOW + NUM_HIGH // 2)


def turn_constants(rotary: LayerRotary, head_dim: int) -> dict[str, int]:
    """Return the constants that tell a kernel how heads of this layer turn."""
    if rotary.inv_freq is None or rotary.rotary_dim == 0:
        way = TURN_NONE
    elif rotary.rotary_dim == head_dim and not rotary.is_interleaved:
        way = TURN_HALVES
    else:
        way = TURN_PARTNERS
    half = rotary.rotary_dim // 2
    return {
        "TURN": way.value,
        "HALF": half,
        "ROTARY_START": rotary.rotary_start,
        "IS_INTERLEAVED": int(rotary.is_interleaved),
        # tl.dot needs at least 16 along the axis it sums.
        "TILE_HALF": max(16, next_power_of_2(half)) if way.value == TURN_HALVES.value else 16,
        "TILE_D": max(16, next_power_of_2(head_dim)),
    }


@triton.jit
def cos_sin(turns_ptr, amounts, pairs, loaded, HALF: tl.constexpr):
    """Cos and sin of `amounts` tokens for rotary pairs `pairs`; the two broadcast against each other.

    `loaded` masks pairs only, so that one amount for all rows stays one row of loads. Amounts of rows that are not
    there must still be amounts the tables have.
    """
    low_ptrs = turns_ptr + (amounts & (_LOW_ROWS - 1)) * (2 * HALF) + pairs
    high_ptrs = turns_ptr + ((amounts >> _LOG2_LOW_ROWS) + _ZERO_ROW) * (2 * HALF) + pairs
    low_cos = tl.load(low_ptrs, mask=loaded, other=1.0)
    low_sin = tl.load(low_ptrs + HALF, mask=loaded, other=0.0)
    high_cos = tl.load(high_ptrs, mask=loaded, other=1.0)
    high_sin = tl.load(high_ptrs + HALF, mask=loaded, other=0.0)
    return low_cos * high_cos - low_sin * high_sin, low_sin * high_cos + low_cos * high_sin


@triton.jit
def partners(dims, ROTARY_START: tl.constexpr, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """For each dimension: does it turn, its rotary pair, its partner dimension, and the sign of the partner's part."""
    inner = dims - ROTARY_START
    turns = (inner >= 0) & (inner < 2 * HALF)
    if IS_INTERLEAVED:
        is_first = inner % 2 == 0
        pairs = inner // 2
        partner_dims = tl.where(is_first, dims + 1, dims - 1)
    else:
        is_first = inner < HALF
        pairs = tl.where(is_first, inner, inner - HALF)
        partner_dims = tl.where(is_first, dims + HALF, dims - HALF)
    sign = tl.where(is_first, -1.0, 1.0)
    return turns, tl.where(turns, pairs, 0), tl.where(turns, partner_dims, dims), tl.where(turns, sign, 0.0)


@triton.jit
def load_turned_halves(
    row_ptrs,  # broadcastable: start of each row
    half_dims,  # broadcastable: 0 .. TILE_HALF - 1 along the other axis
    amounts,  # broadcastable: tokens to turn by
    loaded,  # mask, rows and dims
    turns_ptr,
    HALF: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    first = tl.load(row_ptrs + half_dims, mask=loaded, other=0.0)
    second = tl.load(row_ptrs + HALF + half_dims, mask=loaded, other=0.0)
    if IS_TURNED:
        cos, sin = cos_sin(turns_ptr, amounts, half_dims, half_dims < HALF, HALF)
        first_fp32, second_fp32 = first.to(tl.float32), second.to(tl.float32)
        turned_first = (first_fp32 * cos - second_fp32 * sin).to(first.dtype)
        turned_second = (second_fp32 * cos + first_fp32 * sin).to(second.dtype)
        return turned_first, turned_second
    else:
        return first, second


@triton.jit
def load_turned(
    row_ptrs,  # broadcastable: start of each row
    dims,  # broadcastable: 0 .. TILE_D - 1 along the other axis
    amounts,
    loaded,
    turns_ptr,
    HALF: tl.constexpr,
    ROTARY_START: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    x = tl.load(row_ptrs + dims, mask=loaded, other=0.0)
    if IS_TURNED:
        turns, pairs, partner_dims, sign = partners(dims, ROTARY_START, HALF, IS_INTERLEAVED)
        partner = tl.load(row_ptrs + partner_dims, mask=loaded & turns, other=0.0)
        cos, sin = cos_sin(turns_ptr, amounts, pairs, turns, HALF)
        x = (x.to(tl.float32) * cos + partner.to(tl.float32) * sign * sin).to(x.dtype)
    return x


@triton.jit
def _copy_turned_kernel(
    k_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    v_ptr,  # [num_slots, NUM_KV_HEADS, V_DIM]
    source_slots_ptr,  # [num_copies] int64
    target_slots_ptr,
    deltas_ptr,
    turns_ptr,
    num_rows,  # num_copies * NUM_KV_HEADS
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_START: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = row < num_rows
    copy, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    source = tl.load(source_slots_ptr + copy, mask=is_row, other=0) * NUM_KV_HEADS + head
    target = tl.load(target_slots_ptr + copy, mask=is_row, other=0) * NUM_KV_HEADS + head
    v_dims = tl.arange(0, TILE_V)[None, :]
    v_copied = is_row[:, None] & (v_dims < V_DIM)
    v = tl.load(v_ptr + (source * V_DIM)[:, None] + v_dims, mask=v_copied)
    amount = tl.load(deltas_ptr + copy, mask=is_row, other=0)[:, None]
    source_ptrs, target_ptrs = k_ptr + (source * HEAD_DIM)[:, None], k_ptr + (target * HEAD_DIM)[:, None]
    if TURN == TURN_HALVES:
        dims = tl.arange(0, TILE_HALF)[None, :]
        copied = is_row[:, None] & (dims < HALF)
        first, second = load_turned_halves(source_ptrs, dims, amount, copied, turns_ptr, HALF, True)
        tl.store(target_ptrs + dims, first, mask=copied)
        tl.store(target_ptrs + HALF + dims, second, mask=copied)
    else:
        dims = tl.arange(0, TILE_D)[None, :]
        copied = is_row[:, None] & (dims < HEAD_DIM)
        k = load_turned(
            source_ptrs, dims, amount, copied, turns_ptr, HALF, ROTARY_START, IS_INTERLEAVED, TURN == TURN_PARTNERS
        )
        tl.store(target_ptrs + dims, k, mask=copied)
    tl.store(v_ptr + (target * V_DIM)[:, None] + v_dims, v, mask=v_copied)


def copy_turned_triton(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    deltas: torch.Tensor,
    rotary: LayerRotary,
    *,
    tile_rows: int = 32,
    num_warps: int = 4,
) -> None:
    _, _, num_kv_heads, head_dim = k_cache.shape
    num_rows = source_slots.shape[0] * num_kv_heads
    if num_rows == 0:
        return
    constants = turn_constants(rotary, head_dim)
    turns = turn_tables(rotary, k_cache.device) if constants["TURN"] else k_cache
    _copy_turned_kernel[(triton.cdiv(num_rows, tile_rows),)](
        k_cache,
        v_cache,
        source_slots,
        target_slots,
        deltas,
        turns,
        num_rows,
        num_kv_heads,
        head_dim,
        v_cache.shape[3],
        TILE_V=next_power_of_2(v_cache.shape[3]),
        TILE_ROWS=tile_rows,
        num_warps=num_warps,
        **constants,
    )
