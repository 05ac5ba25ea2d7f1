# SPDX-License-Identifier: Apache-2.0
"""One layer's attention, from new keys to merged output: store, attend, merge."""

import torch

from lazyattention.errors import UnsupportedError
from lazyattention.ops._layout import LayoutSpec
from lazyattention.ops._tiles import num_multiprocessors, tiles_for
from lazyattention.ops.attend import AttendOptions, attend
from lazyattention.ops.causal_prefill import causal_prefill, causal_prefill_min_tokens
from lazyattention.ops.chunk_prefill import chunk_prefill, has_unmasked_prefill
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.merge_states import merge_parts, merge_states
from lazyattention.ops.metadata import AttentionMetadata, LayerCall
from lazyattention.ops.rotary import LayerRotary, turn
from lazyattention.ops.shared_decode import shared_decodes
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
        UnsupportedError: KV has scales, but the plan is not for the kernels.
    """
    options = AttendOptions(softmax_scale, sliding_window, logit_softcap)
    if metadata.plan.arrays is not None:
        return run_kernels(q, k, v, metadata, layer_idx, options, sinks)
    if metadata.kv_scales is not None:
        raise UnsupportedError("kv_scales need a plan made for the kernels; keep KV in the model's dtype on the CPU")
    plan, rotary = metadata.plan, metadata.rotaries[layer_idx]
    k_cache, v_cache = metadata.kv_caches[layer_idx]
    stored_k = k
    if plan.store_turns is not None and rotary.inv_freq is not None:
        dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        stored_k = turn(k, *plan.key_store_turns(rotary, dtype), rotary)
    store_kv(stored_k, v, k_cache, v_cache, plan.slot_mapping)
    if metadata.observer is not None:
        metadata.observer(LayerCall(layer_idx, q, k, v, options, sinks), metadata)
    outputs, lses = attend(q, k_cache, v_cache, plan, rotary, options)
    if plan.is_single_part and sinks is None:
        return outputs
    return merge_states(outputs, lses, plan.row_tokens, plan.num_tokens, sinks)[0]


def run_kernels(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: AttentionMetadata,
    layer_idx: int,
    options: AttendOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `run`, for a plan made for the kernels: no host synchronisation, the same launches for the same plan."""
    plan, rotary = metadata.plan, metadata.rotaries[layer_idx]
    scales = None if metadata.kv_scales is None else metadata.kv_scales[layer_idx]
    kv = LayerKV(*metadata.kv_caches[layer_idx], *(scales or ()))
    store_kv(
        k, v, kv.k_cache, kv.v_cache, plan.slot_mapping, store_turns=plan.store_turns, rotary=rotary, kv_scales=scales
    )
    if metadata.observer is not None:
        metadata.observer(LayerCall(layer_idx, q, k, v, options, sinks), metadata)
    work = plan.device_plan(layout_spec(q, kv, plan.block_size, rotary, options))
    out = torch.empty((*q.shape[:2], kv.v_cache.shape[3]), dtype=q.dtype, device=q.device)
    states = PartialStates(
        torch.empty((work.num_parts, q.shape[1], out.shape[2]), dtype=q.dtype, device=q.device),
        torch.empty((work.num_parts, q.shape[1]), dtype=torch.float32, device=q.device),
    )
    for batch in work.causal:
        causal_prefill(q, k, v, batch, out, states, options, sinks=sinks)
    for prefill_tasks in work.prefill:
        chunk_prefill(q, kv, prefill_tasks, plan.positions, out, states, rotary, options, sinks=sinks)
    shared_decodes(q, kv, work.decode, plan.positions, states, rotary, options)
    merge_parts(states, out, work.num_merges, work.merge_tokens, work.merge_starts, sinks=sinks)
    return out


def layout_spec(
    q: torch.Tensor, kv: LayerKV, block_size: int, rotary: LayerRotary, options: AttendOptions
) -> LayoutSpec:
    """Return what shapes the device plan of a layer."""
    num_kv_heads, head_dim = kv.k_cache.shape[2:]
    tiles = tiles_for(q.device, head_dim, q.dtype)
    group = q.shape[1] // num_kv_heads
    return LayoutSpec(
        num_kv_heads=num_kv_heads,
        group=group,
        block_size=block_size,
        sliding_window=options.sliding_window,
        decode_few=tiles.decode_few,
        decode_many=tiles.decode_many,
        decode_unturned=tiles.decode_unturned,
        prefill=tiles.prefill,
        prefill_unturned=tiles.prefill_unturned,
        num_programs=num_multiprocessors(q.device),
        prefill_min_tokens=max(2, tiles.prefill_min_rows // group),
        has_unmasked_prefill=has_unmasked_prefill(q, kv, rotary, options),
        causal_min_tokens=causal_prefill_min_tokens(q, kv, options),
    )
