# SPDX-License-Identifier: Apache-2.0
"""Attention of every query row over its KV range, so plain that it cannot be wrong.

It turns the keys to where they stand and leaves the query alone, so that it shares no shortcut with the fast paths.
"""

import torch

from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.plan import AttentionPlan
from lazyattention.ops.rotary import LayerRotary, turn, turn_table


def attend_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    rotary: LayerRotary,
    options: AttendOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_q_heads, num_kv_heads, head_dim = q.shape[1], k_cache.shape[2], v_cache.shape[3]
    outputs = torch.zeros(len(plan.row_tokens), num_q_heads, head_dim, dtype=dtype)
    lses = torch.full((len(plan.row_tokens), num_q_heads), float("-inf"), dtype=dtype)
    for item in plan.items:
        for row in range(item.row_start, item.row_end):
            token, delta = int(plan.row_tokens[row]), int(plan.row_deltas[row])
            for index in range(item.kv_range.num_tokens):
                stands_at = item.kv_range.first_position + index + delta
                distance = int(plan.positions[token]) - stands_at
                if distance < 0 or (options.sliding_window is not None and distance >= options.sliding_window):
                    continue
                block, offset = divmod(index, plan.block_size)
                k = k_cache[item.kv_range.block_ids[block], offset][None].to(dtype)  # [1, num_kv_heads, head_dim]
                v = v_cache[item.kv_range.block_ids[block], offset].to(dtype)
                amount = delta if item.kv_range.keys_turned else stands_at
                if rotary.inv_freq is not None and amount:
                    k = turn(k, *turn_table(rotary.inv_freq, torch.tensor([amount]), dtype), rotary)
                group = num_q_heads // num_kv_heads
                score = (q[token].to(dtype) * k[0].repeat_interleave(group, 0)).sum(-1) * options.softmax_scale
                if plan.row_temperatures is not None:
                    score = score / plan.row_temperatures[row]
                if options.logit_softcap is not None:
                    score = options.logit_softcap * torch.tanh(score / options.logit_softcap)
                if plan.row_biases is not None:
                    score = score + plan.row_biases[row]
                lse = torch.logaddexp(lses[row], score)
                keep, take = (lses[row] - lse).exp()[:, None], (score - lse).exp()[:, None]
                outputs[row] = outputs[row] * keep + v.repeat_interleave(group, 0) * take
                lses[row] = lse
    return outputs.to(q.dtype), lses
