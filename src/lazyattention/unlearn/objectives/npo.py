# SPDX-License-Identifier: Apache-2.0
"""Negative preference optimisation: ascent whose weight fades as an answer gets less likely than it was."""

import torch
from torch.nn import functional

from lazyattention.unlearn.batch import sequence_log_probs
from lazyattention.unlearn.config import ObjectiveConfig
from lazyattention.unlearn.objectives.base import Objective, ObjectiveInputs

_BETA = 0.1


def forget_loss(inputs: ObjectiveInputs, config: ObjectiveConfig) -> torch.Tensor:
    """-(2 / beta) * E[log sigmoid(-beta * (log p - log p_original))]."""
    assert inputs.ref_forget_logits is not None, "the trainer gives what needs_ref_forget asks for"
    beta = config.beta or _BETA
    log_probs = sequence_log_probs(inputs.forget_logits, inputs.forget_labels, config.npo_reduction)
    ref_log_probs = sequence_log_probs(inputs.ref_forget_logits, inputs.forget_labels, config.npo_reduction)
    return -2 / beta * functional.logsigmoid(-beta * (log_probs - ref_log_probs)).mean()


NPO = Objective(
    name="npo",
    forget_loss=forget_loss,
    needs_ref_forget=True,
    source="Zhang et al. 2024, arXiv:2404.05868, eq. 3; npo_reduction='mean' is SOUL's code",
)
