# SPDX-License-Identifier: Apache-2.0
"""Write new keys and values into the paged pool."""

import torch

from lazyattention.ops._checks import check_dtype, check_shape
from lazyattention.ops.store_kv.reference import store_kv_reference


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Copy each token's key and value to its slot. Exact.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]`.
        v: As k.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous; written in place.
        v_cache: As k_cache.
        slot_mapping: int64 `[num_tokens]`; -1 = do not store. Slots are distinct.

    Raises:
        ValueError: A shape or dtype differs from the above.
    """
    check_shape("k", k, (None, k_cache.shape[2], k_cache.shape[3]))
    check_shape("v", v, (k.shape[0], v_cache.shape[2], v_cache.shape[3]))
    check_shape("slot_mapping", slot_mapping, (k.shape[0],))
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    store_kv_reference(k, v, k_cache, v_cache, slot_mapping)
