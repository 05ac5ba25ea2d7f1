# SPDX-License-Identifier: Apache-2.0
"""What the kernels of one layer read and write: its KV, and the buffer of partial states."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's KV memory.

    Attributes:
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous; float8_e4m3fn with scales, else q's
            dtype.
        v_cache: `[num_blocks, block_size, num_kv_heads, v_dim]`.
        k_scale: float32 `[num_kv_heads]`: a stored key times this is the key. None = 1.
        v_scale: Likewise for values; given exactly when k_scale is.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PartialStates:
    """Partial attention results, written by shared_decode and chunk_prefill, read by merge_states.

    Attributes:
        outputs: `[num_parts, num_q_heads, v_dim]` in q's dtype.
        lses: float32 `[num_parts, num_q_heads]`, natural log; `-inf` and output 0 where a part held no visible key.
    """

    outputs: torch.Tensor
    lses: torch.Tensor
