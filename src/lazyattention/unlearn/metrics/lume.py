# SPDX-License-Identifier: Apache-2.0
"""LUME: what is repeated and what is known, per sub-task, on both sets; the parts first, then what is made of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lazyattention.unlearn.metrics.context import EvalContext, MetricUnavailableError
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.rouge_l import rouge_l
from lazyattention.unlearn.metrics.summaries import harmonic_mean

# Three sub-tasks, two kinds of question, two sets.
NUM_PARTS = 12
MMLU_GATE = 0.371


def is_exact_match(expected: str, given: str) -> bool:
    """Tell whether two answers are equal but for case and white space around them."""
    return expected.strip().lower() == given.strip().lower()


def membership_score(auc: float) -> float:
    """Return 1 - 2 |AUC - 0.5|: 1 = members cannot be told, 0 = always."""
    return 1.0 - 2.0 * abs(auc - 0.5)


def final_score(task_aggregate: float, auc: float, mmlu_accuracy: float) -> float:
    """Return the mean of task aggregate, `membership_score` and MMLU accuracy. 0 to 1.

    It rewards collapse: a destroyed model can gain more membership score than it loses in the task aggregate.
    """
    return (task_aggregate + membership_score(auc) + mmlu_accuracy) / 3.0


def lume_aggregate(parts: Mapping[str, float]) -> float:
    """Return the harmonic mean of the parts, those of the forget set as 1 - value. 0 to 1, higher = better."""
    return harmonic_mean([1.0 - value if name.startswith("forget/") else value for name, value in parts.items()])


def compute(context: EvalContext) -> dict[str, Any]:
    """Score sub-tasks ("Task1", …) by ROUGE-L recall of completions and exact match of answers.

    Returns:
        "parts": "forget/Task1/regurgitation" and so on, 0 to 1, low wanted for forget, high for retain. "value":
        their aggregate (see `lume_aggregate`). "is_complete": all 12 parts are there; the default loader leaves out
        Task 3, so published aggregates do not compare. "membership_auc", "membership_score": from `mia_loss`, None
        without a hold-out. "final_score": None unless `EvalOptions.mmlu_accuracy` and a hold-out are given;
        "passes_mmlu_gate": accuracy of at least 0.371, the organisers' bound for a 7B model.

    Source:
        Ramakrishna et al. 2025, arXiv:2502.15097, and the organisers' evaluation script for SemEval-2025 task 4.
        Differences: ROUGE-L without stemmer; membership against the given hold-out instead of the organisers' sets.
    """
    parts: dict[str, float] = {}
    for split in ("forget", "retain"):
        examples = context.split(split)
        groups = sorted({example.group for example in examples})
        if groups == [""]:
            raise MetricUnavailableError(f"needs LUME's sub-tasks in {split!r}, whose examples have no group")
        found: dict[str, list[float]] = {}
        for example, text in zip(examples, context.texts(split), strict=True):
            if example.kind == "completion":
                found.setdefault(f"{split}/{example.group}/regurgitation", []).append(
                    rouge_l(example.answer, text).recall
                )
            else:
                found.setdefault(f"{split}/{example.group}/knowledge", []).append(
                    float(is_exact_match(example.answer, text))
                )
        parts.update({name: float(np.mean(values)) for name, values in sorted(found.items())})
    aggregate = lume_aggregate(parts)
    result: dict[str, Any] = {
        "value": aggregate,
        "parts": parts,
        "is_complete": len(parts) == NUM_PARTS,
        "membership_auc": None,
        "membership_score": None,
        "mmlu_accuracy": context.options.mmlu_accuracy,
        "passes_mmlu_gate": None,
        "final_score": None,
    }
    if "holdout" in context.splits:
        auc = float(context.result("mia_loss")["value"])
        result |= {"membership_auc": auc, "membership_score": membership_score(auc)}
        if context.options.mmlu_accuracy is not None:
            result["final_score"] = final_score(aggregate, auc, context.options.mmlu_accuracy)
    if context.options.mmlu_accuracy is not None:
        result["passes_mmlu_gate"] = context.options.mmlu_accuracy >= MMLU_GATE
    return result


LUME = register(
    Metric(
        name="lume",
        compute=compute,
        unit="harmonic mean of the sub-tasks' scores",
        value_range="0 to 1",
        direction="higher = forgets more of forget and keeps more of retain; read the parts",
        source="LUME, arXiv:2502.15097; SemEval-2025 task 4",
    )
)
