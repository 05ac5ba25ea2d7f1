# SPDX-License-Identifier: Apache-2.0
"""Write new keys and values into the paged pool."""

import torch

from lazyattention.ops._checks import check_dtype, check_shape
from lazyattention.ops.rotary import LayerRotary, turn, turn_table
from lazyattention.ops.store_kv.reference import store_kv_reference


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    store_turns: torch.Tensor | None = None,
    rotary: LayerRotary | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Copy each token's key and value to its slot. Exact up to the rounding of turned keys.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]`.
        v: As k.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous; written in place.
        v_cache: As k_cache.
        slot_mapping: int64 `[num_tokens]`; -1 = do not store. Slots are distinct.
        store_turns: int64 `[num_tokens]`: turn each key by this many tokens on the way, or None.
        rotary: How this layer's keys turn; needed with store_turns.
        kv_scales: float32 `[num_kv_heads]` each: store keys and values divided by these, or None.

    Raises:
        ValueError: A shape or dtype differs from the above.
    """
    check_shape("k", k, (None, k_cache.shape[2], k_cache.shape[3]))
    check_shape("v", v, (k.shape[0], v_cache.shape[2], v_cache.shape[3]))
    check_shape("slot_mapping", slot_mapping, (k.shape[0],))
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    if k.is_cuda:
        # Imported here: triton does not come with CPU builds of torch.
        from lazyattention.ops.store_kv.kernel import store_kv_triton

        store_kv_triton(
            k, v, k_cache, v_cache, slot_mapping, store_turns=store_turns, rotary=rotary, kv_scales=kv_scales
        )
        return
    if store_turns is not None and rotary is not None and rotary.inv_freq is not None:
        dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        k = turn(k, *turn_table(rotary.inv_freq, store_turns, dtype), rotary)
    if kv_scales is not None:
        k, v = k / kv_scales[0][:, None], v / kv_scales[1][:, None]
    store_kv_reference(k, v, k_cache, v_cache, slot_mapping)
