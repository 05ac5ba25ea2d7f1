# SPDX-License-Identifier: Apache-2.0
"""Attention of every query row over its KV range: contract, checks and choice of implementation."""

import torch

from lazyattention.ops._checks import check_shape
from lazyattention.ops.attend.cpu import attend_cpu
from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.plan import AttentionPlan
from lazyattention.ops.rotary import LayerRotary


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    rotary: LayerRotary,
    options: AttendOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one partial state per row of the plan. Exact up to rounding.

    Args:
        q: `[num_tokens, num_q_heads, head_dim]`, turned at true positions.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous; only read.
        v_cache: As k_cache.
        plan: The step's plan.
        rotary: How this layer's heads turn.
        options: Scale, window and cap.

    Returns:
        `(outputs, lses)`: `[num_rows, num_q_heads, head_dim]` in q's dtype and `[num_rows, num_q_heads]` in float32
        (float64 for float64 q), natural log. A row that sees no key is 0 and `-inf`.

    Raises:
        ValueError: A shape differs from the above, num_q_heads is no multiple of num_kv_heads, or the plan was made
            for the kernels.
    """
    if plan.arrays is not None:
        raise ValueError(
            "plan was made for the kernels and has no items; call ops.run, or make_plan(for_kernels=False)"
        )
    check_shape("q", q, (plan.num_tokens, None, k_cache.shape[3]))
    check_shape("v_cache", v_cache, (k_cache.shape[0], plan.block_size, k_cache.shape[2], None))
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"num_q_heads {q.shape[1]} is no multiple of num_kv_heads {k_cache.shape[2]}")
    return attend_cpu(q, k_cache, v_cache, plan, rotary, options)
