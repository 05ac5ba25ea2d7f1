# SPDX-License-Identifier: Apache-2.0
"""Causal attention of consecutive tokens over themselves, one sequence after the other, in obvious PyTorch."""

import torch

from lazyattention.ops.device_plan import CausalBatch


def causal_prefill_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: CausalBatch, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs `[num_tokens, num_q_heads, head_dim]` and lses `[num_tokens, num_q_heads]` of a batch's tokens."""
    group = q.shape[1] // k.shape[1]
    outputs, lses = [], []
    for start, end in zip(batch.cum_seqs[:-1].tolist(), batch.cum_seqs[1:].tolist(), strict=True):
        keys, values = (x[start:end].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("thd,nhd->thn", q[start:end].double(), keys) * softmax_scale
        is_later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores.masked_fill_(is_later[:, None], float("-inf"))
        outputs.append(torch.einsum("thn,nhd->thd", scores.softmax(-1), values))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(lses)
