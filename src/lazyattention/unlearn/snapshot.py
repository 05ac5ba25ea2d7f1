# SPDX-License-Identifier: Apache-2.0
"""Copies of exactly the entries an update may change: to go back to, to resume from, and to tell what changed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lazyattention.unlearn.architectures import Architecture, attention_parameters
from lazyattention.unlearn.masked_step import put, take
from lazyattention.unlearn.neuron_mask import NeuronMask, Selection, neuron_selections


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Reads and writes the changeable entries of named parameters.

    Attributes:
        params: Parameters by name.
        selections: Slices of those that change in part.
    """

    params: Mapping[str, nn.Parameter]
    selections: Mapping[nn.Parameter, Selection]

    @torch.no_grad()
    def capture(self) -> dict[str, torch.Tensor]:
        """Copy the changeable entries to the CPU."""
        return {
            name: take(param.detach(), self.selections.get(param)).to("cpu", copy=True).contiguous()
            for name, param in self.params.items()
        }

    @torch.no_grad()
    def restore(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write back what `capture` returned, to the last bit."""
        for name, param in self.params.items():
            put(param, self.selections.get(param), values[name].to(param.device))

    @property
    def num_entries(self) -> int:
        """How many weights may change."""
        return sum(
            param.numel()
            if (selection := self.selections.get(param)) is None
            else param.numel() // param.shape[selection.dim] * selection.index.numel()
            for param in self.params.values()
        )


def base_weights(
    model: nn.Module, architecture: Architecture, mask: NeuronMask, *, attention: str, everything: bool
) -> Snapshot:
    """The entries of the base model that a run can change, by their names in it; taken before adapters are added."""
    if everything:
        return Snapshot(dict(model.named_parameters()), {})
    selections = neuron_selections(architecture, mask)
    params = {f"{projection.name}.weight": projection.weight for projection in architecture.down}
    params = {name: param for name, param in params.items() if param in selections}
    if attention != "frozen":
        params.update(attention_parameters(architecture))
    return Snapshot(params, selections)


def count_changes(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> int:
    """How many entries differ between two captures."""
    return sum(int((before[name] != after[name]).sum()) for name in before)
