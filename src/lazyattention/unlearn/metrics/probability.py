# SPDX-License-Identifier: Apache-2.0
"""How likely the model finds the true answer."""

import math
from typing import Any

from lazyattention.unlearn.metrics.context import EvalContext, ids_of
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.score import AnswerScores
from lazyattention.unlearn.metrics.summaries import mean_over_examples


def answer_probability(scores: AnswerScores) -> float:
    """Return P(answer | question)^(1/num_tokens) = exp(-mean nll), end token included. 0 to 1.

    Source:
        Maini et al. 2024 (TOFU), arXiv:2401.06121, section 2.2.
    """
    return math.exp(-scores.mean_nll)


def normalized_probability(right: float, wrong: list[float]) -> float:
    """Return p(right) / (p(right) + sum of p(wrong)), each already length-normalised. 0 to 1; 1/(1+n) is guessing."""
    total = right + sum(wrong)
    return right / total if total > 0 else 0.0


def compute(context: EvalContext) -> dict[str, Any]:
    """Per set: mean of `answer_probability`; where every example has wrong answers also "normalized" against them.

    TOFU uses the first for its forget and retain sets and the second for real authors and world facts.
    """
    splits: dict[str, Any] = {}
    for name, examples in context.splits.items():
        ids = ids_of(examples)
        right = [answer_probability(scores) for scores in context.scores(name)]
        splits[name] = mean_over_examples(ids, right)
        if all(example.perturbed_answers for example in examples):
            wrong = iter(context.scores(name, "perturbed"))
            values = [
                normalized_probability(p, [answer_probability(next(wrong)) for _ in example.perturbed_answers])
                for p, example in zip(right, examples, strict=True)
            ]
            splits[name]["normalized"] = mean_over_examples(ids, values)
    return {"splits": splits}


PROBABILITY = register(
    Metric(
        name="probability",
        compute=compute,
        unit="probability per token",
        value_range="0 to 1",
        direction="higher = the answer is better known: low wanted on forget (near the retrained model), high on retain",
        source="TOFU, arXiv:2401.06121",
    )
)
