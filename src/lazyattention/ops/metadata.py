# SPDX-License-Identifier: Apache-2.0
"""What travels through a transformers model's keyword arguments to our attention function."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lazyattention.ops.plan import AttentionPlan
from lazyattention.ops.rotary import LayerRotary


@dataclass(slots=True)
class AttentionMetadata:
    """One forward pass's plan and the memory it reads and writes.

    Attributes:
        plan: Built once per step.
        kv_caches: Per layer `(k_cache, v_cache)`, each `[num_blocks, block_size, num_kv_heads, head_dim]`; written in
            place at `plan.slot_mapping`.
        rotaries: Per layer, how its heads turn.
        kv_scales: For float8_e4m3fn KV, per layer `(k_scale, v_scale)`, each float32 `[num_kv_heads]`: a stored key
            times its scale is the key. GPU kernels only.
    """

    plan: AttentionPlan
    kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    rotaries: Sequence[LayerRotary]
    kv_scales: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None
