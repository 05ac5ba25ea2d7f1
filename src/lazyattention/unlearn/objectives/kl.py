# SPDX-License-Identifier: Apache-2.0
"""Ascent on the forget set, with the retain set held to the original model's distribution by KL."""

from lazyattention.unlearn.objectives.base import Objective
from lazyattention.unlearn.objectives.gradient_ascent import forget_loss

KL = Objective(name="kl", forget_loss=forget_loss, retain_loss="kl", source="TOFU, arXiv:2401.06121, section 4")
