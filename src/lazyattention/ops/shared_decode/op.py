# SPDX-License-Identifier: Apache-2.0
"""Attention of few rows per request, rows of many requests stacked over each KV range."""

import functools
from collections.abc import Sequence

import torch

from lazyattention.ops._checks import check_shape
from lazyattention.ops._tiles import SIDE_PRIORITY
from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.device_plan import DecodeTasks
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.rotary import LayerRotary
from lazyattention.ops.shared_decode.reference import shared_decode_reference


def shared_decodes(
    q: torch.Tensor,
    kv: LayerKV,
    launches: Sequence[DecodeTasks],
    positions: torch.Tensor,
    states: PartialStates,
    rotary: LayerRotary,
    options: AttendOptions,
    *,
    side_priority: int = SIDE_PRIORITY,
) -> None:
    """Run several launches of `shared_decode`; arguments as there.

    Ranges with many rows keep the tensor cores busy, those with few rows the memory: on a GPU, launches over the former
    run on a stream beside the current one, which waits for them before this returns to it. `side_priority` is that
    stream's, as CUDA counts: 0 as usual, -1 before others.
    """
    beside = [tasks for tasks in launches if tasks.shape.programs_per_multiprocessor]
    if not q.is_cuda or not beside or len(beside) == len(launches):
        for tasks in launches:
            shared_decode(q, kv, tasks, positions, states, rotary, options)
        return
    current, side = torch.cuda.current_stream(q.device), _side_stream(q.device, side_priority)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for tasks in beside:
            shared_decode(q, kv, tasks, positions, states, rotary, options)
    for tasks in launches:
        if not tasks.shape.programs_per_multiprocessor:
            shared_decode(q, kv, tasks, positions, states, rotary, options)
    current.wait_stream(side)


@functools.lru_cache
def _side_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


def shared_decode(
    q: torch.Tensor,
    kv: LayerKV,
    tasks: DecodeTasks,
    positions: torch.Tensor,
    states: PartialStates,
    rotary: LayerRotary,
    options: AttendOptions,
) -> None:
    """Write one partial state per row and part of its keys. Exact up to rounding; a range is read once for all rows.

    Args:
        q: `[num_tokens, num_q_heads, head_dim]`, turned at true positions; any strides but the last.
        kv: The layer's KV; only read.
        tasks: From the step's device plan; `tasks.shape` is the tile shape it was laid out for.
        positions: int64 `[num_tokens]`, true positions.
        states: Written in place, at the parts the rows name.
        rotary: How this layer's heads turn.
        options: Scale (positive), window and cap.

    Raises:
        ValueError: A shape differs from the above, or the scale is not positive.

    Source:
        Query turning: Xia et al. 2026, arXiv:2606.04302. Differences: rows of several requests share one read, each
        turned by its own delta.
    """
    check_shape("q", q, (positions.shape[0], None, kv.k_cache.shape[3]))
    check_shape("states.outputs", states.outputs, (None, q.shape[1], kv.v_cache.shape[3]))
    if options.softmax_scale <= 0:
        raise ValueError(f"softmax_scale is {options.softmax_scale}, the kernels need a positive one")
    if q.is_cuda:
        # Imported here: triton does not come with CPU builds of torch.
        from lazyattention.ops.shared_decode.kernel import shared_decode_triton

        shared_decode_triton(q, kv, tasks, positions, states, rotary, options)
    else:
        shared_decode_reference(q, kv, tasks, positions, states, rotary, options)
