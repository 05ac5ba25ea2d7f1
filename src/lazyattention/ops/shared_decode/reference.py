# SPDX-License-Identifier: Apache-2.0
"""Run shared_decode's tasks in obvious PyTorch: keys are turned to where they stand, the query is left alone."""

import torch

from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.device_plan import DecodeTasks
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.rotary import LayerRotary, turn, turn_table


def shared_decode_reference(
    q: torch.Tensor,
    kv: LayerKV,
    tasks: DecodeTasks,
    positions: torch.Tensor,
    states: PartialStates,
    rotary: LayerRotary,
    options: AttendOptions,
) -> None:
    for task in tasks.tasks[: int(tasks.num_tasks)].tolist():
        row_start, num_rows, table_start, key_start, key_end, first_position, part, slot = task
        for token, delta, first_part, _ in tasks.rows[row_start : row_start + num_rows].tolist():
            last_key = int(positions[token]) - delta - first_position
            first_key = 0 if options.sliding_window is None else last_key - options.sliding_window + 1
            start = max(key_start, first_key)
            keys = torch.arange(start, max(start, min(key_end, last_key + 1)))
            first_slot = None if slot < 0 else slot - key_start
            k, v = read_keys(kv, tasks.blocks, table_start, keys, first_slot)
            amount = delta + 0 * keys if tasks.keys_turned else first_position + keys + delta
            output, lse = attend_row(q[token], k, v, amount, rotary, options)
            states.outputs[first_part + part] = output.to(states.outputs.dtype)
            states.lses[first_part + part] = lse.to(states.lses.dtype)


def read_keys(
    kv: LayerKV, blocks: torch.Tensor, table_start: int, keys: torch.Tensor, first_slot: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the named keys and values of a range in float64, `[num_keys, num_kv_heads, dim]`.

    With `first_slot`, that of key 0, they are read from consecutive slots, as the kernels do where the plan says so.
    """
    block_size = kv.k_cache.shape[1]
    if first_slot is None:
        slots = blocks[table_start + keys // block_size].long() * block_size + keys % block_size
    else:
        slots = first_slot + keys
    k, v = kv.k_cache.flatten(0, 1)[slots].double(), kv.v_cache.flatten(0, 1)[slots].double()
    if kv.k_scale is not None and kv.v_scale is not None:
        k, v = k * kv.k_scale[:, None], v * kv.v_scale[:, None]
    return k, v


def attend_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    amount: torch.Tensor,
    rotary: LayerRotary,
    options: AttendOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query `[num_q_heads, head_dim]` over keys, each turned by its amount; float64."""
    if rotary.inv_freq is not None:
        k = turn(k, *turn_table(rotary.inv_freq, amount, torch.float64), rotary)
    group = q.shape[0] // k.shape[1]
    scores = torch.einsum("hd,nhd->hn", q.double(), k.repeat_interleave(group, 1)) * options.softmax_scale
    if options.logit_softcap is not None:
        scores = options.logit_softcap * torch.tanh(scores / options.logit_softcap)
    weights = scores.softmax(-1)  # no keys: an empty row, whose product with v is 0
    return torch.einsum("hn,nhd->hd", weights, v.repeat_interleave(group, 1)), scores.logsumexp(-1)
