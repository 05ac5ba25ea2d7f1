# SPDX-License-Identifier: Apache-2.0
"""Merge the partial states of each query token in Triton: one program per token and query head."""

import torch
import triton
import triton.language as tl

from lazyattention.ops._tiles import MERGE_WARPS, next_power_of_2


@triton.jit
def _merge_states_kernel(
    part_out_ptr,  # [num_parts, NUM_Q_HEADS, V_DIM]
    part_lse_ptr,  # [num_parts, NUM_Q_HEADS] float32, natural log
    out_ptr,  # [num_tokens, NUM_Q_HEADS, V_DIM]
    out_lse_ptr,  # [num_tokens, NUM_Q_HEADS] float32; not written unless HAS_LSE
    num_merges_ptr,  # [1] int32: merges that are real; programs beyond it do nothing
    merge_tokens_ptr,  # [num_merges] int32: query token of each merge
    merge_starts_ptr,  # [num_merges + 1] int32: parts of merge i are merge_starts[i] : merge_starts[i + 1]
    order_ptr,  # [num_parts] int64: where the parts lie, if not in order
    sinks_ptr,  # [NUM_Q_HEADS]
    NUM_Q_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_LSE: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    TILE_V: tl.constexpr,
):
    merge, head = tl.program_id(0), tl.program_id(1)
    # Read together, before it is known whether they are needed: one wait instead of two.
    num_merges, token = tl.load(num_merges_ptr), tl.load(merge_tokens_ptr + merge).to(tl.int64)
    start, end = tl.load(merge_starts_ptr + merge), tl.load(merge_starts_ptr + merge + 1)
    if merge >= num_merges:
        return
    dims = tl.arange(0, TILE_V)
    running_max = tl.full([], float("-inf"), tl.float32)
    running_sum = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([TILE_V], tl.float32)
    for first in range(start, end, TILE_PARTS):
        part = first + tl.arange(0, TILE_PARTS)
        is_part = part < end
        if HAS_ORDER:
            row = tl.load(order_ptr + part, mask=is_part, other=0) * NUM_Q_HEADS + head
        else:
            row = part.to(tl.int64) * NUM_Q_HEADS + head
        lse = tl.load(part_lse_ptr + row, mask=is_part, other=float("-inf"))
        parts = tl.load(
            part_out_ptr + (row * V_DIM)[:, None] + dims[None, :],
            mask=is_part[:, None] & (dims < V_DIM)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(running_max, tl.max(lse, 0))
        # -inf - -inf is nan; a token without any key keeps a finite pivot instead.
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(lse - pivot)
        keep = tl.exp(running_max - pivot)
        running_sum = running_sum * keep + tl.sum(weights, 0)
        acc = acc * keep + tl.sum(weights[:, None] * parts.to(tl.float32), 0)
        running_max = new_max
    if HAS_LSE:
        tl.store(out_lse_ptr + token * NUM_Q_HEADS + head, running_max + tl.log(running_sum))
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        # One pivot for both, so that neither exponential overflows.
        pivot = tl.maximum(running_max, sink)
        keep = tl.exp(running_max - pivot)
        acc, running_sum = acc * keep, running_sum * keep + tl.exp(sink - pivot)
    merged = acc / tl.where(running_sum == 0.0, 1.0, running_sum)
    tl.store(
        out_ptr + (token * NUM_Q_HEADS + head) * V_DIM + dims,
        merged.to(out_ptr.dtype.element_ty),
        mask=dims < V_DIM,
    )


def merge_parts_triton(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    num_merges: torch.Tensor,
    merge_tokens: torch.Tensor,
    merge_starts: torch.Tensor,
    *,
    order: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
    num_warps: int = MERGE_WARPS,
) -> None:
    """Merge parts `merge_starts[i] : merge_starts[i + 1]` into row `merge_tokens[i]` of `out`."""
    if merge_tokens.shape[0] == 0:
        return
    _, num_q_heads, v_dim = part_out.shape
    _merge_states_kernel[(merge_tokens.shape[0], num_q_heads)](
        part_out,
        part_lse,
        out,
        out if out_lse is None else out_lse,
        num_merges,
        merge_tokens,
        merge_starts,
        merge_tokens if order is None else order,
        part_lse if sinks is None else sinks,
        num_q_heads,
        v_dim,
        HAS_SINKS=sinks is not None,
        HAS_ORDER=order is not None,
        HAS_LSE=out_lse is not None,
        TILE_PARTS=16,
        TILE_V=next_power_of_2(v_dim),
        num_warps=num_warps,
    )


def merge_states_triton(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    row_tokens: torch.Tensor,
    num_tokens: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    sorted_tokens, order = row_tokens.sort(stable=True)
    tokens = torch.arange(num_tokens + 1, device=outputs.device)
    merged = torch.empty((num_tokens, *outputs.shape[1:]), dtype=outputs.dtype, device=outputs.device)
    merged_lse = torch.empty((num_tokens, outputs.shape[1]), dtype=torch.float32, device=outputs.device)
    merge_parts_triton(
        outputs.contiguous(),
        lses.contiguous(),
        merged,
        tokens[-1:].to(torch.int32),
        tokens[:-1].to(torch.int32),
        torch.searchsorted(sorted_tokens, tokens).to(torch.int32),
        order=order,
        sinks=sinks,
        out_lse=merged_lse,
    )
    return merged, merged_lse
