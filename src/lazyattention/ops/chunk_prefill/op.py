# SPDX-License-Identifier: Apache-2.0
"""Attention of many rows of one request over its chunks and its own text."""

import torch

from lazyattention.ops._checks import check_shape
from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.chunk_prefill.reference import chunk_prefill_reference
from lazyattention.ops.device_plan import PrefillTasks
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.rotary import LayerRotary


def chunk_prefill(
    q: torch.Tensor,
    kv: LayerKV,
    tasks: PrefillTasks,
    positions: torch.Tensor,
    out: torch.Tensor,
    states: PartialStates,
    rotary: LayerRotary,
    options: AttendOptions,
    *,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the output of query tiles that have all their keys in one task, and partial states of the others.

    Exact up to rounding. The query tile is turned when the position_delta of the keys changes.

    Args:
        q: `[num_tokens, num_q_heads, head_dim]`, turned at true positions; any strides but the last.
        kv: The layer's KV; only read.
        tasks: From the step's device plan; `tasks.shape` is the tile shape it was laid out for.
        positions: int64 `[num_tokens]`, true positions.
        out: `[num_tokens, num_q_heads, v_dim]`, contiguous; written at tokens that need no merge.
        states: Written in place, at the parts the rows name.
        rotary: How this layer's heads turn.
        options: Scale (positive), window and cap.
        sinks: `[num_q_heads]` extra logits without a value, or None; they enter outputs, not partial states.

    Raises:
        ValueError: A shape differs from the above, or the scale is not positive.
    """
    check_shape("q", q, (positions.shape[0], None, kv.k_cache.shape[3]))
    check_shape("out", out, (q.shape[0], q.shape[1], kv.v_cache.shape[3]))
    check_shape("states.outputs", states.outputs, (None, q.shape[1], kv.v_cache.shape[3]))
    if options.softmax_scale <= 0:
        raise ValueError(f"softmax_scale is {options.softmax_scale}, the kernels need a positive one")
    if q.is_cuda:
        # Imported here: triton does not come with CPU builds of torch.
        if tasks.apart.shape[0]:
            from lazyattention.ops.chunk_prefill.hopper.kernel import unmasked_prefill_hopper

            unmasked_prefill_hopper(q, kv, tasks, out, states, rotary, options)
        if tasks.tasks.shape[0]:
            from lazyattention.ops.chunk_prefill.kernel import chunk_prefill_triton

            chunk_prefill_triton(q, kv, tasks, positions, out, states, rotary, options, sinks)
    else:
        chunk_prefill_reference(q, kv, tasks, positions, out, states, rotary, options, sinks)


def has_unmasked_prefill(q: torch.Tensor, kv: LayerKV, rotary: LayerRotary, options: AttendOptions) -> bool:
    """Return whether the kernel for tiles without a mask can run this layer on this device."""
    head_dim, v_dim = kv.k_cache.shape[3], kv.v_cache.shape[3]
    turns_halves = rotary.inv_freq is None or (rotary.rotary_dim == head_dim and not rotary.is_interleaved)
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype.itemsize == 2
        and kv.k_cache.dtype == q.dtype
        and head_dim == v_dim
        and head_dim in (64, 128)
        and turns_halves
        and options.sliding_window is None
        and options.logit_softcap is None
    )
