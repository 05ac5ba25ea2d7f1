# SPDX-License-Identifier: Apache-2.0
"""Second-order update of selected weights; the curvature it divides by is estimated in `curvature.py`."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lazyattention.unlearn.config import OptimizerConfig
from lazyattention.unlearn.masked_step import MaskedOptimizer
from lazyattention.unlearn.neuron_mask import Selection

# Entries per parameter that rho is set by.
_RHO_SAMPLE = 4096


class MaskedSophia(MaskedOptimizer):
    """theta <- theta - lr * clip(m / max(rho * H, eps), 1) on selected slices; m, H and theta stay put elsewhere.

    Order of calls per step: `backward()`, optionally `update_curvature(...)` with the gradients it should see, then
    `step()`. H starts at 0, where the update is sign-momentum.

    Source:
        Liu et al. 2023, arXiv:2305.14342, algorithm 3. SIMU's triple mask: arXiv:2510.07822. SOUL's variant is
        reached by `OptimizerConfig.soul()` (arXiv:2404.18239, its published code).
    """

    def __init__(
        self, params: Iterable[Any], config: OptimizerConfig, selections: Mapping[nn.Parameter, Selection] | None = None
    ) -> None:
        defaults = {"lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__(params, defaults, selections or {}, master_weights=config.master_weights)
        self._config = config
        self._rho = config.rho
        self._has_new_curvature = False
        self._num_clipped: torch.Tensor | float = 0.0
        self._num_updated = 0

    @property
    def clip_fraction(self) -> float:
        """Share of trainable entries whose last step was clipped; 1 = plain sign-momentum."""
        return float(self._num_clipped) / max(self._num_updated, 1)

    def init_slots(self, state: dict[str, Any], values: torch.Tensor) -> None:
        state["exp_avg"] = torch.zeros_like(values, dtype=torch.float32)
        state["hessian"] = torch.zeros_like(values, dtype=torch.float32)

    @torch.no_grad()
    def update_curvature(self, scale: float = 1.0) -> None:
        """H <- beta2 * H + (1 - beta2) * scale * g * g, with g the gradients now stored in `.grad`.

        Args:
            scale: Number of predictions the gradient is the mean over, for a Gauss-Newton-Bartlett estimate; 1 for
                squared training gradients.
        """
        beta2 = self._config.betas[1]
        self._has_new_curvature = True
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = self.gradient(param)
                    self.slots(param)["hessian"].mul_(beta2).addcmul_(grad, grad, value=(1 - beta2) * scale)

    def begin_step(self) -> None:
        self._num_clipped, self._num_updated = 0.0, 0

    def end_step(self) -> None:
        if self._config.clip_target is not None and self._has_new_curvature:
            self._rho = self._rho_for(self._config.clip_target)
            self._has_new_curvature = False

    @property
    def rho(self) -> float:
        """The factor of H in force."""
        return self._rho

    def _rho_for(self, clip_target: float) -> float:
        """The rho at which this share of a sample of entries would have been clipped in the last step."""
        ratios = []
        for state in self.state.values():
            # Every entry of small tensors, evenly spaced ones of large tensors.
            stride = max(state["hessian"].numel() // _RHO_SAMPLE, 1)
            momentum, hessian = (state[key].flatten()[::stride] for key in ("exp_avg", "hessian"))
            live = hessian > 0
            ratios.append((momentum[live].abs() / hessian[live]).cpu())
        sample = torch.cat(ratios) if ratios else torch.empty(0)
        if sample.numel() == 0:
            return self._rho
        kept = int((1 - clip_target) * (sample.numel() - 1))
        return max(float(sample.sort().values[kept]) / self._config.curvature_factor, 1e-30)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"rho": self._rho}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._rho = float(state_dict["rho"])

    def update(self, values: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        config, beta1 = self._config, self._config.betas[0]
        momentum, hessian = state["exp_avg"], state["hessian"]
        for _ in range(2 if config.double_momentum else 1):
            momentum.mul_(beta1).add_(grad, alpha=1 - beta1)
        denominator = hessian * (self._rho * config.curvature_factor)
        denominator = denominator.clamp_(min=config.eps) if config.denominator == "max" else denominator + config.eps
        ratio = momentum / denominator
        # Summed on the device, read only when asked: no synchronisation per parameter.
        self._num_clipped = self._num_clipped + (ratio.abs() >= 1).sum()
        self._num_updated += ratio.numel()
        values.mul_(1 - group["lr"] * group["weight_decay"]).add_(ratio.clamp_(-1, 1), alpha=-group["lr"])
