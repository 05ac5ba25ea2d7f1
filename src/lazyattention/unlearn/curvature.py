# SPDX-License-Identifier: Apache-2.0
"""Estimates of the curvature a second-order step divides by."""

from collections.abc import Callable

import torch
from torch.nn import functional

from lazyattention.unlearn.batch import TokenBatch


def gauss_newton_bartlett(
    forward: Callable[[TokenBatch], torch.Tensor],
    batch: TokenBatch,
    generator: torch.Generator,
    *,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> int:
    """Leave in `.grad` the gradient g whose `num_predictions * g * g` estimates the Gauss-Newton diagonal.

    Labels are drawn from the model's own distribution at the positions that predict an answer token; the mean
    cross-entropy against them is differentiated. The estimate is unbiased over the draws: with true labels, or the
    squared training gradient, it is not.

    Args:
        forward: Returns logits `[batch, seq_len, vocab_size]` with a graph.
        batch: Its labels say where predictions count, not what they are.
        generator: Of the draws, on the CPU, so that one seed gives one run on any device.
        backward: Called with the loss; accelerate passes its own.

    Returns:
        num_predictions; 0 leaves no gradient.

    Source:
        Liu et al. 2023, arXiv:2305.14342, algorithm 2 and appendix; Martens 2014, arXiv:1412.1193.
    """
    logits = forward(batch)
    predicts = batch.positions("answer")
    rows = logits[predicts].float()
    if rows.shape[0] == 0:
        return 0
    with torch.no_grad():
        # Inverse transform with CPU uniforms: torch.multinomial would draw on the device.
        uniform = torch.rand(rows.shape[0], 1, generator=generator, dtype=torch.float64).to(rows.device)
        cumulative = rows.softmax(dim=-1).double().cumsum(dim=-1)
        sampled = torch.searchsorted(cumulative, uniform * cumulative[:, -1:]).flatten()
        sampled = sampled.clamp(max=rows.shape[-1] - 1)
    backward(functional.cross_entropy(rows, sampled))
    return int(rows.shape[0])
