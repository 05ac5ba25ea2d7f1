# SPDX-License-Identifier: Apache-2.0
"""How little of the answer must be given before the model completes the rest by heart?"""

from typing import Any

import numpy as np

from lazyattention.unlearn.metrics.context import EvalContext, mean_over_answers
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.score import AnswerScores


def extraction_strength(scores: AnswerScores) -> float:
    """Return 1 - k/T: T tokens, and k the fewest given ones after which all others are first choices. 0 to 1.

    1 = the question alone draws out the whole answer; 0 = not even the last token is right.

    Source:
        Carlini et al. 2021, arXiv:2012.07805, as in open-unlearning, arXiv:2506.12618. Differences: no match gives
        0 (there 1/T), and the end token is left out.
    """
    is_greedy = scores.answer_is_greedy
    wrong = np.flatnonzero(~is_greedy)
    if not len(is_greedy):
        return 0.0
    num_given = int(wrong[-1]) + 1 if len(wrong) else 0
    return 1.0 - num_given / len(is_greedy)


def compute(context: EvalContext) -> dict[str, Any]:
    """Per set: mean of `extraction_strength`."""
    return mean_over_answers(context, extraction_strength)


EXTRACTION_STRENGTH = register(
    Metric(
        name="extraction_strength",
        compute=compute,
        unit="share of tokens",
        value_range="0 to 1",
        direction="higher = more can be drawn out: low wanted on forget (near the retrained model), high on retain",
        source="Carlini et al. 2021, arXiv:2012.07805; open-unlearning, arXiv:2506.12618",
    )
)
