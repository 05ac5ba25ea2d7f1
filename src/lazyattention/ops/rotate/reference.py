# SPDX-License-Identifier: Apache-2.0
"""Copy stored KV and turn the keys, in obvious PyTorch; also the CPU implementation."""

import torch

from lazyattention.ops.rotary import LayerRotary, turn, turn_table


def copy_turned_reference(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    deltas: torch.Tensor,
    rotary: LayerRotary,
) -> None:
    flat_k = k_cache.view(-1, *k_cache.shape[2:])
    flat_v = v_cache.view(-1, *v_cache.shape[2:])
    k = flat_k[source_slots]
    if rotary.inv_freq is not None:
        dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        k = turn(k, *turn_table(rotary.inv_freq, deltas, dtype), rotary)
    flat_k.index_copy_(0, target_slots, k)
    flat_v.index_copy_(0, target_slots, flat_v[source_slots])
