# SPDX-License-Identifier: Apache-2.0
"""Membership attack by the least likely tokens: text never seen has a few that surprise."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyattention.unlearn.metrics.context import EvalContext
from lazyattention.unlearn.metrics.membership import ATTACK_DIRECTION, ATTACK_RANGE, ATTACK_UNIT, attack_by_lowest
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.score import AnswerScores


def mean_of_lowest(values: NDArray[np.floating[Any]], fraction: float) -> float:
    """Return the mean of the lowest `fraction` of values: floor(fraction * n) of them, at least one."""
    # 0.3 * 10 is 3.0000000000000004 or 2.9999999999999996 depending on the factors: round before cutting.
    count = max(1, int(round(len(values) * fraction, 9)))
    return float(np.sort(values.astype(np.float64))[:count].mean())


def min_k_score(scores: AnswerScores, fraction: float) -> float:
    """Return the mean log p of the least likely `fraction` of tokens, in nats; at most 0, higher = more like a member.

    Source:
        Shi et al. 2023 (Min-K% Prob), arXiv:2310.16789.
    """
    return mean_of_lowest(scores.logprobs, fraction)


def compute(context: EvalContext) -> dict[str, Any]:
    """See `membership.attack_by_lowest`."""
    return attack_by_lowest(context, min_k_score)


MIA_MIN_K = register(
    Metric(
        name="mia_min_k",
        compute=compute,
        unit=ATTACK_UNIT,
        value_range=ATTACK_RANGE,
        direction=ATTACK_DIRECTION,
        source="Shi et al. 2023, arXiv:2310.16789",
    )
)
