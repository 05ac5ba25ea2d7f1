# SPDX-License-Identifier: Apache-2.0
"""Tensor arithmetic of sampling: penalties, the kept tokens, and noise that depends on a key and nothing else."""

from collections.abc import Sequence

import torch

# On the CPU, a row's kept tokens are looked for among this many likeliest first: sorting a whole vocabulary costs more.
_HEAD_LEN = 1024
_LAST_BELOW_ONE = 1.0 - 2.0**-24


def apply_penalties(
    logits: torch.Tensor,
    prompt_token_ids: Sequence[Sequence[int]],
    output_token_ids: Sequence[Sequence[int]],
    penalties: torch.Tensor,
) -> None:
    """Make tokens seen before less likely, as vLLM and OpenAI define it.

    Args:
        logits: `[num_rows, vocab_size]`, float32. Written in place.
        prompt_token_ids: Per row; count for the repetition penalty only. Ids beyond the vocabulary are left out.
        output_token_ids: Per row; count for all three.
        penalties: `[num_rows, 3]`, float32: repetition, presence, frequency.
    """
    vocab_size = logits.shape[1]
    output_counts = _count_tokens(output_token_ids, vocab_size, logits.device)
    is_seen = (output_counts > 0) | (_count_tokens(prompt_token_ids, vocab_size, logits.device) > 0)
    repetition, presence, frequency = (column.unsqueeze(1) for column in penalties.unbind(1))  # [num_rows, 1]
    factor = torch.where(logits > 0, 1.0 / repetition, repetition)
    logits.copy_(torch.where(is_seen, logits * factor, logits))
    logits -= frequency * output_counts + presence * (output_counts > 0)


def _count_tokens(token_ids: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> torch.Tensor:
    """How often each token stands in each row: float32 `[num_rows, vocab_size]`."""
    lengths = torch.tensor([len(ids) for ids in token_ids])
    row_of = torch.repeat_interleave(torch.arange(len(token_ids)), lengths)
    ids = torch.cat([torch.as_tensor(ids, dtype=torch.int64) for ids in token_ids])
    is_known = ids < vocab_size
    where = (row_of[is_known] * vocab_size + ids[is_known]).to(device)
    counts = torch.zeros(len(token_ids) * vocab_size, device=device)
    counts.index_add_(0, where, torch.ones(where.shape[0], device=device))
    return counts.view(len(token_ids), vocab_size)


def mask_unlikely(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set the logits that top-k, top-p or min-p drop to -inf.

    min-p is relative to the likeliest token of the whole row; top-p counts what is left after top-k, renormalised. Tokens
    that tie with the last one kept are kept too, so that the outcome does not depend on how a sort breaks ties.

    Args:
        logits: `[num_rows, vocab_size]`, float32, divided by the temperature.
        top_k: `[num_rows]`, int64; `vocab_size` or more = off.
        top_p: `[num_rows]`, float32; 1 = off.
        min_p: `[num_rows]`, float32; 0 = off.
    """
    threshold = _top_threshold(logits, top_k, top_p)
    threshold = torch.maximum(threshold, logits.amax(dim=1) + torch.log(min_p))
    return logits.masked_fill(logits < threshold.unsqueeze(1), float("-inf"))


def _top_threshold(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit that top-k and top-p keep: float32 `[num_rows]`, -inf where all are kept."""
    vocab_size = logits.shape[1]
    is_on = (top_k < vocab_size) | (top_p < 1.0)
    if logits.is_cuda or vocab_size <= _HEAD_LEN:
        threshold, _ = _threshold_within(logits.sort(dim=1, descending=True).values, logits, top_k, top_p)
        return torch.where(is_on, threshold, float("-inf"))
    threshold = torch.full_like(top_p, float("-inf"))
    rows = is_on.nonzero().squeeze(1)
    if len(rows):
        head = logits[rows].topk(_HEAD_LEN, dim=1).values
        found, is_inside = _threshold_within(head, logits[rows], top_k[rows], top_p[rows])
        threshold[rows] = found
        rows = rows[~is_inside]
    if len(rows):
        ordered = logits[rows].sort(dim=1, descending=True).values
        threshold[rows], _ = _threshold_within(ordered, logits[rows], top_k[rows], top_p[rows])
    return threshold


def _threshold_within(
    ordered: torch.Tensor, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the last kept logit among the largest ones of each row.

    Args:
        ordered: `[num_rows, head_len]`, the largest logits in falling order.
        logits: `[num_rows, vocab_size]`, the whole rows.
        top_k: `[num_rows]`, int64.
        top_p: `[num_rows]`, float32.

    Returns:
        The last kept logit, float32 `[num_rows]`, and whether `ordered` was long enough to know it, bool `[num_rows]`.
    """
    head_len = ordered.shape[1]
    k = top_k.clamp(1, head_len).unsqueeze(1)
    rank = torch.arange(head_len, device=ordered.device)
    weights = torch.exp(ordered - ordered[:, :1])
    mass = weights.cumsum(dim=1)
    # What top-p is a share of: the kept k tokens, or the whole row when top-k is off.
    has_top_k = top_k < logits.shape[1]
    total = torch.where(has_top_k, mass.gather(1, k - 1).squeeze(1), _row_mass(logits))
    max_mass_before = torch.where(top_p < 1.0, top_p * total, float("inf"))
    # A token is kept while the mass *before* it is below top_p: the token that crosses the line stays.
    is_kept = (mass - weights < max_mass_before.unsqueeze(1)) & (rank < k)
    num_kept = is_kept.sum(dim=1).clamp(min=1)
    is_inside = (top_k <= head_len) | (~has_top_k & (num_kept < head_len))
    return ordered.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1), is_inside


def _row_mass(logits: torch.Tensor) -> torch.Tensor:
    return torch.exp(logits - logits.amax(dim=1, keepdim=True)).sum(dim=1)


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise that is a pure function of (key, token id): the same in any batch and on any device.

    `argmax(logits + noise)` draws from `softmax(logits)`. Counter-based: two rounds of a 32-bit integer hash of the token
    id and the key, so there is no generator whose state a batch mate or a preemption could move.

    Args:
        keys: `[num_rows, 2]`, int32.
        vocab_size: Tokens per row.

    Returns:
        float32 `[num_rows, vocab_size]`.

    Source:
        Gumbel-max: Maddison et al. 2014, arXiv:1411.0030. Multipliers: C. Wellons, "Prospecting for hash functions", 2018.
    """
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = _mix(_mix(token_ids ^ keys[:, :1]) ^ keys[:, 1:])
    # 31 bits to (0, 1). Small values are exact in float32, and they decide who wins.
    uniform = ((bits & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    uniform.clamp_(max=_LAST_BELOW_ONE)
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Hash int32 to int32; multiplication wraps around, shifts are logical."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
