# SPDX-License-Identifier: Apache-2.0
"""Copy stored KV to other slots, turning the keys on the way."""

import torch

from lazyattention.ops._checks import check_dtype, check_shape
from lazyattention.ops.rotary import LayerRotary
from lazyattention.ops.rotate.reference import copy_turned_reference


def copy_turned(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    deltas: torch.Tensor,
    rotary: LayerRotary,
) -> None:
    """Copy keys, turned by `deltas`, and values from source to target slots of one layer. In place.

    Args:
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous; written in place.
        v_cache: As k_cache.
        source_slots: int64 `[num_copies]`; only read.
        target_slots: int64 `[num_copies]`; distinct, and none of them a source.
        deltas: int64 `[num_copies]`, tokens: target position minus stored position.
        rotary: How this layer's keys turn.

    Raises:
        ValueError: A shape or dtype differs from the above.

    Source:
        Ma et al. 2025, arXiv:2409.15355, section 2.3 (position re-encoding).
    """
    for name, x in (("source_slots", source_slots), ("target_slots", target_slots), ("deltas", deltas)):
        check_shape(name, x, (source_slots.shape[0],))
        check_dtype(name, x, torch.int64)
    if k_cache.is_cuda:
        # Imported here: triton does not come with CPU builds of torch.
        from lazyattention.ops.rotate.kernel import copy_turned_triton

        copy_turned_triton(k_cache, v_cache, source_slots, target_slots, deltas, rotary)
        return
    copy_turned_reference(k_cache, v_cache, source_slots, target_slots, deltas, rotary)
