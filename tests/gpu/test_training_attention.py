# SPDX-License-Identifier: Apache-2.0
"""FlexAttention over packed prompts against one dense mask per prompt: outputs and gradients, on the GPU."""

import pytest
import torch

import lazyattention.adapt.attention as attention_module
from fixtures.tiny_engine import prompt
from lazyattention.adapt.rows import TrainingRow, make_batch
from lazyattention.config import ChunkOptions
from lazyattention.ops.rotary import LayerRotary
from lazyattention.reuse import Chunking

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ISOLATED = Chunking(ChunkOptions(encoding="isolated"))
HIDING = Chunking(ChunkOptions(num_hidden=3, sink="x", positions="parallel"), sink=(5, 6))
WAYS = [
    ("rotate_query", Chunking()),
    ("rotate_query", ISOLATED),
    ("rotate_query", HIDING),
    ("full_recompute", Chunking()),
]


def inputs(visibility, num_q_heads, num_kv_heads, head_dim, dtype):
    torch.manual_seed(visibility.num_tokens)
    shapes = [(1, heads, visibility.num_tokens, head_dim) for heads in (num_q_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


def prompt_by_prompt(query, key, value, visibility, scale, window, sinks):
    return attention_module._prompt_by_prompt(query, key, value, visibility, scale, window, None, sinks)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 128)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 4e-2)])
def test_flex_attention_equals_dense_masks(window, has_sinks, num_q_heads, num_kv_heads, head_dim, dtype, tolerance):
    inv_freq = 1e4 ** -(torch.arange(0, head_dim, 2, device="cuda") / head_dim)
    rotary = LayerRotary(inv_freq, head_dim, is_interleaved=False)
    sinks = torch.randn(num_q_heads, device="cuda", dtype=dtype) if has_sinks else None
    for lengths in ("p11 d9 d16 d33 t5", "p40 d129 d300 t20"):  # two lengths: the compiled kernel serves both
        rows = [TrainingRow.of(prompt(lengths), (7, 9, 3), *way) for way in WAYS]
        visibility = make_batch(rows, [rotary], device="cuda").visibility
        q, k, v = inputs(visibility, num_q_heads, num_kv_heads, head_dim, dtype)
        found = []
        for attend in (attention_module._flex_attention, prompt_by_prompt):
            key, value = visibility.extend(k, v, 0)
            output = attend(q, key, value, visibility, head_dim**-0.5, window, sinks)
            used = output[:, :, : visibility.prompts[-1].token_end]
            weights = torch.randn(used.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
            gradients = torch.autograd.grad((used.float() * weights).sum(), (q, k, v))
            found.append([used, *gradients])
        for flex, dense in zip(*found, strict=True):
            assert bool(flex.isfinite().all())
            scale = dense.float().abs().max().clamp(min=1.0)
            assert float((flex.float() - dense.float()).detach().abs().max() / scale) < tolerance
