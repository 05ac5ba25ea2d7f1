# SPDX-License-Identifier: Apache-2.0
"""Merge partial attention states over disjoint keys into attention over all of them."""

import torch

from lazyattention.ops._checks import check_dtype, check_shape
from lazyattention.ops.layer_kv import PartialStates
from lazyattention.ops.merge_states.reference import merge_parts_reference, merge_states_reference


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
    if outputs.is_cuda and lses.dtype == torch.float32:
        # Imported here: triton does not come with CPU builds of torch.
        from lazyattention.ops.merge_states.kernel import merge_states_triton

        return merge_states_triton(outputs, lses, row_tokens, num_tokens, sinks)
    return merge_states_reference(outputs, lses, row_tokens, num_tokens, sinks)


def merge_parts(
    states: PartialStates,
    out: torch.Tensor,
    num_merges: torch.Tensor,
    merge_tokens: torch.Tensor,
    merge_starts: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge states that lie side by side, as a device plan numbers them, into the output of their token. In place.

    Args:
        states: Parts `merge_starts[i] : merge_starts[i + 1]` belong to query token `merge_tokens[i]`.
        out: `[num_tokens, num_q_heads, v_dim]`, contiguous; rows named in `merge_tokens` are written, 0 without parts.
        num_merges: int32 `[1]`; later entries of merge_tokens are ignored.
        merge_tokens: int32 `[max_merges]`.
        merge_starts: int32 `[max_merges + 1]`.
        sinks: As in `merge_states`.

    Raises:
        ValueError: A shape differs from the above.
    """
    check_shape("states.outputs", states.outputs, (None, out.shape[1], out.shape[2]))
    check_shape("merge_starts", merge_starts, (merge_tokens.shape[0] + 1,))
    if out.is_cuda:
        from lazyattention.ops.merge_states.kernel import merge_parts_triton

        merge_parts_triton(states.outputs, states.lses, out, num_merges, merge_tokens, merge_starts, sinks=sinks)
    else:
        merge_parts_reference(states, out, num_merges, merge_tokens, merge_starts, sinks)
