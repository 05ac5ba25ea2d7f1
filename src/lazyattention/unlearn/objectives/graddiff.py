# SPDX-License-Identifier: Apache-2.0
"""Gradient difference: ascent on the forget set, descent on the retain set. SIMU's only published objective."""

from lazyattention.unlearn.objectives.base import Objective
from lazyattention.unlearn.objectives.gradient_ascent import forget_loss

GRADDIFF = Objective(
    name="graddiff",
    forget_loss=forget_loss,
    source="Liu et al. 2022, arXiv:2203.12817; as in SOUL, arXiv:2404.18239: -L_forget + retain_weight * L_retain",
)
