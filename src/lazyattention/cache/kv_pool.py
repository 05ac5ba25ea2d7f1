# SPDX-License-Identifier: Apache-2.0
"""The KV tensors, and copies between slots.

Layout, stated here and nowhere else: per layer `[num_blocks, block_size, num_kv_heads, head_dim]`, keys and values
apart, so that consecutive blocks are consecutive tokens.
"""

import os
from collections.abc import Sequence

import numpy as np
import torch

from lazyattention.errors import ConfigError
from lazyattention.ops.device_plan import send
from lazyattention.ops.rotary import LayerRotary
from lazyattention.ops.rotate import copy_turned

_MAX_AUTO_CPU_BYTES = 4 * 2**30


def kv_bytes_per_token(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values over all layers; shapes are `(num_kv_heads, head_dim)`."""
    return sum(2 * num_kv_heads * head_dim for num_kv_heads, head_dim in shapes) * dtype.itemsize


class KVPool:
    """Owns the KV memory of all layers."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Reserve the memory; it is not initialised, since empty slots are never read.

        Args:
            shapes: Per layer `(num_kv_heads, head_dim)`.
            num_blocks: KV blocks.
            block_size: Tokens per block.
            dtype: Of stored keys and values.
            device: Where they lie.
        """
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.layers = []
        for num_kv_heads, head_dim in shapes:
            shape = (num_blocks, block_size, num_kv_heads, head_dim)
            k_cache, v_cache = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            self.layers.append((k_cache, v_cache))

    def copy_turned(
        self, source_slots: np.ndarray, target_slots: np.ndarray, deltas: np.ndarray, rotaries: Sequence[LayerRotary]
    ) -> None:
        """Copy slots in every layer, turning the keys by `deltas`; all int64 `[num_copies]`."""
        device = self.layers[0][0].device
        source, target, delta = send(np.stack((source_slots, target_slots, deltas)), device)
        for (k_cache, v_cache), rotary in zip(self.layers, rotaries, strict=True):
            copy_turned(k_cache, v_cache, source, target, delta, rotary)

    def checksum(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """Hash the bits of the first `num_tokens` slots of these blocks, all layers; for debugging."""
        total = 0
        index = torch.tensor(list(block_ids), device=self.layers[0][0].device)
        for layer, caches in enumerate(self.layers):
            for which, cache in enumerate(caches):
                bits = cache[index].flatten(0, 1)[:num_tokens].contiguous().view(torch.uint8).to(torch.int64).flatten()
                weights = torch.arange(1, bits.numel() + 1, device=bits.device)
                total = (total * 1_000_003 + int((bits * weights).sum()) + 7 * layer + which) % 2**61
        return total


def choose_num_blocks(
    shapes: Sequence[tuple[int, int]],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    kv_memory_bytes: int | None,
) -> int:
    """Return how many blocks fit into the memory given, or into a safe share of what is free.

    Raises:
        ConfigError: Not even one block fits.
    """
    if kv_memory_bytes is None:
        if torch.device(device).type == "cuda":
            kv_memory_bytes = int(0.85 * torch.cuda.mem_get_info(device)[0])
        else:
            free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            kv_memory_bytes = min(_MAX_AUTO_CPU_BYTES, free_bytes // 4)
    block_bytes = block_size * kv_bytes_per_token(shapes, dtype)
    if kv_memory_bytes < block_bytes:
        raise ConfigError(
            f"kv_memory_bytes is {kv_memory_bytes}, but one block of {block_size} tokens needs {block_bytes}; raise it"
        )
    return kv_memory_bytes // block_bytes
