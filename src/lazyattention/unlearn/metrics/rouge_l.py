# SPDX-License-Identifier: Apache-2.0
"""How much of the true answer stands, in order, in the one the model gives."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lazyattention.unlearn.metrics.context import EvalContext, ids_of
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.summaries import mean_over_examples

# Letters and digits of any script; Chinese, Japanese, Korean (syllables) and Thai, written without spaces, sign by sign.
_WORD = re.compile(
    r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)


@dataclass(frozen=True, slots=True)
class RougeL:
    """Recall = LCS / words of the reference; precision = LCS / words of the answer; f1 = their harmonic mean. 0 to 1."""

    recall: float
    precision: float
    f1: float


def rouge_l(reference: str, prediction: str) -> RougeL:
    """Compare two texts by their longest common subsequence of words.

    Exact: equal to Google's `rouge-score` (rougeL, without stemmer) on ASCII text. Differences: `rouge-score` drops
    every letter beyond a-z, so that an answer in Greek or Chinese scores 0 and looks forgotten; here words of all
    scripts count. TOFU and LUME use a stemmer for English, which this does not.

    Source:
        Lin 2004, "ROUGE: a package for automatic evaluation of summaries".
    """
    expected, given = _WORD.findall(reference.lower()), _WORD.findall(prediction.lower())
    if not expected or not given:
        return RougeL(0.0, 0.0, 0.0)
    common = _lcs_len(expected, given)
    recall, precision = common / len(expected), common / len(given)
    return RougeL(recall, precision, 2 * recall * precision / (recall + precision) if common else 0.0)


def compute(context: EvalContext) -> dict[str, Any]:
    """Per set: mean recall of greedy answers ("value", as TOFU), mean "f1", and the generated texts."""
    splits: dict[str, Any] = {}
    context.generate(context.splits)
    for name, examples in context.splits.items():
        ids, texts = ids_of(examples), context.texts(name)
        found = [rouge_l(example.answer, text) for example, text in zip(examples, texts, strict=True)]
        splits[name] = {
            **mean_over_examples(ids, [score.recall for score in found]),
            "f1": mean_over_examples(ids, [score.f1 for score in found]),
            "texts": dict(zip(ids, texts, strict=True)),
        }
    return {"splits": splits}


def _lcs_len(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence; one row of the table at a time."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for column, other in enumerate(second, 1):
            above = row[column]
            row[column] = diagonal + 1 if word == other else max(above, row[column - 1])
            diagonal = above
    return row[-1]


ROUGE_L = register(
    Metric(
        name="rouge_l",
        compute=compute,
        unit="share of the reference's words (recall)",
        value_range="0 to 1",
        direction="higher = the model says more of the true answer: low wanted on forget, high on retain",
        source="Lin 2004; TOFU, arXiv:2401.06121",
    )
)
