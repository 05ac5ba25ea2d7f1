# SPDX-License-Identifier: Apache-2.0
"""UNDIAL: distil towards the original model's own distribution with the true token's logit lowered."""

import torch
from torch.nn import functional

from lazyattention.unlearn.batch import IGNORED_LABEL
from lazyattention.unlearn.config import ObjectiveConfig
from lazyattention.unlearn.objectives.base import Objective, ObjectiveInputs


def forget_loss(inputs: ObjectiveInputs, config: ObjectiveConfig) -> torch.Tensor:
    """Cross-entropy to softmax(original logits - undial_beta at the true token), the mean over answer tokens."""
    assert inputs.ref_forget_logits is not None, "the trainer gives what needs_ref_forget asks for"
    targets = inputs.forget_labels[:, 1:]
    counted = targets != IGNORED_LABEL
    teacher = inputs.ref_forget_logits[:, :-1][counted].float().clone()
    teacher[torch.arange(teacher.shape[0], device=teacher.device), targets[counted]] -= config.undial_beta
    student = inputs.forget_logits[:, :-1][counted].float()
    return functional.cross_entropy(student, teacher.softmax(dim=-1), reduction="sum") / counted.sum().clamp(min=1)


UNDIAL = Objective(
    name="undial",
    forget_loss=forget_loss,
    needs_ref_forget=True,
    source="Dong et al. 2024, arXiv:2402.10052. Here prompt and padding do not count",
)
