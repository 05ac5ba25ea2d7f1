# SPDX-License-Identifier: Apache-2.0
"""Membership attack by loss: what was trained on is likelier."""

from typing import Any

from lazyattention.unlearn.data import QAExample
from lazyattention.unlearn.metrics.context import EvalContext
from lazyattention.unlearn.metrics.membership import ATTACK_DIRECTION, ATTACK_RANGE, ATTACK_UNIT, attack
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.score import AnswerScores


def loss_score(scores: AnswerScores, example: QAExample) -> float:
    """Return minus the mean nll, in nats per token; at most 0, higher = more like a member.

    Source:
        Yeom et al. 2018, arXiv:1709.01604.
    """
    return -scores.mean_nll


def compute(context: EvalContext) -> dict[str, Any]:
    """See `membership.attack`."""
    return attack(context, loss_score)


MIA_LOSS = register(
    Metric(
        name="mia_loss",
        compute=compute,
        unit=ATTACK_UNIT,
        value_range=ATTACK_RANGE,
        direction=ATTACK_DIRECTION,
        source="Yeom et al. 2018, arXiv:1709.01604",
    )
)
