# SPDX-License-Identifier: Apache-2.0
"""chunk_prefill's tiles without a mask on Hopper GPUs, in Gluon: every warp group has one job.

Two warp groups attend, 64 query rows each; while one exponentiates, its own product with the values still runs, and the
other multiplies. (Making them take turns by barriers measured the same.) One warp copies key and value tiles into shared
memory ahead of them. One warp group loads and turns the query tile for the next segment while the current one is attended
to. A `full` barrier says that a buffer may be read, an `empty` one that it may be written.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lazyattention.ops._turn_tables import LOG2_NUM_LOW, NUM_HIGH, NUM_LOW, turn_tables
from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.device_plan import PrefillTasks
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.rotary import LayerRotary

# Triton 3.9 has the first names, 3.6 the second.
_thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_LOG2_E = 1.4426950408889634
_LN_2 = gl.constexpr(0.6931471805599453)
_LOW_ROWS = gl.constexpr(NUM_LOW)
_LOG2_LOW_ROWS = gl.constexpr(LOG2_NUM_LOW)
_ZERO_ROW = gl.constexpr(NUM_LOW + NUM_HIGH // 2)
# Rows one warp group attends for.
_GROUP_ROWS = gl.constexpr(64)
# Key and value tiles in shared memory.
_STAGES = gl.constexpr(2)


@gluon.jit
def _copy_tiles(
    k_desc, v_desc, tiles_ptr, task_ptr, head, k_first, k_second, v, k_full, k_empty, v_full, v_empty,
    HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = HEAD_DIM // 2
    full_start, full_end = gl.load(task_ptr + 3), gl.load(task_ptr + 4)
    count = 0
    for tile in range(full_start, full_end):
        slot = gl.load(tiles_ptr + tile * 8)
        stage, turn = count % _STAGES, (count // _STAGES) & 1
        mbarrier.wait(k_empty.index(stage), turn ^ 1)
        mbarrier.expect(k_full.index(stage), 2 * k_desc.block_type.nbytes)
        _async_load(k_desc, [slot, head * HEAD_DIM], k_full.index(stage), k_first.index(stage))
        _async_load(k_desc, [slot, head * HEAD_DIM + HALF], k_full.index(stage), k_second.index(stage))
        mbarrier.wait(v_empty.index(stage), turn ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        _async_load(v_desc, [slot, head * V_DIM], v_full.index(stage), v.index(stage))
        count += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _turn_queries(
    q_ptr, turns_ptr, tiles_ptr, segments_ptr, task_ptr, head, stride_q_token, stride_q_head, q_first, q_second,
    q_full, q_empty, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, IS_TURNED: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = HEAD_DIM // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    num_tokens, token_start = gl.load(task_ptr + 1), gl.load(task_ptr + 2)
    full_start = gl.load(task_ptr + 3)
    m = gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    count = 0
    for segment in range(gl.load(task_ptr + 7), gl.load(task_ptr + 8)):
        first_tile = gl.maximum(gl.load(segments_ptr + segment), full_start)
        amount = -gl.load(tiles_ptr + first_tile * 8 + 5)
        low_ptrs = turns_ptr + (amount & (_LOW_ROWS - 1)) * (2 * HALF) + dims
        high_ptrs = turns_ptr + ((amount >> _LOG2_LOW_ROWS) + _ZERO_ROW) * (2 * HALF) + dims
        if IS_TURNED:
            low_cos, low_sin = gl.load(low_ptrs), gl.load(low_ptrs + HALF)
            high_cos, high_sin = gl.load(high_ptrs), gl.load(high_ptrs + HALF)
            cos = gl.expand_dims(low_cos * high_cos - low_sin * high_sin, 0)
            sin = gl.expand_dims(low_sin * high_cos + low_cos * high_sin, 0)
        buffer = count % 2
        mbarrier.wait(q_empty.index(buffer), ((count // 2) & 1) ^ 1)
        for part in gl.static_range(2):
            row = (m + part * _GROUP_ROWS) // GROUP
            token = (token_start + row).to(gl.int64)
            q_head = head * GROUP + (m + part * _GROUP_ROWS) % GROUP
            ptrs = gl.expand_dims(q_ptr + token * stride_q_token + q_head * stride_q_head, 1) + gl.expand_dims(dims, 0)
            is_row = gl.expand_dims(row < num_tokens, 1)
            first = gl.load(ptrs, mask=is_row, other=0.0)
            second = gl.load(ptrs + HALF, mask=is_row, other=0.0)
            if IS_TURNED:
                first_fp32, second_fp32 = first.to(gl.float32), second.to(gl.float32)
                q_first.index(buffer * 2 + part).store((first_fp32 * cos - second_fp32 * sin).to(first.dtype))
                q_second.index(buffer * 2 + part).store((second_fp32 * cos + first_fp32 * sin).to(first.dtype))
            else:
                q_first.index(buffer * 2 + part).store(first)
                q_second.index(buffer * 2 + part).store(second)
        fence_async_shared()
        # All threads must have stored before one of them says so.
        _thread_barrier()
        mbarrier.arrive(q_full.index(buffer), count=1)
        count += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _score(q_first, q_second, k_first, k_second, no_scores):
    scores = warpgroup_mma(q_first, k_first.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    return warpgroup_mma(q_second, k_second.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _fold(scores, running_max, running_sum, scale_base2):
    new_max = gl.maximum(running_max, gl.max(scores, 1) * scale_base2)
    weights = gl.exp2(scores * scale_base2 - gl.expand_dims(new_max, 1))
    keep = gl.exp2(running_max - new_max)
    return weights, keep, new_max, running_sum * keep + gl.sum(weights, 1)


@gluon.jit
def _attend(
    part_of_tile: gl.constexpr, out_ptr, part_out_ptr, part_lse_ptr, part_bases_ptr, segments_ptr, task_ptr, head,
    scale_base2, q_first, q_second, q_full, q_empty, k_first, k_second, v, k_full, k_empty, v_full, v_empty,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, V_DIM: gl.constexpr, TILE_KV: gl.constexpr,
):  # fmt: skip
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_DIM, 16])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KV, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    acc_row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_start, num_tokens, token_start = gl.load(task_ptr), gl.load(task_ptr + 1), gl.load(task_ptr + 2)
    full_start, full_end = gl.load(task_ptr + 3), gl.load(task_ptr + 4)
    first_segment = gl.load(task_ptr + 7)
    no_scores = gl.zeros([_GROUP_ROWS, TILE_KV], gl.float32, score_layout)
    acc = gl.zeros([_GROUP_ROWS, V_DIM], gl.float32, acc_layout)
    running_max = gl.full([_GROUP_ROWS], float("-inf"), gl.float32, row_layout)
    running_sum = gl.zeros([_GROUP_ROWS], gl.float32, row_layout)

    num_segments = 0
    segment_end = gl.load(segments_ptr + first_segment + 1)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = _score(
        q_first.index(part_of_tile), q_second.index(part_of_tile), k_first.index(0), k_second.index(0), no_scores
    )
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _thread_barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    weights, keep, running_max, running_sum = _fold(scores, running_max, running_sum, scale_base2)
    weights = gl.convert_layout(weights.to(v.dtype), weights_layout)
    count = 1
    mbarrier.wait(k_full.index(1), 0, pred=full_start + 1 < full_end)
    for tile in range(full_start + 1, full_end):
        # All scores of the last tile are there, so the query buffer is free when its segment has ended.
        is_new = tile == segment_end
        mbarrier.arrive(q_empty.index(num_segments % 2), count=1, pred=is_new)
        num_segments += is_new.to(gl.int32)
        segment_end = gl.load(segments_ptr + first_segment + num_segments + 1)
        buffer = num_segments % 2
        mbarrier.wait(q_full.index(buffer), (num_segments // 2) & 1, pred=is_new)
        k_stage, next_turn = count % _STAGES, ((count + 1) // _STAGES) & 1
        # Of the values, and of the next tile's keys.
        other_stage, v_turn = (count - 1) % _STAGES, ((count - 1) // _STAGES) & 1
        scores = _score(
            q_first.index(buffer * 2 + part_of_tile), q_second.index(buffer * 2 + part_of_tile), k_first.index(k_stage),
            k_second.index(k_stage), no_scores,
        )  # fmt: skip
        acc = acc * gl.expand_dims(gl.convert_layout(keep, acc_row_layout), 1)
        mbarrier.wait(v_full.index(other_stage), v_turn)
        acc = warpgroup_mma(weights, v.index(other_stage), acc, is_async=True)
        # Exponentiate while the product with the values still runs.
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _thread_barrier()
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        new_weights, keep, running_max, running_sum = _fold(scores, running_max, running_sum, scale_base2)
        # The assembler moves exponentials behind the wait for the product with the values, unless another wait, which
        # it takes for a loop, stands between them.
        mbarrier.wait(k_full.index(other_stage), next_turn, pred=tile + 1 < full_end)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _thread_barrier()
        mbarrier.arrive(v_empty.index(other_stage), count=1)
        weights = gl.convert_layout(new_weights.to(v.dtype), weights_layout)
        count += 1
    v_stage, v_turn = (count - 1) % _STAGES, ((count - 1) // _STAGES) & 1
    acc = acc * gl.expand_dims(gl.convert_layout(keep, acc_row_layout), 1)
    mbarrier.wait(v_full.index(v_stage), v_turn)
    acc = warpgroup_mma(weights, v.index(v_stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    m = gl.arange(0, _GROUP_ROWS, layout=acc_row_layout) + part_of_tile * _GROUP_ROWS
    row = m // GROUP
    is_row = row < num_tokens
    q_head = head * GROUP + m % GROUP
    part = gl.load(task_ptr + 9)
    total = gl.convert_layout(running_sum, acc_row_layout)
    output = acc / gl.expand_dims(total, 1)
    dims = gl.expand_dims(gl.arange(0, V_DIM, layout=gl.SliceLayout(0, acc_layout)), 0)
    if part >= 0:
        part_rows = (gl.load(part_bases_ptr + row_start + row, mask=is_row, other=0) + part).to(gl.int64)
        part_rows = part_rows * (NUM_KV_HEADS * GROUP) + q_head
        ptrs = gl.expand_dims(part_out_ptr + part_rows * V_DIM, 1) + dims
        gl.store(ptrs, output.to(part_out_ptr.dtype.element_ty), mask=gl.expand_dims(is_row, 1))
        lse = (gl.convert_layout(running_max, acc_row_layout) + gl.log2(total)) * _LN_2
        gl.store(part_lse_ptr + part_rows, lse, mask=is_row)
    else:
        out_rows = (token_start + row).to(gl.int64) * (NUM_KV_HEADS * GROUP) + q_head
        ptrs = gl.expand_dims(out_ptr + out_rows * V_DIM, 1) + dims
        gl.store(ptrs, output.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(is_row, 1))


@gluon.jit
def _attend_second(
    out_ptr, part_out_ptr, part_lse_ptr, part_bases_ptr, segments_ptr, task_ptr, head, scale_base2,
    q_first, q_second, q_full, q_empty, k_first, k_second, v, k_full, k_empty, v_full, v_empty,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, V_DIM: gl.constexpr, TILE_KV: gl.constexpr,
):  # fmt: skip
    _attend(
        1, out_ptr, part_out_ptr, part_lse_ptr, part_bases_ptr, segments_ptr, task_ptr, head, scale_base2,
        q_first, q_second, q_full, q_empty, k_first, k_second, v, k_full, k_empty, v_full, v_empty,
        NUM_KV_HEADS, GROUP, V_DIM, TILE_KV,
    )  # fmt: skip


@gluon.jit
def _attend_first(
    out_ptr, part_out_ptr, part_lse_ptr, part_bases_ptr, segments_ptr, task_ptr, head, scale_base2,
    q_first, q_second, q_full, q_empty, k_first, k_second, v, k_full, k_empty, v_full, v_empty,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, V_DIM: gl.constexpr, TILE_KV: gl.constexpr,
):  # fmt: skip
    _attend(
        0, out_ptr, part_out_ptr, part_lse_ptr, part_bases_ptr, segments_ptr, task_ptr, head, scale_base2,
        q_first, q_second, q_full, q_empty, k_first, k_second, v, k_full, k_empty, v_full, v_empty,
        NUM_KV_HEADS, GROUP, V_DIM, TILE_KV,
    )  # fmt: skip


@gluon.jit
def _chunk_prefill_hopper_kernel(
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], any strides but the last
    k_desc,  # [num_slots, NUM_KV_HEADS * HEAD_DIM], tiles [TILE_KV, HEAD_DIM / 2]
    v_desc,  # [num_slots, NUM_KV_HEADS * V_DIM], tiles [TILE_KV, V_DIM]
    out_ptr,
    part_out_ptr,
    part_lse_ptr,
    turns_ptr,
    tasks_ptr,  # [num_tasks, 10] int32: PrefillTasks
    tiles_ptr,
    segments_ptr,
    part_bases_ptr,
    scale_base2,
    stride_q_token,
    stride_q_head,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    TILE_KV: gl.constexpr,
    IS_TURNED: gl.constexpr,
):
    task, head = gl.program_id(0) // NUM_KV_HEADS, gl.program_id(0) % NUM_KV_HEADS
    task_ptr = tasks_ptr + task * 10
    HALF: gl.constexpr = HEAD_DIM // 2
    q_layout: gl.constexpr = gl.NVMMASharedLayout(128 if HALF >= 64 else 64, 16, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # Two buffers for the two warp groups' rows.
    q_first = gl.allocate_shared_memory(dtype, [4, _GROUP_ROWS, HALF], q_layout)
    q_second = gl.allocate_shared_memory(dtype, [4, _GROUP_ROWS, HALF], q_layout)
    k_first = gl.allocate_shared_memory(dtype, [_STAGES, TILE_KV, HALF], k_desc.layout)
    k_second = gl.allocate_shared_memory(dtype, [_STAGES, TILE_KV, HALF], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [_STAGES, TILE_KV, V_DIM], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    for buffer in gl.static_range(2):
        mbarrier.init(q_full.index(buffer), count=1)
        mbarrier.init(q_empty.index(buffer), count=2)
    fence_async_shared()
    _thread_barrier()
    # Registers per thread: the first warp group takes what the others leave of 512 per four warps.
    gl.warp_specialize(
        [
            (
                _attend_first,
                (
                    out_ptr, part_out_ptr, part_lse_ptr, part_bases_ptr, segments_ptr, task_ptr, head, scale_base2,
                    q_first, q_second, q_full, q_empty, k_first, k_second, v, k_full, k_empty, v_full, v_empty,
                    NUM_KV_HEADS, GROUP, V_DIM, TILE_KV,
                ),
            ),
            (
                _attend_second,
                (
                    out_ptr, part_out_ptr, part_lse_ptr, part_bases_ptr, segments_ptr, task_ptr, head, scale_base2,
                    q_first, q_second, q_full, q_empty, k_first, k_second, v, k_full, k_empty, v_full, v_empty,
                    NUM_KV_HEADS, GROUP, V_DIM, TILE_KV,
                ),
            ),
            (
                _turn_queries,
                (
                    q_ptr, turns_ptr, tiles_ptr, segments_ptr, task_ptr, head, stride_q_token, stride_q_head,
                    q_first, q_second, q_full, q_empty, GROUP, HEAD_DIM, IS_TURNED,
                ),
            ),
            (
                _copy_tiles,
                (
                    k_desc, v_desc, tiles_ptr, task_ptr, head, k_first, k_second, v, k_full, k_empty, v_full, v_empty,
                    HEAD_DIM, V_DIM,
                ),
            ),
        ],
        [4, 4, 1],
        [192, 104, 24],
    )  # fmt: skip


def unmasked_prefill_hopper(
    q: torch.Tensor,
    kv: LayerKV,
    tasks: PrefillTasks,
    out: torch.Tensor,
    states: PartialStates,
    rotary: LayerRotary,
    options: AttendOptions,
) -> None:
    """Run `tasks.apart`; tiles are 128 query rows and `tasks.shape.tile_kv` keys."""
    assert tasks.shape.tile_m == 2 * _GROUP_ROWS.value
    _, _, num_kv_heads, head_dim = kv.k_cache.shape
    tile_kv, half = tasks.shape.tile_kv, head_dim // 2
    q = q if q.stride(2) == 1 else q.contiguous()
    k_layout = gl.NVMMASharedLayout(128 if half >= 64 else 64, 16, 2)
    v_layout = gl.NVMMASharedLayout(128, 16, 2)
    k_flat, v_flat = (cache.view(-1, num_kv_heads * head_dim) for cache in (kv.k_cache, kv.v_cache))
    is_turned = rotary.inv_freq is not None
    _chunk_prefill_hopper_kernel[(tasks.apart.shape[0] * num_kv_heads,)](
        q,
        TensorDescriptor.from_tensor(k_flat, [tile_kv, half], k_layout),
        TensorDescriptor.from_tensor(v_flat, [tile_kv, head_dim], v_layout),
        out,
        states.outputs,
        states.lses,
        turn_tables(rotary, q.device) if is_turned else q,
        tasks.apart,
        tasks.tiles,
        tasks.segments,
        tasks.part_bases,
        options.softmax_scale * _LOG2_E,
        q.stride(0),
        q.stride(1),
        num_kv_heads,
        q.shape[1] // num_kv_heads,
        head_dim,
        head_dim,
        tile_kv,
        is_turned,
        num_warps=4,
    )
