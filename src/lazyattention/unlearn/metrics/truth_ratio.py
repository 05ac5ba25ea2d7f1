# SPDX-License-Identifier: Apache-2.0
"""Does the model still prefer the true answer to wrong ones of the same wording?"""

import math
from collections.abc import Sequence
from typing import Any

from lazyattention.unlearn.metrics.context import EvalContext, MetricUnavailableError, ids_of
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.summaries import mean_over_examples

# exp of more than this overflows; a ratio that large says all there is to say.
_MAX_LOG_RATIO = 700.0


def truth_ratio(right_mean_nll: float, wrong_mean_nlls: Sequence[float]) -> float:
    """Return R = geometric mean of p(wrong) / p(paraphrased right), with p = exp(-mean nll). 0 upwards.

    R < 1: the truth is preferred; R = 1: no preference. As the code of TOFU and of open-unlearning has it.

    Source:
        Maini et al. 2024 (TOFU), arXiv:2401.06121, eq. 1. Differences: the printed equation has an arithmetic mean
        over wrong answers; see `truth_ratio_arithmetic`.
    """
    log_ratio = right_mean_nll - math.fsum(wrong_mean_nlls) / len(wrong_mean_nlls)
    return math.exp(max(-_MAX_LOG_RATIO, min(_MAX_LOG_RATIO, log_ratio)))


def truth_ratio_arithmetic(right_mean_nll: float, wrong_mean_nlls: Sequence[float]) -> float:
    """Return the same with the arithmetic mean of p(wrong), as TOFU's equation 1 is printed. Never below the other."""
    logs = [min(_MAX_LOG_RATIO, right_mean_nll - nll) for nll in wrong_mean_nlls]
    return math.fsum(math.exp(value) for value in logs) / len(logs)


def closeness_to_one(ratio: float) -> float:
    """Return min(R, 1/R): 1 if true and wrong answers are equally likely. For forget sets. 0 to 1."""
    return min(ratio, 1 / ratio) if ratio > 0 else 0.0


def preference_for_truth(ratio: float) -> float:
    """Return max(0, 1 - R): near 1 if the truth is much preferred. For sets to keep. 0 to 1."""
    return max(0.0, 1.0 - ratio)


def compute(context: EvalContext) -> dict[str, Any]:
    """Per set with wrong answers for every example: aggregate ("value") and the ratio R of each example.

    The value is the mean of `closeness_to_one` on sets whose name starts with "forget" and of
    `preference_for_truth` on all others; both stand in the result, as does R with the arithmetic mean.
    """
    splits: dict[str, Any] = {}
    for name, examples in context.splits.items():
        if not all(example.perturbed_answers for example in examples):
            continue
        ids = ids_of(examples)
        wrong_scores = iter(context.scores(name, "perturbed"))
        ratios, arithmetic = [], []
        for right, example in zip(context.scores(name, "paraphrased"), examples, strict=True):
            wrong = [next(wrong_scores).mean_nll for _ in example.perturbed_answers]
            ratios.append(truth_ratio(right.mean_nll, wrong))
            arithmetic.append(truth_ratio_arithmetic(right.mean_nll, wrong))
        closeness = mean_over_examples(ids, [closeness_to_one(ratio) for ratio in ratios])
        preference = mean_over_examples(ids, [preference_for_truth(ratio) for ratio in ratios])
        chosen = closeness if name.startswith("forget") else preference
        splits[name] = {
            "value": chosen["value"],
            "stderr": chosen["stderr"],
            "num_examples": len(ratios),
            "aggregate": "closeness_to_one" if chosen is closeness else "preference_for_truth",
            "closeness_to_one": closeness["value"],
            "preference_for_truth": preference["value"],
            "ratios": dict(zip(ids, ratios, strict=True)),
            "ratios_arithmetic": dict(zip(ids, arithmetic, strict=True)),
        }
    if not splits:
        raise MetricUnavailableError("needs a split whose examples all have perturbed_answers")
    return {"splits": splits}


TRUTH_RATIO = register(
    Metric(
        name="truth_ratio",
        compute=compute,
        unit="aggregate of probability ratios",
        value_range="0 to 1",
        direction=(
            "on forget: 1 = wrong and true answers equally likely; on other sets: higher = the truth is preferred. "
            "High wanted on both, on forget near the retrained model's"
        ),
        source="TOFU, arXiv:2401.06121",
    )
)
