# SPDX-License-Identifier: Apache-2.0
"""SimNPO: NPO without a reference model, on length-normalised likelihood."""

import torch
from torch.nn import functional

from lazyattention.unlearn.batch import sequence_log_probs
from lazyattention.unlearn.config import ObjectiveConfig
from lazyattention.unlearn.objectives.base import Objective, ObjectiveInputs

_BETA = 4.5


def forget_loss(inputs: ObjectiveInputs, config: ObjectiveConfig) -> torch.Tensor:
    """-(2 / beta) * E[log sigmoid(-beta * (log p / length) - margin)]."""
    beta = config.beta or _BETA
    log_probs = sequence_log_probs(inputs.forget_logits, inputs.forget_labels, "mean")
    return -2 / beta * functional.logsigmoid(-beta * log_probs - config.simnpo_margin).mean()


SIMNPO = Objective(name="simnpo", forget_loss=forget_loss, source="Fan et al. 2024, arXiv:2410.07163, eq. 4")
