# SPDX-License-Identifier: Apache-2.0
"""Write new keys and values into the paged pool in Triton; keys can be turned on the way."""

import torch
import triton
import triton.language as tl

from lazyattention.ops._tiles import next_power_of_2
from lazyattention.ops._turn_tables import turn_tables
from lazyattention.ops.rotary import LayerRotary
from lazyattention.ops.rotate.kernel import (
    TURN_HALVES,
    TURN_NONE,
    load_turned,
    load_turned_halves,
    turn_constants,
)


@triton.jit
def _store_kv_kernel(
    k_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], any strides but the last
    v_ptr,
    k_cache_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    v_cache_ptr,
    slot_mapping_ptr,  # [num_tokens] int64, -1 = do not store
    store_turns_ptr,  # [num_tokens] int64
    turns_ptr,
    k_scale_ptr,  # [NUM_KV_HEADS] float32
    v_scale_ptr,
    num_rows,  # num_tokens * NUM_KV_HEADS
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    HAS_KV_SCALES: tl.constexpr,
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
    token, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=row < num_rows, other=-1)
    is_stored = (slot >= 0)[:, None]
    target = (slot * NUM_KV_HEADS + head)[:, None]
    v_dims = tl.arange(0, TILE_V)[None, :]
    v_stored = is_stored & (v_dims < V_DIM)
    v = tl.load(v_ptr + (token * stride_v_token + head * stride_v_head)[:, None] + v_dims, mask=v_stored)
    source_ptrs = k_ptr + (token * stride_k_token + head * stride_k_head)[:, None]
    target_ptrs = k_cache_ptr + target * HEAD_DIM
    amount = tl.load(store_turns_ptr + token, mask=row < num_rows, other=0)[:, None]
    if HAS_KV_SCALES:
        k_factor = 1.0 / tl.load(k_scale_ptr + head)[:, None]
        v = v.to(tl.float32) * (1.0 / tl.load(v_scale_ptr + head)[:, None])
    cache_dtype = k_cache_ptr.dtype.element_ty
    if TURN == TURN_HALVES:
        dims = tl.arange(0, TILE_HALF)[None, :]
        stored = is_stored & (dims < HALF)
        first, second = load_turned_halves(source_ptrs, dims, amount, stored, turns_ptr, HALF, True)
        if HAS_KV_SCALES:
            first, second = first.to(tl.float32) * k_factor, second.to(tl.float32) * k_factor
        tl.store(target_ptrs + dims, first.to(cache_dtype), mask=stored)
        tl.store(target_ptrs + HALF + dims, second.to(cache_dtype), mask=stored)
    else:
        dims = tl.arange(0, TILE_D)[None, :]
        stored = is_stored & (dims < HEAD_DIM)
        k = load_turned(
            source_ptrs, dims, amount, stored, turns_ptr, HALF, ROTARY_START, IS_INTERLEAVED, TURN != TURN_NONE
        )
        if HAS_KV_SCALES:
            k = k.to(tl.float32) * k_factor
        tl.store(target_ptrs + dims, k.to(cache_dtype), mask=stored)
    tl.store(v_cache_ptr + target * V_DIM + v_dims, v.to(v_cache_ptr.dtype.element_ty), mask=v_stored)


def store_kv_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    store_turns: torch.Tensor | None = None,
    rotary: LayerRotary | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    tile_rows: int = 32,
    num_warps: int = 4,
) -> None:
    """Store, turning each key by `store_turns` where given; with `kv_scales`, divided by its head's scale."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    is_turned = store_turns is not None and rotary is not None and rotary.inv_freq is not None
    constants = turn_constants(rotary if is_turned and rotary is not None else LayerRotary(None, 0), head_dim)
    k_scale, v_scale = kv_scales or (k, v)
    num_rows = num_tokens * num_kv_heads
    _store_kv_kernel[(triton.cdiv(num_rows, tile_rows),)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        store_turns if is_turned else slot_mapping,
        turn_tables(rotary, k.device) if is_turned and rotary is not None else k,
        k_scale,
        v_scale,
        num_rows,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        num_kv_heads,
        head_dim,
        v.shape[2],
        kv_scales is not None,
        TILE_V=next_power_of_2(v.shape[2]),
        TILE_ROWS=tile_rows,
        num_warps=num_warps,
        **constants,
    )
