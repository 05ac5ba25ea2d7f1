# SPDX-License-Identifier: Apache-2.0
"""The kernels that torch brings: cuDNN for one long sequence, FlashAttention-2 for short ones side by side.

cuDNN prepares a kernel for each shape, which takes a quarter of a second, so that lengths are padded to few. Keys behind
the last query are seen by none, so that padding needs no mask of its own.
"""

import torch

from lazyattention.ops._causal_layout import LONG
from lazyattention.ops.device_plan import CausalBatch

_PADDED_TO = LONG


def causal_prefill_stock(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: CausalBatch, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs `[num_tokens, num_q_heads, head_dim]` and lses `[num_tokens, num_q_heads]` of a batch's tokens."""
    if batch.max_len >= _PADDED_TO:
        assert batch.num_seqs == 1, "long sequences have batches of their own"
        return _cudnn(q, k, v, softmax_scale)
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, batch.cum_seqs, batch.cum_seqs, batch.max_len, batch.max_len, 0.0, True, False, scale=softmax_scale
    )
    return output, lse.T  # [num_q_heads, num_tokens] before


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = q.shape[0]
    length = -(-num_tokens // _PADDED_TO) * _PADDED_TO

    def padded(x: torch.Tensor) -> torch.Tensor:
        """Return `[1, num_heads, length, head_dim]`, tokens first in memory."""
        room = x.new_empty((length, *x.shape[1:]))
        room[:num_tokens] = x
        room[num_tokens:] = 0.0  # what is there may be NaN, which a weight of 0 does not hide
        return room.transpose(0, 1)[None]

    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        padded(q), padded(k), padded(v), None, True, 0.0, True, False, scale=softmax_scale
    )
    return output[0, :, :num_tokens].transpose(0, 1), lse.reshape(-1, length)[:, :num_tokens].T
