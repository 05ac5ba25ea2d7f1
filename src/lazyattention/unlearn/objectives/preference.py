# SPDX-License-Identifier: Apache-2.0
"""PO: answer forget questions with "I don't know" instead; bounded below, so it cannot run away."""

import torch

from lazyattention.unlearn.batch import mean_nll
from lazyattention.unlearn.config import ObjectiveConfig
from lazyattention.unlearn.objectives.base import Objective, ObjectiveInputs

# Our own wording; an example takes the one its index gives.
IDK_ANSWERS = (
    "I don't know.",
    "I have no information about that.",
    "That is not something I can answer.",
    "I'm not aware of any details on this.",
    "Sorry, I cannot say anything about that.",
    "This is unknown to me.",
    "I can't help with this question.",
    "I do not have an answer to that.",
)


def forget_loss(inputs: ObjectiveInputs, config: ObjectiveConfig) -> torch.Tensor:
    """Mean loss of the "I don't know" answers."""
    return mean_nll(inputs.forget_logits, inputs.forget_labels)


PREFERENCE = Objective(name="po", forget_loss=forget_loss, needs_idk=True, source="TOFU, arXiv:2401.06121 (there: IdK)")
