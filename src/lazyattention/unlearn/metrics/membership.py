# SPDX-License-Identifier: Apache-2.0
"""What the membership attacks share: forget set against hold-out, one score per example, the area under the curve."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from lazyattention.unlearn.data import QAExample
from lazyattention.unlearn.metrics.context import EvalContext, ids_of
from lazyattention.unlearn.metrics.score import AnswerScores
from lazyattention.unlearn.metrics.summaries import area_under_roc
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

# Below this the hypothesis that both sets have answers of the same length is rejected.
_UNMATCHED_PVALUE = 0.01

AttackScore = Callable[[AnswerScores, QAExample], float]


def attack(context: EvalContext, score: AttackScore) -> dict[str, Any]:
    """Attack the forget set: can it be told from a hold-out of the same distribution that was never trained on?

    Args:
        context: Needs the splits "forget" and "holdout".
        score: Higher = more like a member.

    Returns:
        "value": the area under the ROC curve with "forget" as members; 0.5 = cannot be told (wanted), 1 = betrayed
        as members, 0 = betrayed too, by being less likely than text never seen (forgot too much).
        "distance_from_chance" is |value - 0.5|. "low", "high": 95 % interval. "length_pvalue": of a
        Kolmogorov-Smirnov test of answer lengths; a small one means that the hold-out does not match and that the
        area may measure the sets instead of the model ("is_matched" False).
    """
    scores: dict[str, list[float]] = {}
    lengths: dict[str, list[int]] = {}
    for split in ("forget", "holdout"):
        examples: Sequence[QAExample] = context.split(split)
        found = context.scores(split)
        scores[split] = [score(item, example) for item, example in zip(found, examples, strict=True)]
        lengths[split] = [len(item.logprobs) for item in found]
    auc = area_under_roc(scores["forget"], scores["holdout"])
    length_pvalue = float(stats.ks_2samp(lengths["forget"], lengths["holdout"]).pvalue)
    if length_pvalue < _UNMATCHED_PVALUE and not context.has_warned_of_lengths:
        context.has_warned_of_lengths = True
        logger.warning(
            "membership attacks: answers of forget (mean %.1f tokens) and holdout (%.1f) differ in length (p = %.1e): the hold-out "
            "does not match, so the area may measure the sets instead of the model. Use a hold-out of the same kind",
            np.mean(lengths["forget"]),
            np.mean(lengths["holdout"]),
            length_pvalue,
        )
    return {
        "value": auc.value,
        "low": auc.low,
        "high": auc.high,
        "distance_from_chance": abs(auc.value - 0.5),
        "length_pvalue": length_pvalue,
        "is_matched": length_pvalue >= _UNMATCHED_PVALUE,
        "scores": {
            split: dict(zip(ids_of(context.split(split)), values, strict=True)) for split, values in scores.items()
        },
    }


def attack_by_lowest(context: EvalContext, score: Callable[[AnswerScores, float], float]) -> dict[str, Any]:
    """`attack` with a score of the least likely tokens, whose share is `EvalOptions.min_k_fraction`."""
    fraction = context.options.min_k_fraction
    return {**attack(context, lambda scores, _: score(scores, fraction)), "min_k_fraction": fraction}


ATTACK_RANGE = "0 to 1"
ATTACK_UNIT = "area under the ROC curve"
ATTACK_DIRECTION = (
    "0.5 = forget cannot be told from the hold-out (wanted, or the retrained model's value); towards 1 = still betrayed "
    "as training data; towards 0 = betrayed by unnatural loss"
)
