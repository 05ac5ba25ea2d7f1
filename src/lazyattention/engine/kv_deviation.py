# SPDX-License-Identifier: Apache-2.0
"""How far the stored keys and values of a prompt's documents are from those under full attention, in the second layer.

Needs the first layer's attention over the whole prompt and the second one's keys and values, nothing more: the forward
pass ends there. Its KV lies in memory of its own; the pool is only read.
"""

import numpy as np
import torch

from lazyattention.engine.batch import slots_of
from lazyattention.engine.model_runner import ModelRunner
from lazyattention.engine.request import Sequence
from lazyattention.ops import AttentionMetadata, KVRange, LayerCall, RowGroup, make_plan
from lazyattention.ops.rotary import turn, turn_table

# The layer that is compared: keys and values of the one before it depend on each token alone.
LAYER = 1
# Prompt tokens computed at once; bounds memory.
_SLICE_TOKENS = 2048


class _EnoughError(Exception):
    """Ends the forward pass."""


@torch.inference_mode()
def kv_deviations(runner: ModelRunner, sequence: Sequence) -> torch.Tensor:
    """Return the deviation of each prompt token, `[num_tokens]` up to the last document's end; 0 for text.

    A token's deviation is the Euclidean distance of its stored keys and values, all heads together, to those that full
    attention over the prompt gives it. Keys are compared where they were stored.

    Args:
        runner: Whose model and pool.
        sequence: Admitted, all its chunks ready.
    """
    planned = sequence.group.plan.spans
    documents = [span for span in sequence.spans if planned[span.source].span.is_document and span.chunk]
    end = max(span.start + len(span.token_ids) for span in documents)
    fresh_k, fresh_v = _second_layer(runner, sequence.group.prompt_token_ids[:end])
    k_cache, v_cache = (cache.flatten(0, 1) for cache in runner.kv_pool.layers[LAYER])
    dtype = torch.float64 if fresh_k.dtype == torch.float64 else torch.float32
    rotary = runner.rotaries[LAYER]
    deviations = torch.zeros(end, dtype=dtype, device=runner.device)
    for span in documents:
        assert span.chunk is not None
        inside = np.arange(len(span.token_ids))
        slots = torch.from_numpy(slots_of(span.chunk.block_ids, inside, runner.kv_pool.block_size)).to(runner.device)
        here = slice(span.start, span.start + len(inside))
        k, v = fresh_k[here].to(dtype), fresh_v[here].to(dtype)
        if rotary.inv_freq is not None:
            back = np.full(len(inside), span.chunk.base - span.start)
            turns = torch.from_numpy(back if span.chunk.keys_turned else -(span.start + inside)).to(runner.device)
            k = turn(k, *turn_table(rotary.inv_freq, turns, dtype), rotary)
        squares = (k - k_cache[slots].to(dtype)).square().sum(dim=(1, 2))
        squares += (v - v_cache[slots].to(dtype)).square().sum(dim=(1, 2))
        deviations[here] = squares.sqrt()
    return deviations


def _second_layer(runner: ModelRunner, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values `[num_tokens, num_kv_heads, head_dim]` of the second layer under full attention."""
    block_size = runner.kv_pool.block_size
    num_blocks = -(-len(token_ids) // block_size)
    caches = [
        tuple(cache.new_zeros((num_blocks, *cache.shape[1:])) for cache in layer)
        for layer in runner.kv_pool.layers[: LAYER + 1]
    ]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def observe(call: LayerCall, metadata: AttentionMetadata) -> None:
        if call.layer_idx == LAYER:
            found.append((call.k.clone(), call.v.clone()))
            raise _EnoughError

    for start in range(0, len(token_ids), _SLICE_TOKENS):
        ids = token_ids[start : start + _SLICE_TOKENS]
        positions = np.arange(start, start + len(ids))
        blocks = list(range(-(-(start + len(ids)) // block_size)))
        plan = make_plan(
            positions,
            positions,  # a token's slot is its position
            [KVRange("prompt", blocks, start + len(ids), 0)],
            [RowGroup(0, 0, len(ids), 0)],
            block_size=block_size,
            device=runner.device,
        )
        metadata = AttentionMetadata(plan, caches, runner.rotaries, observer=observe)  # type: ignore[arg-type]
        try:
            runner.call_layers(ids, metadata)
        except _EnoughError:
            continue
        raise AssertionError("the model has a second layer")
    k, v = zip(*found, strict=True)
    return torch.cat(k), torch.cat(v)
