# SPDX-License-Identifier: Apache-2.0
"""Membership attack by loss relative to how compressible the text is: repetitive text is likely without training."""

import zlib
from typing import Any

from lazyattention.unlearn.data import QAExample
from lazyattention.unlearn.metrics.context import EvalContext
from lazyattention.unlearn.metrics.membership import ATTACK_DIRECTION, ATTACK_RANGE, ATTACK_UNIT, attack
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.score import AnswerScores


def zlib_score(scores: AnswerScores, example: QAExample) -> float:
    """Return minus the mean nll divided by the answer's size after zlib, in nats per token and byte; at most 0.

    Source:
        Carlini et al. 2021, arXiv:2012.07805, section 5.2, with the mean nll as in open-unlearning.
    """
    return -scores.mean_nll / len(zlib.compress(example.answer.encode()))


def compute(context: EvalContext) -> dict[str, Any]:
    """See `membership.attack`."""
    return attack(context, zlib_score)


MIA_ZLIB = register(
    Metric(
        name="mia_zlib",
        compute=compute,
        unit=ATTACK_UNIT,
        value_range=ATTACK_RANGE,
        direction=ATTACK_DIRECTION,
        source="Carlini et al. 2021, arXiv:2012.07805",
    )
)
