# SPDX-License-Identifier: Apache-2.0
"""Unlearning objectives: one file, one objective; a pure function of logits and labels.

To add one: write `forget_loss(inputs, config) -> scalar` in a new file, say what it `needs`, add a line to
`OBJECTIVES`, and a row to tests/unlearn/test_objectives.py.
"""

from lazyattention.unlearn.objectives.base import Objective, ObjectiveInputs, ObjectiveTerms, compute_terms
from lazyattention.unlearn.objectives.graddiff import GRADDIFF
from lazyattention.unlearn.objectives.gradient_ascent import GRADIENT_ASCENT
from lazyattention.unlearn.objectives.kl import KL
from lazyattention.unlearn.objectives.npo import NPO
from lazyattention.unlearn.objectives.preference import IDK_ANSWERS, PREFERENCE
from lazyattention.unlearn.objectives.simnpo import SIMNPO
from lazyattention.unlearn.objectives.undial import UNDIAL
from lazyattention.utils.registry import Registry

OBJECTIVES: Registry[Objective] = Registry("objective")
for _objective in (GRADIENT_ASCENT, GRADDIFF, NPO, SIMNPO, PREFERENCE, KL, UNDIAL):
    OBJECTIVES.register(_objective.name, _objective)

__all__ = [
    "IDK_ANSWERS",
    "OBJECTIVES",
    "Objective",
    "ObjectiveInputs",
    "ObjectiveTerms",
    "compute_terms",
]
