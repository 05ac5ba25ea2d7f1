# SPDX-License-Identifier: Apache-2.0
"""Keep weights outside a mask bit-identical: around any torch optimiser, and compactly in our own ones.

Masking gradients is not enough: weight decay and momentum move a weight whose gradient is zero.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lazyattention.unlearn.neuron_mask import Selection

LOW_PRECISION = (torch.bfloat16, torch.float16)


@torch.no_grad()
def masked_step(optimizer: torch.optim.Optimizer, update_masks: Mapping[nn.Parameter, torch.Tensor]) -> None:
    """Run `optimizer.step()`, then put back every weight whose mask is False.

    Args:
        optimizer: Any torch optimiser. Its own memory stays dense.
        update_masks: Bool tensors shaped like their parameters; parameters not listed are left to the optimiser.
    """
    before = {param: param.clone() for param in update_masks}
    optimizer.step()
    for param, mask in update_masks.items():
        param.copy_(torch.where(mask, param, before[param]))


def take(tensor: torch.Tensor, selection: Selection | None) -> torch.Tensor:
    """Return the selected slices as a copy, or `tensor` itself when there is no selection."""
    return tensor if selection is None else tensor.index_select(selection.dim, selection.index)


def put(tensor: torch.Tensor, selection: Selection | None, values: torch.Tensor) -> None:
    """Write the selected slices of `tensor` in place; nothing else is touched."""
    if selection is None:
        tensor.copy_(values)
    else:
        tensor.index_copy_(selection.dim, selection.index, values.to(tensor.dtype))


@torch.no_grad()
def clip_gradients(
    params: Iterable[nn.Parameter], selections: Mapping[nn.Parameter, Selection], max_norm: float, over: str
) -> float:
    """Scale gradients in place so that their norm is at most `max_norm`.

    Args:
        params: Parameters with gradients.
        selections: Slices of those trained in part.
        max_norm: 0 = measure only.
        over: "trainable" = the norm counts trainable entries only; "all" = whole gradients.

    Returns:
        The norm before clipping; non-finite when a gradient is.
    """
    params = [param for param in params if param.grad is not None]
    squares = []
    for param in params:
        grad = param.grad
        assert grad is not None
        counted = take(grad, selections.get(param)) if over == "trainable" else grad
        squares.append(counted.float().square().sum().to(params[0].device))
    if not squares:
        return 0.0
    norm = float(torch.stack(squares).sum().sqrt())
    if max_norm > 0 and math.isfinite(norm) and norm > max_norm:
        for param in params:
            assert param.grad is not None
            param.grad.mul_(max_norm / (norm + 1e-6))
    return norm


class MaskedOptimizer(torch.optim.Optimizer, ABC):
    """Base of optimisers that keep optimizer.state for selected slices only, in float32.

    Weights outside the selection are never read or written, so they stay bit-identical, decay included. A weight of
    low precision gets a float32 copy of its selected slices, since single updates are often below its resolution.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        selections: Mapping[nn.Parameter, Selection],
        *,
        master_weights: bool = True,
    ) -> None:
        super().__init__(params, defaults)
        self._selections = dict(selections)
        self._master_weights = master_weights

    @property
    def selections(self) -> Mapping[nn.Parameter, Selection]:
        """Slices of the parameters trained in part."""
        return self._selections

    def gradient(self, param: nn.Parameter) -> torch.Tensor:
        """The selected slices of a parameter's gradient, float32."""
        assert param.grad is not None
        return take(param.grad, self._selections.get(param)).float()

    def slots(self, param: nn.Parameter) -> dict[str, Any]:
        """optimizer.state of one parameter, made on first use."""
        state: dict[str, Any] = self.state[param]
        if not state:
            values = take(param.detach(), self._selections.get(param))
            self.init_slots(state, values)
            if self._master_weights and param.dtype in LOW_PRECISION:
                state["master"] = values.float().clone()
        return state

    @abstractmethod
    def init_slots(self, state: dict[str, Any], values: torch.Tensor) -> None:
        """Fill the optimizer.state of a parameter whose selected slices are `values`."""

    def begin_step(self) -> None:
        """Run once before a step's updates; nothing to do by default."""

    def end_step(self) -> None:
        """Run once after a step's updates; nothing to do by default."""

    @abstractmethod
    def update(self, values: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Move `values` (float32, in place) by one step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move the selected slices of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin_step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                selection = self._selections.get(param)
                state = self.slots(param)
                values = state["master"] if "master" in state else take(param, selection).float()
                self.update(values, self.gradient(param), state, group)
                put(param, selection, values)
        self.end_step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore optimizer.state; torch would cast it to the weights' dtype, here it stays float32."""
        super().load_state_dict(dict(state_dict))
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for saved_id, param in zip(ids, params, strict=True):
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state[param][key] = value.detach().clone().to(param.device)
