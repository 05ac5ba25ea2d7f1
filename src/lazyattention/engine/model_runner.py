# SPDX-License-Identifier: Apache-2.0
"""Calls the transformers model on one batch and owns the KV tensors."""

from typing import TYPE_CHECKING

import torch

from lazyattention.cache.kv_pool import KVPool, choose_num_blocks
from lazyattention.config import CacheConfig
from lazyattention.engine.batch import Batch
from lazyattention.errors import ConfigError
from lazyattention.ops import AttentionMetadata, make_plan

if TYPE_CHECKING:
    from lazyattention.models.loaded_model import LoadedModel


class ModelRunner:
    """One model, one KV pool, one device."""

    def __init__(self, loaded: "LoadedModel", config: CacheConfig) -> None:
        """Reserve the KV pool.

        Raises:
            ConfigError: kv_dtype is not a float dtype, or no block fits into kv_memory_bytes.
        """
        self.model = loaded.model
        self.device = loaded.device
        self.rotaries = loaded.rotaries
        self.kv_dtype = _kv_dtype(config.kv_dtype, loaded.dtype)
        num_blocks = config.num_blocks or choose_num_blocks(
            loaded.kv_shapes,
            block_size=config.block_size,
            dtype=self.kv_dtype,
            device=self.device,
            kv_memory_bytes=config.kv_memory_bytes,
        )
        self.kv_pool = KVPool(
            loaded.kv_shapes,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=self.kv_dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Compute the batch; its KV is in the pool afterwards.

        Returns:
            Logits `[num_sampled, vocab_size]` of the batch's sampled rows, in the model's dtype.
        """
        if len(batch.copy_sources):
            self.kv_pool.copy_turned(batch.copy_sources, batch.copy_targets, batch.copy_deltas, self.rotaries)
        plan = make_plan(
            batch.positions,
            batch.slot_mapping,
            batch.ranges,
            batch.row_groups,
            block_size=self.kv_pool.block_size,
            store_turns=batch.store_turns,
            device=self.device,
        )
        output = self.model(
            input_ids=torch.from_numpy(batch.token_ids).to(self.device)[None],
            position_ids=plan.positions[None],
            use_cache=False,
            attention_metadata=AttentionMetadata(plan, self.kv_pool.layers, self.rotaries),
            logits_to_keep=torch.tensor(batch.sample_rows, dtype=torch.int64, device=self.device),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _kv_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    if name == "auto":
        return model_dtype
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(f"kv_dtype must be auto, float64, float32, bfloat16 or float16, got {name!r}")
    return dtype
