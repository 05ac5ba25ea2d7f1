# SPDX-License-Identifier: Apache-2.0
"""Membership attack by the least likely tokens, each judged against what else could have stood there."""

from typing import Any

import numpy as np

from lazyattention.unlearn.metrics.context import EvalContext
from lazyattention.unlearn.metrics.membership import ATTACK_DIRECTION, ATTACK_RANGE, ATTACK_UNIT, attack_by_lowest
from lazyattention.unlearn.metrics.mia_min_k import mean_of_lowest
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.score import AnswerScores

# A certain model has no spread at all; open-unlearning bounds the variance by 1e-6.
_MIN_STD = 1e-3


def min_k_plus_plus_score(scores: AnswerScores, fraction: float) -> float:
    """Return the mean of the lowest `fraction` of (log p - mean) / std, mean and std of log p over the vocabulary.

    No unit; any sign; higher = more like a member.

    Source:
        Zhang et al. 2024 (Min-K%++), arXiv:2404.02936, eq. 3.
    """
    normalized = (scores.logprobs - scores.vocab_mean) / np.maximum(scores.vocab_std, _MIN_STD)
    return mean_of_lowest(normalized, fraction)


def compute(context: EvalContext) -> dict[str, Any]:
    """See `membership.attack_by_lowest`."""
    return attack_by_lowest(context, min_k_plus_plus_score)


MIA_MIN_K_PLUS_PLUS = register(
    Metric(
        name="mia_min_k_plus_plus",
        compute=compute,
        unit=ATTACK_UNIT,
        value_range=ATTACK_RANGE,
        direction=ATTACK_DIRECTION,
        source="Zhang et al. 2024, arXiv:2404.02936",
    )
)
