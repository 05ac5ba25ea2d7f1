# SPDX-License-Identifier: Apache-2.0
"""Merge partial attention states over disjoint keys into attention over all of them."""

import torch

from lazyattention.ops._checks import check_dtype, check_shape
from lazyattention.ops.merge_states.reference import merge_states_reference


def merge_states(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    row_tokens: torch.Tensor,
    num_tokens: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge rows that belong to one query token. Exact up to rounding, not an approximation.

    Args:
        outputs: `[num_rows, num_q_heads, head_dim]`: each row's attention over its own keys.
        lses: `[num_rows, num_q_heads]`, float32 or float64, natural log; `-inf` where a row saw no key.
        row_tokens: int64 `[num_rows]`: the query token of each row; a token may have any number of rows.
        num_tokens: Query tokens in the step.
        sinks: `[num_q_heads]`: one more logit per head that has no value (attention sink), or None.

    Returns:
        `(merged, merged_lse)` of shapes `[num_tokens, num_q_heads, head_dim]` (dtype of outputs) and
        `[num_tokens, num_q_heads]` (dtype of lses; sinks not counted). Tokens with no key at all are 0 and `-inf`.

    Raises:
        ValueError: A shape or dtype differs from the above.

    Source:
        Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax). Sinks: OpenAI 2025, gpt-oss model card.
    """
    check_shape("outputs", outputs, (None, None, None))
    check_shape("lses", lses, outputs.shape[:2])
    check_dtype("lses", lses, torch.float32, torch.float64)
    check_shape("row_tokens", row_tokens, (outputs.shape[0],))
    return merge_states_reference(outputs, lses, row_tokens, num_tokens, sinks)
