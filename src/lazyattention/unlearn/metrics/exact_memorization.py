# SPDX-License-Identifier: Apache-2.0
"""How many tokens of the answer are the model's first choice?"""

from typing import Any

from lazyattention.unlearn.metrics.context import EvalContext, mean_over_answers
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.score import AnswerScores


def exact_memorization(scores: AnswerScores) -> float:
    """Return the share of answer tokens that are the model's first choice given the true text before them. 0 to 1.

    Never near 0 for answers in whole sentences: their grammar can be guessed. Compare with the retrained model.

    Source:
        Tirumala et al. 2022, arXiv:2205.10770, as in open-unlearning, arXiv:2506.12618. Differences: the end token
        is left out.
    """
    return float(scores.answer_is_greedy.mean()) if len(scores.answer_is_greedy) else 0.0


def compute(context: EvalContext) -> dict[str, Any]:
    """Per set: mean of `exact_memorization`."""
    return mean_over_answers(context, exact_memorization)


EXACT_MEMORIZATION = register(
    Metric(
        name="exact_memorization",
        compute=compute,
        unit="share of tokens",
        value_range="0 to 1",
        direction="higher = more is known by heart: low wanted on forget (near the retrained model), high on retain",
        source="Tirumala et al. 2022, arXiv:2205.10770; open-unlearning, arXiv:2506.12618",
    )
)
