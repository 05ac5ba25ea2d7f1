# SPDX-License-Identifier: Apache-2.0
"""Does rounding the weights to 4 bits bring the answer back? Small updates vanish inside a rounding step."""

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lazyattention.unlearn.probes.context import ProbeContext, ProbeUnavailableError, change
from lazyattention.unlearn.probes.registry import Probe, register


def round_to_nearest(weight: torch.Tensor, *, num_bits: int, group_size: int) -> torch.Tensor:
    """Quantise and dequantise along the last dimension: asymmetric, round to nearest, min-max range per group.

    `q = round((w - min) / step)`, `step = (max - min) / (2**num_bits - 1)`, result `min + q * step`. A constant
    group is left as it is. The last group of a row may be shorter.

    Args:
        weight: `[..., in_features]`, any floating dtype.
        num_bits: Bits per weight; scale and minimum stay in float32.
        group_size: Weights that share them.

    Returns:
        Same shape and dtype; computed in float32, each value within half a step of the original (and the rounding of
        the dtype).
    """
    in_features = weight.shape[-1]
    num_groups = -(-in_features // group_size)
    padding = num_groups * group_size - in_features
    rows = weight.detach().float().reshape(-1, in_features)
    # A copy of the row's last value never widens the range of the group it pads.
    padded = torch.cat([rows, rows[:, -1:].expand(-1, padding)], dim=-1) if padding else rows
    groups = padded.reshape(-1, group_size)  # [num_rows * num_groups, group_size]
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    step = (high - low) / (2**num_bits - 1)
    safe_step = torch.where(step > 0, step, torch.ones_like(step))
    rounded: torch.Tensor = low + ((groups - low) / safe_step).round() * step
    return rounded.reshape(len(rows), -1)[:, :in_features].reshape(weight.shape).to(weight.dtype)


@torch.no_grad()
def quantize_model(model: PreTrainedModel, *, num_bits: int, group_size: int) -> dict[str, Any]:
    """Round the weights of every linear layer in place; embeddings, output head, norms and biases stay as they are.

    Parameters with three dimensions (stacked experts) are rounded along their last one.

    Returns:
        "num_quantized" and "num_weights" (counts), "relative_error" (norm of the change over norm of the weights).
    """
    kept = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module}
    transposed = {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    num_quantized, change_square, square = 0, 0.0, 0.0
    for param in model.parameters():
        if param.dim() < 2 or not param.is_floating_point() or id(param) in kept | embeddings:
            continue
        weight = param.t() if id(param) in transposed else param
        rounded = round_to_nearest(weight, num_bits=num_bits, group_size=group_size)
        change_square += float((rounded.float() - weight.float()).square().sum())
        square += float(weight.float().square().sum())
        num_quantized += param.numel()
        param.copy_(rounded.t() if id(param) in transposed else rounded)
    return {
        "num_quantized": num_quantized,
        "num_weights": sum(param.numel() for param in model.parameters()),
        "relative_error": (change_square / square) ** 0.5 if square else 0.0,
    }


def run(context: ProbeContext) -> dict[str, Any]:
    """Measure forget (and retain) before and after rounding."""
    sets = {name: context.chosen(name) for name in ("forget", "retain") if context.chosen(name)}
    if "forget" not in sets:
        raise ProbeUnavailableError("needs the split 'forget'")
    model = _merged(context.fresh_model())
    before = {name: item.as_dict() for name, item in context.measure(model, sets).items()}
    options = context.options
    facts = quantize_model(model, num_bits=options.quantize_bits, group_size=options.quantize_group_size)
    if not facts["num_quantized"]:
        raise ProbeUnavailableError("found no floating-point weight to round; give a model that is not quantised yet")
    after = {name: item.as_dict() for name, item in context.measure(model, sets).items()}
    return {
        "method": (
            f"{options.quantize_bits}-bit quantise and dequantise, round to nearest, asymmetric min-max, groups of "
            f"{options.quantize_group_size} along the input dimension; embeddings, head, norms and biases kept"
        ),
        "before": before,
        "after": after,
        "change": {name: change(before[name], after[name]) for name in sets},
        **facts,
    }


def _merged(model: PreTrainedModel) -> PreTrainedModel:
    """Fold a PEFT adapter into the weights: what is deployed in 4 bits is their sum, not each alone."""
    merge = getattr(model, "merge_and_unload", None)
    return cast("PreTrainedModel", merge()) if callable(merge) else model


QUANTIZE = register(
    Probe(name="quantize", run=run, source="Zhang et al. 2025 (quantisation restores knowledge), arXiv:2410.16454")
)
