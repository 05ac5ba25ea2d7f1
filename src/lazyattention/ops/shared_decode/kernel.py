# SPDX-License-Identifier: Apache-2.0
"""Few rows per request: rows of many requests stacked over one KV range, split along KV, in Triton.

A unit of work = one task (rows of one range, one part of its keys) and one KV head. The query heads of that KV head are
rows too: row `m` of a tile is plan row `m // GROUP`, head `m % GROUP`. A program does one unit, or several in turn.
"""

import torch
import triton
import triton.language as tl

from lazyattention.ops._tiles import next_power_of_2, num_multiprocessors
from lazyattention.ops._turn_tables import turn_tables
from lazyattention.ops.attend.kernel import fold_keys, key_turns, load_query, score_keys, store_state
from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.device_plan import DecodeTasks
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.rotary import LayerRotary
from lazyattention.ops.rotate.kernel import turn_constants


@triton.jit
def _slots(blocks_ptr, table_start, key, is_key, first_key, first_slot, BLOCK_SIZE: tl.constexpr):
    """Slots of keys. Where they are consecutive, no key's address waits for its block-table entry."""
    looked_up = is_key & (key <= tl.where(first_slot < 0, 2147483647, -1))
    block = tl.load(blocks_ptr + table_start + key // BLOCK_SIZE, mask=looked_up, other=0)
    # int64: slots times their size pass 2**31.
    slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    return tl.where(first_slot < 0, slot, (first_slot + (key - first_key)).to(tl.int64))


@triton.jit
def _shared_decode_kernel(
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], any strides but the last
    k_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    v_ptr,  # [num_slots, NUM_KV_HEADS, V_DIM]
    part_out_ptr,  # [num_parts, NUM_KV_HEADS * GROUP, V_DIM]
    part_lse_ptr,  # [num_parts, NUM_KV_HEADS * GROUP] float32, natural log
    turns_ptr,
    positions_ptr,  # [num_tokens] int64
    num_tasks_ptr,  # [1] int32: tasks that are real; the grid may be larger
    tasks_ptr,  # [num_tasks, 8] int32: DecodeTasks
    rows_ptr,  # [num_rows, 4] int32: DecodeTasks
    blocks_ptr,  # int32: block tables of all ranges
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
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
    num_units = tl.load(num_tasks_ptr) * NUM_KV_HEADS
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0), num_stages=1):
        # Units of one task are neighbours, so that the heads of a token are read at about the same time.
        task, head = unit // NUM_KV_HEADS, unit % NUM_KV_HEADS
        task_ptr = tasks_ptr + task * 8
        row_start, num_rows = tl.load(task_ptr), tl.load(task_ptr + 1)
        table_start = tl.load(task_ptr + 2)
        key_start, key_end = tl.load(task_ptr + 3), tl.load(task_ptr + 4)
        first_position = tl.load(task_ptr + 5)
        part = tl.load(task_ptr + 6)
        first_slot = tl.load(task_ptr + 7)

        m = tl.arange(0, TILE_M)
        row = m // GROUP
        is_row = row < num_rows
        row_ptrs = rows_ptr + (row_start + row) * 4
        token = tl.load(row_ptrs, mask=is_row, other=0).to(tl.int64)
        delta = tl.load(row_ptrs + 1, mask=is_row, other=0)
        part_base = tl.load(row_ptrs + 2, mask=is_row, other=0)
        position = tl.load(positions_ptr + token, mask=is_row, other=0).to(tl.int32)
        # Index of the last key each row may see.
        last_key = tl.where(is_row, position - delta - first_position, -1)
        q_head = head * GROUP + m % GROUP
        q_ptrs = q_ptr + token * stride_q_token + q_head * stride_q_head
        q_first, q_second = load_query(
            q_ptrs,
            is_row,
            -delta[:, None],
            turns_ptr,
            HEAD_DIM,
            TURN,
            HALF,
            ROTARY_START,
            IS_INTERLEAVED,
            TILE_HALF,
            TILE_D,
            KEYS_TURNED,
        )
        unit_scale = softmax_scale * tl.load(k_scale_ptr + head) if HAS_KV_SCALES else softmax_scale

        # Keys after the last visible one are not read: a growing text needs no new task for each token.
        key_end = tl.minimum(key_end, tl.max(last_key, 0) + 1)
        nearest_last = tl.min(tl.where(is_row, last_key, 2147483647), 0)
        first_key = key_start
        # With few rows the mask is cheap, and registers for a second loop would cost resident programs.
        HAS_FULL: tl.constexpr = TILE_M >= 64 and not HAS_WINDOW
        if HAS_WINDOW:
            skipped = tl.maximum(nearest_last - sliding_window + 1 - key_start, 0) // TILE_KV
            key_start += skipped * TILE_KV
        full_end = key_start
        if HAS_FULL:
            # Keys before this are there, and visible to every row: whole tiles of them need no mask.
            seen_by_all = tl.minimum(key_end, nearest_last + 1)
            full_end = key_start + tl.maximum(seen_by_all - key_start, 0) // TILE_KV * TILE_KV
        # All rows of a task over unturned keys have one delta.
        read_delta = tl.max(tl.where(is_row, delta, -2147483648), 0) + first_position
        v_dims = tl.arange(0, TILE_V)[None, :]
        n = tl.arange(0, TILE_KV)
        every_key = n >= 0
        acc = tl.zeros([TILE_M, TILE_V], tl.float32)
        running_max = tl.full([TILE_M], float("-inf"), tl.float32)
        running_sum = tl.zeros([TILE_M], tl.float32)
        k_cos, k_sin = key_turns(
            n, turns_ptr, HEAD_DIM, TURN, HALF, ROTARY_START, IS_INTERLEAVED, TILE_HALF, TILE_D, KEYS_TURNED
        )
        if HAS_FULL:
            for start in tl.range(key_start, full_end, TILE_KV, num_stages=NUM_STAGES):
                key = start + n
                if not KEYS_TURNED:
                    q_first, q_second = load_query(
                        q_ptrs, is_row, -(read_delta + start), turns_ptr, HEAD_DIM, TURN, HALF, ROTARY_START, IS_INTERLEAVED,
                        TILE_HALF, TILE_D, True,
                    )  # fmt: skip
                slot = _slots(blocks_ptr, table_start, key, every_key, first_key, first_slot, BLOCK_SIZE)
                slot = slot * NUM_KV_HEADS + head
                scores = score_keys(
                    q_first, q_second, k_ptr + slot * HEAD_DIM, every_key, k_cos, k_sin, HEAD_DIM, TURN, HALF, ROTARY_START,
                    IS_INTERLEAVED, TILE_HALF, TILE_D, KEYS_TURNED,
                )  # fmt: skip
                v = tl.load(v_ptr + (slot * V_DIM)[:, None] + v_dims, mask=v_dims < V_DIM, other=0.0)
                acc, running_max, running_sum = fold_keys(
                    acc, running_max, running_sum, scores, every_key, v.to(q_first.dtype), unit_scale, logit_softcap,
                    HAS_SOFTCAP, False,
                )  # fmt: skip
        for start in tl.range(full_end, key_end, TILE_KV, num_stages=1 if HAS_FULL else NUM_STAGES):
            key = start + n
            is_key = key < key_end
            if not KEYS_TURNED:
                q_first, q_second = load_query(
                    q_ptrs, is_row, -(read_delta + start), turns_ptr, HEAD_DIM, TURN, HALF, ROTARY_START, IS_INTERLEAVED,
                    TILE_HALF, TILE_D, True,
                )  # fmt: skip
            slot = _slots(blocks_ptr, table_start, key, is_key, first_key, first_slot, BLOCK_SIZE)
            slot = slot * NUM_KV_HEADS + head
            scores = score_keys(
                q_first, q_second, k_ptr + slot * HEAD_DIM, is_key, k_cos, k_sin, HEAD_DIM, TURN, HALF, ROTARY_START,
                IS_INTERLEAVED, TILE_HALF, TILE_D, KEYS_TURNED,
            )  # fmt: skip
            visible = is_key[None, :] & (key[None, :] <= last_key[:, None])
            if HAS_WINDOW:
                visible &= key[None, :] > last_key[:, None] - sliding_window
            v = tl.load(v_ptr + (slot * V_DIM)[:, None] + v_dims, mask=is_key[:, None] & (v_dims < V_DIM), other=0.0)
            acc, running_max, running_sum = fold_keys(
                acc, running_max, running_sum, scores, visible, v.to(q_first.dtype), unit_scale, logit_softcap,
                HAS_SOFTCAP, True,
            )  # fmt: skip
        if HAS_KV_SCALES:
            acc *= tl.load(v_scale_ptr + head)
        part_rows = (part_base + part).to(tl.int64) * (NUM_KV_HEADS * GROUP) + q_head
        store_state(acc, running_max, running_sum, part_rows, is_row, part_out_ptr, part_lse_ptr, V_DIM, TILE_V)


def shared_decode_triton(
    q: torch.Tensor,
    kv: LayerKV,
    tasks: DecodeTasks,
    positions: torch.Tensor,
    states: PartialStates,
    rotary: LayerRotary,
    options: AttendOptions,
) -> None:
    _, block_size, num_kv_heads, head_dim = kv.k_cache.shape
    v_dim = kv.v_cache.shape[3]
    constants = turn_constants(rotary, head_dim)
    q = q if q.stride(2) == 1 else q.contiguous()
    num_units = tasks.tasks.shape[0] * num_kv_heads
    if tasks.shape.programs_per_multiprocessor:
        num_units = min(num_units, tasks.shape.programs_per_multiprocessor * num_multiprocessors(q.device))
    _shared_decode_kernel[(num_units,)](
        q,
        kv.k_cache,
        kv.v_cache,
        states.outputs,
        states.lses,
        turn_tables(rotary, q.device) if constants["TURN"] else q,
        positions,
        tasks.num_tasks,
        tasks.tasks,
        tasks.rows,
        tasks.blocks,
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
        HAS_WINDOW=options.sliding_window is not None,
        HAS_SOFTCAP=options.logit_softcap is not None,
        HAS_KV_SCALES=kv.k_scale is not None,
        TILE_V=max(16, next_power_of_2(v_dim)),
        TILE_M=tasks.shape.tile_m,
        TILE_KV=tasks.shape.tile_kv,
        NUM_STAGES=tasks.shape.num_stages,
        **tasks.shape.launch_options,
        **constants,
    )
