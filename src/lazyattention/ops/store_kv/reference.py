# SPDX-License-Identifier: Apache-2.0
"""Write new keys and values into the paged pool, in obvious PyTorch."""

import torch


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    stored = slot_mapping >= 0
    if not bool(stored.all()):
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, k.to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, v.to(v_cache.dtype))
