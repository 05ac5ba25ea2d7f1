# SPDX-License-Identifier: Apache-2.0
"""Causal attention of a step's new tokens over themselves: cold chunks, and prompts of which nothing is stored."""

import torch

from lazyattention.ops._checks import check_shape
from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.causal_prefill.reference import causal_prefill_reference
from lazyattention.ops.device_plan import CausalBatch
from lazyattention.ops.layer_kv import LayerKV, PartialStates

# Shorter sequences are not worth launches of their own.
_MIN_TOKENS = 128


def causal_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: CausalBatch,
    out: torch.Tensor,
    states: PartialStates,
    options: AttendOptions,
    *,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the output of a batch of sequences that see nothing else, or their partial states. Exact up to rounding.

    Args:
        q: `[num_tokens, num_q_heads, head_dim]`, turned at true positions.
        k: `[num_tokens, num_kv_heads, head_dim]`, the step's new keys, turned at the same positions.
        v: As k.
        batch: From the step's device plan.
        out: `[num_tokens, num_q_heads, head_dim]`; written at tokens that need no merge.
        states: Written in place, at the parts the batch names.
        options: Scale; neither window nor cap.
        sinks: `[num_q_heads]` extra logits without a value, or None; they enter outputs, not partial states.

    Raises:
        ValueError: A shape differs from the above, or a window or cap was given.
    """
    check_shape("k", k, (q.shape[0], None, q.shape[2]))
    check_shape("v", v, k.shape)
    if options.sliding_window is not None or options.logit_softcap is not None:
        raise ValueError("sliding_window and logit_softcap must be None: layers with them have no causal batches")
    tokens = slice(batch.token_start, batch.token_start + batch.num_tokens)
    q, k, v = q[tokens], k[tokens], v[tokens]
    if q.is_cuda:
        from lazyattention.ops.causal_prefill.stock import causal_prefill_stock

        outputs, lses = causal_prefill_stock(q, k, v, batch, options.softmax_scale)
    else:
        outputs, lses = causal_prefill_reference(q, k, v, batch, options.softmax_scale)
    if batch.parts is not None:
        states.outputs.index_copy_(0, batch.parts, outputs.to(states.outputs.dtype))
        states.lses.index_copy_(0, batch.parts, lses.to(states.lses.dtype))
        return
    if sinks is not None:
        lses = lses.float()
        outputs = outputs * (lses - torch.logaddexp(lses, sinks.float())).exp()[..., None]
    out[tokens] = outputs.to(out.dtype)


def causal_prefill_min_tokens(q: torch.Tensor, kv: LayerKV, options: AttendOptions) -> int:
    """Return from how many tokens on a sequence of this layer goes through `causal_prefill`; 0 = never.

    What torch brings is faster than `chunk_prefill` on Hopper GPUs, where it was measured, and holds heads of 64 and 128.
    """
    head_dim = kv.k_cache.shape[3]
    is_held = (
        q.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        and q.dtype.itemsize == 2
        and kv.k_cache.dtype == q.dtype
        and head_dim == kv.v_cache.shape[3]
        and head_dim in (64, 128)
        and options.sliding_window is None
        and options.logit_softcap is None
    )
    return _MIN_TOKENS if is_held else 0
