# SPDX-License-Identifier: Apache-2.0
"""Gradient ascent: raise the forget answers' loss, with nothing to hold the rest. Collapses; a baseline only."""

import torch

from lazyattention.unlearn.batch import mean_nll
from lazyattention.unlearn.config import ObjectiveConfig
from lazyattention.unlearn.objectives.base import Objective, ObjectiveInputs


def forget_loss(inputs: ObjectiveInputs, config: ObjectiveConfig) -> torch.Tensor:
    """Minus the mean loss of the forget answers."""
    return -mean_nll(inputs.forget_logits, inputs.forget_labels)


GRADIENT_ASCENT = Objective(
    name="ga", forget_loss=forget_loss, uses_retain=False, source="Jang et al. 2022, arXiv:2210.01504"
)
