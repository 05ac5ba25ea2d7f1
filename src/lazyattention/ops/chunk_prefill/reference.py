# SPDX-License-Identifier: Apache-2.0
"""Run chunk_prefill's tasks in obvious PyTorch: keys are turned to where they stand, the query is left alone."""

import torch

from lazyattention.ops.attend.options import AttendOptions
from lazyattention.ops.device_plan import PrefillTasks
from lazyattention.ops.layer_kv import LayerKV, PartialStates
from lazyattention.ops.rotary import LayerRotary
from lazyattention.ops.shared_decode.reference import attend_row, read_keys


def chunk_prefill_reference(
    q: torch.Tensor,
    kv: LayerKV,
    tasks: PrefillTasks,
    positions: torch.Tensor,
    out: torch.Tensor,
    states: PartialStates,
    rotary: LayerRotary,
    options: AttendOptions,
    sinks: torch.Tensor | None = None,
) -> None:
    num_tasks = len(tasks.tasks)
    for number, task in enumerate([*tasks.tasks.tolist(), *tasks.apart.tolist()]):
        row_start, num_tokens, token_start, full_start, full_end, masked_start, masked_end, _, _, part = task
        full = range(full_start, full_end)
        tiles = [*full, *tasks.masked[masked_start:masked_end].tolist()]
        for row, token in enumerate(range(token_start, token_start + num_tokens)):
            ks, vs, amounts = [], [], []
            for index in tiles:
                slot, table_start, key_start, stand, num_keys, delta, _, _ = tasks.tiles[index].tolist()
                inner = torch.arange(num_keys)
                distance = int(positions[token]) - stand - inner
                # Tiles outside `masked` are visible as a whole: what the kernel takes for granted shows here if not so.
                visible = distance >= 0 if index not in full else distance == distance
                if options.sliding_window is not None and index not in full:
                    visible &= distance < options.sliding_window
                # So does a plan that calls slots consecutive.
                is_gathered = index not in full or not (tasks.is_contiguous or number >= num_tasks)
                first_slot = None if is_gathered else slot - key_start
                k, v = read_keys(kv, tasks.blocks, table_start, key_start + inner[visible], first_slot)
                ks.append(k)
                vs.append(v)
                amounts.append(delta + 0 * inner[visible] if tasks.keys_turned else stand + inner[visible])
            k = torch.cat(ks) if ks else q.new_empty((0, *kv.k_cache.shape[2:])).double()
            v = torch.cat(vs) if vs else q.new_empty((0, *kv.v_cache.shape[2:])).double()
            amount = torch.cat(amounts) if amounts else torch.empty(0, dtype=torch.int64)
            output, lse = attend_row(q[token], k, v, amount, rotary, options)
            if part >= 0:
                where = int(tasks.part_bases[row_start + row]) + part
                states.outputs[where] = output.to(states.outputs.dtype)
                states.lses[where] = lse.to(states.lses.dtype)
            else:
                if sinks is not None:
                    output = output * (lse - torch.logaddexp(lse, sinks.double())).exp()[:, None]
                out[token] = output.to(out.dtype)
