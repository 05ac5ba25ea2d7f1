# SPDX-License-Identifier: Apache-2.0
"""What travels through a transformers model's keyword arguments to our attention function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.plan import AttentionPlan
from lazyattention.ops.rotary import LayerRotary


@dataclass(frozen=True, slots=True, eq=False)
class LayerCall:
    """What one layer's attention was called with; shapes as in `attention.run`.

    Attributes:
        layer_idx: Which layer.
        q: Turned at true positions.
        k: Turned likewise.
        v: Not turned.
        options: Scale, window and cap of the scores.
        sinks: `[num_q_heads]` extra logits without a value, or None.
    """

    layer_idx: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: AttendOptions
    sinks: torch.Tensor | None


@dataclass(slots=True)
class AttentionMetadata:
    """One forward pass's plan and the memory it reads and writes.

    Attributes:
        plan: Built once per step.
        kv_caches: Per layer `(k_cache, v_cache)`, each `[num_blocks, block_size, num_kv_heads, head_dim]`; written in
            place at `plan.slot_mapping`.
        rotaries: Per layer, how its heads turn.
        observer: Called in each layer once its new keys and values are stored; it may read, and it may raise to end the
            forward pass there.
        kv_scales: For float8_e4m3fn KV, per layer `(k_scale, v_scale)`, each float32 `[num_kv_heads]`: a stored key
            times its scale is the key. GPU kernels only.
    """

    plan: AttentionPlan
    kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    rotaries: Sequence[LayerRotary]
    kv_scales: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None
    observer: "Observer | None" = None


Observer = Callable[[LayerCall, AttentionMetadata], None]
