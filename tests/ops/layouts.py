"""Random steps for op tests: ranges in scattered blocks, rows of several requests with deltas of their own."""

from dataclasses import dataclass

import numpy as np
import torch

from lazyattention.ops import AttentionPlan, KVRange, LayerRotary, RowGroup, make_plan


@dataclass
class Step:
    plan: AttentionPlan
    kernel_plan: AttentionPlan | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    q: torch.Tensor


def rotary_of(head_dim, *, rotary_dim=None, is_interleaved=False, theta=10000.0, rotary_start=0):
    rotary_dim = rotary_dim or head_dim
    inv_freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    return LayerRotary(inv_freq, rotary_dim, is_interleaved, rotary_start)


def random_step(
    rng: np.random.Generator,
    *,
    chunk_lens=(5, 16, 33),
    queries=((0, 4), (1, 1), (2, 7)),
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=4,
    dtype=torch.float64,
    keys_turned=True,
    far=0,
    contiguous=False,
    scattered_chunk=None,
    is_scaled=False,
):
    """Build a step: `queries` holds (earlier text tokens, new tokens) per request; every request sees every chunk, in
    an order of its own, then its own text. `far` moves all requests to larger positions; one chunk's blocks can lie in
    reverse. With `is_scaled` each request has a temperature and a bias of its own for chunks, and there is no plan for
    the kernels.
    """
    num_blocks = 64 + sum(-(-n // block_size) + 1 for n in chunk_lens) * 2 + sum(a + b for a, b in queries)
    free = list(range(num_blocks)) if contiguous else rng.permutation(num_blocks).tolist()

    def take(num_tokens):
        num = -(-num_tokens // block_size)
        taken, free[:num] = free[:num], []
        return taken

    base = 3
    ranges = [KVRange(("chunk", i), take(n), n, base, keys_turned) for i, n in enumerate(chunk_lens)]
    if scattered_chunk is not None:
        ranges[scattered_chunk].block_ids.reverse()
    groups, positions, slots = [], [], []
    for request, (num_before, num_new) in enumerate(queries):
        token_start = len(positions)
        start = base + far
        for chunk in rng.permutation(len(chunk_lens)):
            scaling = (0.6 + 0.5 * request, 1.5 - 2.0 * request) if is_scaled else (1.0, 0.0)
            groups.append(RowGroup(int(chunk), token_start, num_new, start - base, *scaling))
            start += chunk_lens[chunk]
        text = KVRange(("text", request), take(num_before + num_new), num_before + num_new, start, keys_turned)
        groups.append(RowGroup(len(ranges), token_start, num_new, 0))
        ranges.append(text)
        positions += range(start + num_before, start + num_before + num_new)
        slots += [-1] * num_new
    layout = (np.array(positions), np.array(slots), ranges, groups)
    plan = make_plan(*layout, block_size=block_size, for_kernels=False)
    kernel_plan = None if is_scaled else make_plan(*layout, block_size=block_size, for_kernels=True)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    k_cache = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    v_cache = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    q = torch.randn((len(positions), num_q_heads, head_dim), generator=generator, dtype=torch.float64).to(dtype)
    return Step(plan, kernel_plan, k_cache, v_cache, q)
