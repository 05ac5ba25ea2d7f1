# SPDX-License-Identifier: Apache-2.0
"""Many query rows of one request over its chunks and its own text, in Triton.

One program = one task (a tile of consecutive query tokens, one part of its keys) and one KV head, whose query heads are
rows too. It runs over segments, consecutive key tiles with one position_delta, and turns its query tile anew for each.
Order does not matter to attention, so tiles that need no mask come first, in a loop without one.
"""

import torch
import triton
import triton.language as tl

from lazyattention.ops._tiles import next_power_of_2
from lazyattention.ops._turn_tables import turn_tables
from lazyattention.ops.attend.kernel import LOG2_E, fold_keys, key_turns, load_query, score_keys, store_state
from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.device_plan import PrefillTasks
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.rotary import LayerRotary
from lazyattention.ops.rotate.kernel import turn_constants


@triton.jit
def _chunk_prefill_kernel(
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], any strides but the last
    k_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    v_ptr,  # [num_slots, NUM_KV_HEADS, V_DIM]
    out_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, V_DIM]
    part_out_ptr,  # [num_parts, NUM_KV_HEADS * GROUP, V_DIM]
    part_lse_ptr,  # [num_parts, NUM_KV_HEADS * GROUP] float32, natural log
    turns_ptr,
    positions_ptr,  # [num_tokens] int64
    tasks_ptr,  # [num_tasks, 10] int32: PrefillTasks
    tiles_ptr,  # [num_tiles, 8] int32: PrefillTasks
    segments_ptr,  # int32: first tile of each segment, and the end of the last
    masked_ptr,  # int32: tiles that need a mask
    part_bases_ptr,  # [num_rows] int32: first part of each row
    blocks_ptr,  # int32: block tables of all ranges
    sinks_ptr,  # [NUM_KV_HEADS * GROUP]
    k_scale_ptr,  # [NUM_KV_HEADS] float32
    v_scale_ptr,
    softmax_scale,
    logit_softcap,
    sliding_window,
    stride_q_token,
    stride_q_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS_TURNED: tl.constexpr,
    IS_CONTIGUOUS: tl.constexpr,  # every tile without a mask lies in consecutive slots
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_KV_SCALES: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_START: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    task, head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    task_ptr = tasks_ptr + task * 10
    row_start, num_tokens, token_start = tl.load(task_ptr), tl.load(task_ptr + 1), tl.load(task_ptr + 2)
    full_start, full_end = tl.load(task_ptr + 3), tl.load(task_ptr + 4)
    masked_start, masked_end = tl.load(task_ptr + 5), tl.load(task_ptr + 6)
    segment_start, segment_end = tl.load(task_ptr + 7), tl.load(task_ptr + 8)
    part = tl.load(task_ptr + 9)

    m = tl.arange(0, TILE_M)
    row = m // GROUP
    is_row = row < num_tokens
    token = (token_start + row).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=is_row, other=-2147483648).to(tl.int32)
    q_head = head * GROUP + m % GROUP
    q_ptrs = q_ptr + token * stride_q_token + q_head * stride_q_head
    if HAS_KV_SCALES:
        softmax_scale *= tl.load(k_scale_ptr + head)

    n = tl.arange(0, TILE_KV)
    v_dims = tl.arange(0, TILE_V)[None, :]
    every_key = n >= 0
    acc = tl.zeros([TILE_M, TILE_V], tl.float32)
    running_max = tl.full([TILE_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([TILE_M], tl.float32)

    k_cos, k_sin = key_turns(
        n, turns_ptr, HEAD_DIM, TURN, HALF, ROTARY_START, IS_INTERLEAVED, TILE_HALF, TILE_D, KEYS_TURNED
    )
    for segment in tl.range(segment_start, segment_end, num_stages=1):
        first_tile = tl.maximum(tl.load(segments_ptr + segment), full_start)
        end_tile = tl.minimum(tl.load(segments_ptr + segment + 1), full_end)
        q_first, q_second = load_query(
            q_ptrs, is_row, -tl.load(tiles_ptr + first_tile * 8 + 5), turns_ptr, HEAD_DIM, TURN, HALF, ROTARY_START,
            IS_INTERLEAVED, TILE_HALF, TILE_D, KEYS_TURNED,
        )  # fmt: skip
        for index in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
            tile_ptr = tiles_ptr + index * 8
            if IS_CONTIGUOUS:
                slot = tl.load(tile_ptr).to(tl.int64) + n
            else:
                key = tl.load(tile_ptr + 2) + n
                block = tl.load(blocks_ptr + tl.load(tile_ptr + 1) + key // BLOCK_SIZE)
                slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
            slot = slot * NUM_KV_HEADS + head
            if not KEYS_TURNED:
                q_first, q_second = load_query(
                    q_ptrs, is_row, -tl.load(tile_ptr + 3), turns_ptr, HEAD_DIM, TURN, HALF, ROTARY_START,
                    IS_INTERLEAVED, TILE_HALF, TILE_D, True,
                )  # fmt: skip
            scores = score_keys(
                q_first, q_second, k_ptr + slot * HEAD_DIM, every_key, k_cos, k_sin, HEAD_DIM, TURN, HALF,
                ROTARY_START, IS_INTERLEAVED, TILE_HALF, TILE_D, KEYS_TURNED,
            )  # fmt: skip
            v = tl.load(v_ptr + (slot * V_DIM)[:, None] + v_dims, mask=v_dims < V_DIM, other=0.0)
            acc, running_max, running_sum = fold_keys(
                acc, running_max, running_sum, scores, every_key, v.to(q_first.dtype), softmax_scale, logit_softcap,
                HAS_SOFTCAP, False,
            )  # fmt: skip

    for index in tl.range(masked_start, masked_end, num_stages=1):
        tile_ptr = tiles_ptr + tl.load(masked_ptr + index) * 8
        q_first, q_second = load_query(
            q_ptrs, is_row, -tl.load(tile_ptr + (5 if KEYS_TURNED else 3)), turns_ptr, HEAD_DIM, TURN, HALF,
            ROTARY_START, IS_INTERLEAVED, TILE_HALF, TILE_D, True,
        )  # fmt: skip
        key = tl.load(tile_ptr + 2) + n
        stands = tl.load(tile_ptr + 3) + n
        is_key = n < tl.load(tile_ptr + 4)
        block = tl.load(blocks_ptr + tl.load(tile_ptr + 1) + key // BLOCK_SIZE, mask=is_key, other=0)
        slot = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + head
        scores = score_keys(
            q_first, q_second, k_ptr + slot * HEAD_DIM, is_key, k_cos, k_sin, HEAD_DIM, TURN, HALF, ROTARY_START,
            IS_INTERLEAVED, TILE_HALF, TILE_D, KEYS_TURNED,
        )  # fmt: skip
        visible = is_key[None, :] & (stands[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible &= stands[None, :] > position[:, None] - sliding_window
        v = tl.load(v_ptr + (slot * V_DIM)[:, None] + v_dims, mask=is_key[:, None] & (v_dims < V_DIM), other=0.0)
        acc, running_max, running_sum = fold_keys(
            acc, running_max, running_sum, scores, visible, v.to(q_first.dtype), softmax_scale, logit_softcap,
            HAS_SOFTCAP, True,
        )  # fmt: skip

    if HAS_KV_SCALES:
        acc *= tl.load(v_scale_ptr + head)
    if part >= 0:
        part_base = tl.load(part_bases_ptr + row_start + row, mask=is_row, other=0)
        part_rows = (part_base + part).to(tl.int64) * (NUM_KV_HEADS * GROUP) + q_head
        store_state(acc, running_max, running_sum, part_rows, is_row, part_out_ptr, part_lse_ptr, V_DIM, TILE_V)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + q_head).to(tl.float32) * LOG2_E
            pivot = tl.maximum(running_max, sink)
            keep = tl.exp2(running_max - pivot)
            acc *= keep[:, None]
            running_sum = running_sum * keep + tl.exp2(sink - pivot)
        output = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
        out_ptrs = out_ptr + ((token * (NUM_KV_HEADS * GROUP) + q_head) * V_DIM)[:, None] + v_dims
        tl.store(out_ptrs, output.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (v_dims < V_DIM))


def chunk_prefill_triton(
    q: torch.Tensor,
    kv: LayerKV,
    tasks: PrefillTasks,
    positions: torch.Tensor,
    out: torch.Tensor,
    states: PartialStates,
    rotary: LayerRotary,
    options: AttendOptions,
    sinks: torch.Tensor | None,
) -> None:
    _, block_size, num_kv_heads, head_dim = kv.k_cache.shape
    v_dim = kv.v_cache.shape[3]
    constants = turn_constants(rotary, head_dim)
    q = q if q.stride(2) == 1 else q.contiguous()
    _chunk_prefill_kernel[(tasks.tasks.shape[0] * num_kv_heads,)](
        q,
        kv.k_cache,
        kv.v_cache,
        out,
        states.outputs,
        states.lses,
        turn_tables(rotary, q.device) if constants["TURN"] else q,
        positions,
        tasks.tasks,
        tasks.tiles,
        tasks.segments,
        tasks.masked,
        tasks.part_bases,
        tasks.blocks,
        states.lses if sinks is None else sinks,
        states.lses if kv.k_scale is None else kv.k_scale,
        states.lses if kv.v_scale is None else kv.v_scale,
        options.softmax_scale,
        options.logit_softcap or 0.0,
        options.sliding_window or 0,
        q.stride(0),
        q.stride(1),
        num_kv_heads,
        q.shape[1] // num_kv_heads,
        head_dim,
        v_dim,
        block_size,
        tasks.keys_turned,
        tasks.is_contiguous,
        HAS_WINDOW=options.sliding_window is not None,
        HAS_SOFTCAP=options.logit_softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_KV_SCALES=kv.k_scale is not None,
        TILE_V=max(16, next_power_of_2(v_dim)),
        TILE_M=tasks.shape.tile_m,
        TILE_KV=tasks.shape.tile_kv,
        NUM_STAGES=tasks.shape.num_stages,
        **tasks.shape.launch_options,
        **constants,
    )
