# SPDX-License-Identifier: Apache-2.0
"""Merge partial attention states, in obvious PyTorch; also the CPU implementation."""

import torch

from lazyattention.ops.layer_kv import PartialStates


def merge_states_reference(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    row_tokens: torch.Tensor,
    num_tokens: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, num_q_heads, head_dim = outputs.shape
    index = row_tokens[:, None].expand(-1, num_q_heads)
    largest = lses.new_full((num_tokens, num_q_heads), float("-inf"))
    largest.scatter_reduce_(0, index, lses, "amax")
    # -inf - -inf is nan: a token without any key keeps a finite pivot instead.
    pivot = largest.masked_fill(largest == float("-inf"), 0.0)
    weights = (lses - pivot[row_tokens]).exp()  # [num_rows, num_q_heads]
    total = lses.new_zeros((num_tokens, num_q_heads)).index_add_(0, row_tokens, weights)
    merged_lse = total.log() + pivot
    merged = lses.new_zeros((num_tokens, num_q_heads, head_dim))
    merged.index_add_(0, row_tokens, weights[..., None] * outputs.to(lses.dtype))
    if sinks is not None:
        total = total + (sinks.to(lses.dtype) - pivot).exp()
    merged /= total.masked_fill(total == 0, 1.0)[..., None]
    return merged.to(outputs.dtype), merged_lse


def merge_parts_reference(
    states: PartialStates,
    out: torch.Tensor,
    num_merges: torch.Tensor,
    merge_tokens: torch.Tensor,
    merge_starts: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    tokens = merge_tokens[: int(num_merges)].long()
    counts = merge_starts.diff()[: int(num_merges)].long()
    row_tokens = tokens.repeat_interleave(counts)
    used = slice(0, len(row_tokens))
    merged, _ = merge_states_reference(states.outputs[used], states.lses[used], row_tokens, out.shape[0], sinks)
    out[tokens] = merged[tokens]
