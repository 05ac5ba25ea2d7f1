# SPDX-License-Identifier: Apache-2.0
"""What chunk_prefill and shared_decode do alike inside a kernel: load keys, score them, fold them into a state.

A state is `(acc, running_max, running_sum)`; its maximum is kept in base 2 and leaves kernels as a natural logarithm.
"""

import triton
import triton.language as tl

from lazyattention.ops.rotate.kernel import (
    TURN_HALVES,
    TURN_NONE,
    cos_sin,
    load_turned,
    load_turned_halves,
    partners,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_query(
    row_ptrs,  # [TILE_M] start of each (token, head)
    is_row,  # [TILE_M]
    amounts,  # [TILE_M] or scalar: tokens to turn by
    turns_ptr,
    HEAD_DIM: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_START: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_D: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """Load a query tile, turned; as two halves, or twice the same whole."""
    if TURN == TURN_HALVES:
        dims = tl.arange(0, TILE_HALF)[None, :]
        loaded = is_row[:, None] & (dims < HALF)
        first, second = load_turned_halves(row_ptrs[:, None], dims, amounts, loaded, turns_ptr, HALF, IS_TURNED)
        return first, second
    else:
        dims = tl.arange(0, TILE_D)[None, :]
        loaded = is_row[:, None] & (dims < HEAD_DIM)
        whole = load_turned(
            row_ptrs[:, None],
            dims,
            amounts,
            loaded,
            turns_ptr,
            HALF,
            ROTARY_START,
            IS_INTERLEAVED,
            IS_TURNED and TURN != TURN_NONE,
        )
        return whole, whole


@triton.jit
def key_turns(
    n,  # [TILE_KV] 0, 1, ...
    turns_ptr,
    HEAD_DIM: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_START: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_D: tl.constexpr,
    KEYS_TURNED: tl.constexpr,
):
    """Cos and sin that turn a tile's unturned keys by their index in it, `[dims, TILE_KV]`; the same for every tile.

    The query is turned back by the position of the tile's first key, so that no key needs a table look-up of its own.
    """
    if KEYS_TURNED or TURN == TURN_NONE:
        return n, n
    elif TURN == TURN_HALVES:
        dims = tl.arange(0, TILE_HALF)[:, None]
        cos, sin = cos_sin(turns_ptr, n[None, :], dims, dims < HALF, HALF)
        return cos, sin
    else:
        dims = tl.arange(0, TILE_D)[:, None]
        turns, pairs, partner_dims, sign = partners(dims, ROTARY_START, HALF, IS_INTERLEAVED)
        cos, sin = cos_sin(turns_ptr, n[None, :], pairs, turns, HALF)
        return cos, sin * sign


@triton.jit
def score_keys(
    q_first,
    q_second,
    key_ptrs,  # [TILE_KV] start of each key
    is_key,  # [TILE_KV]
    cos,  # from key_turns; used for unturned keys only
    sin,
    HEAD_DIM: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_START: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_D: tl.constexpr,
    KEYS_TURNED: tl.constexpr,
):
    """Return q·k `[TILE_M, TILE_KV]`, not yet scaled. Keys are loaded transposed, `[dims, TILE_KV]`."""
    if TURN == TURN_HALVES:
        dims = tl.arange(0, TILE_HALF)[:, None]
        loaded = is_key[None, :] & (dims < HALF)
        k_first = tl.load(key_ptrs[None, :] + dims, mask=loaded, other=0.0)
        k_second = tl.load(key_ptrs[None, :] + HALF + dims, mask=loaded, other=0.0)
        if not KEYS_TURNED:
            first, second = k_first.to(tl.float32), k_second.to(tl.float32)
            k_first, k_second = first * cos - second * sin, second * cos + first * sin
        scores = tl.dot(q_first, k_first.to(q_first.dtype), input_precision="ieee")
        return tl.dot(q_second, k_second.to(q_first.dtype), scores, input_precision="ieee")
    else:
        dims = tl.arange(0, TILE_D)[:, None]
        loaded = is_key[None, :] & (dims < HEAD_DIM)
        k = tl.load(key_ptrs[None, :] + dims, mask=loaded, other=0.0)
        if not KEYS_TURNED and TURN != TURN_NONE:
            turns, pairs, partner_dims, sign = partners(dims, ROTARY_START, HALF, IS_INTERLEAVED)
            partner = tl.load(key_ptrs[None, :] + partner_dims, mask=loaded & turns, other=0.0)
            k = k.to(tl.float32) * cos + partner.to(tl.float32) * sin
        return tl.dot(q_first, k.to(q_first.dtype), input_precision="ieee")


@triton.jit
def fold_keys(
    acc,
    running_max,
    running_sum,
    scores,  # [TILE_M, TILE_KV], not yet scaled
    visible,  # [TILE_M, TILE_KV]; ignored unless IS_MASKED
    v,  # [TILE_KV, TILE_V]
    softmax_scale,  # positive
    logit_softcap,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Fold one tile of keys and values into the state."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2x)); exp overflows to inf, which gives 1.
        bent = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E * softmax_scale / logit_softcap)))
        scores = bent * logit_softcap
        scale_base2 = LOG2_E
    else:
        scale_base2 = softmax_scale * LOG2_E
    if IS_MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1) * scale_base2)
    # -inf - -inf is nan; a row that has seen no key keeps a finite pivot instead.
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max) if IS_MASKED else new_max
    weights = tl.exp2(scores * scale_base2 - pivot[:, None])
    keep = tl.exp2(running_max - pivot)
    running_sum = running_sum * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, new_max, running_sum


@triton.jit
def store_state(
    acc,
    running_max,
    running_sum,
    part_rows,  # [TILE_M] int64: row of part_out, in (part, head) order
    is_row,
    part_out_ptr,
    part_lse_ptr,
    V_DIM: tl.constexpr,
    TILE_V: tl.constexpr,
):
    """Write a partial result; a row that saw no key is 0 and -inf."""
    dims = tl.arange(0, TILE_V)[None, :]
    output = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
    tl.store(
        part_out_ptr + (part_rows * V_DIM)[:, None] + dims,
        output.to(part_out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (dims < V_DIM),
    )
    tl.store(part_lse_ptr + part_rows, (running_max + tl.log2(running_sum)) * LN_2, mask=is_row)
