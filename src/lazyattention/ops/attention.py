# SPDX-License-Identifier: Apache-2.0
"""One layer's attention, from new keys to merged output: store, attend, merge."""

import torch

from lazyattention.ops.attend import AttendOptions, attend
from lazyattention.ops.merge_states import merge_states
from lazyattention.ops.metadata import AttentionMetadata
from lazyattention.ops.rotary import turn
from lazyattention.ops.store_kv import store_kv


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: AttentionMetadata,
    layer_idx: int,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store the step's new keys and values, then attend to everything each token may see. Exact up to rounding.

    Args:
        q: `[num_tokens, num_q_heads, head_dim]`, turned at true positions.
        k: `[num_tokens, num_kv_heads, head_dim]`, turned at the positions they are to be stored for.
        v: As k.
        metadata: The step's plan and the KV pool; the pool is written in place.
        layer_idx: Which layer's pool and rotary to use.
        softmax_scale: Multiplies q·k.
        sliding_window: Visible distance in tokens on true positions, or None.
        logit_softcap: Cap of the scores, or None.
        sinks: `[num_q_heads]` extra logits without a value, or None.

    Returns:
        `[num_tokens, num_q_heads, head_dim]` in q's dtype.

    Raises:
        ValueError: A shape or dtype is not as above.
    """
    plan, rotary = metadata.plan, metadata.rotaries[layer_idx]
    k_cache, v_cache = metadata.kv_caches[layer_idx]
    if plan.store_turns is not None and rotary.inv_freq is not None:
        dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        k = turn(k, *plan.key_store_turns(rotary, dtype), rotary)
    store_kv(k, v, k_cache, v_cache, plan.slot_mapping)
    options = AttendOptions(softmax_scale, sliding_window, logit_softcap)
    outputs, lses = attend(q, k_cache, v_cache, plan, rotary, options)
    if plan.is_single_part and sinks is None:
        return outputs
    return merge_states(outputs, lses, plan.row_tokens, plan.num_tokens, sinks)[0]
