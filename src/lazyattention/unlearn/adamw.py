# SPDX-License-Identifier: Apache-2.0
"""First-order update of selected weights: AdamW with compact float32 optimizer.state."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lazyattention.unlearn.config import OptimizerConfig
from lazyattention.unlearn.masked_step import MaskedOptimizer
from lazyattention.unlearn.neuron_mask import Selection

# torch.optim.AdamW's default; OptimizerConfig.eps is Sophia's.
_EPS = 1e-8


class MaskedAdamW(MaskedOptimizer):
    """torch.optim.AdamW on selected slices.

    Source:
        Loshchilov & Hutter 2017, arXiv:1711.05101. Equal to `masked_step(torch.optim.AdamW)` up to rounding.
    """

    def __init__(
        self, params: Iterable[Any], config: OptimizerConfig, selections: Mapping[nn.Parameter, Selection] | None = None
    ) -> None:
        defaults = {"lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__(params, defaults, selections or {}, master_weights=config.master_weights)
        self._betas = config.betas

    def init_slots(self, state: dict[str, Any], values: torch.Tensor) -> None:
        state["num_steps"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(values, dtype=torch.float32)
        state["exp_avg_sq"] = torch.zeros_like(values, dtype=torch.float32)

    def update(self, values: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        beta1, beta2 = self._betas
        state["num_steps"] += 1
        num_steps = int(state["num_steps"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2**num_steps)).add_(_EPS)
        values.mul_(1 - group["lr"] * group["weight_decay"])
        values.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**num_steps))
