# SPDX-License-Identifier: Apache-2.0
"""One number for what the model can still do: nine parts, none of which may be lost."""

from typing import Any

from lazyattention.unlearn.metrics.context import EvalContext, MetricUnavailableError
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.summaries import harmonic_mean

UTILITY_SPLITS = ("retain", "real_authors", "world_facts")
# Answers of these sets are single names or words: their probability is taken against the wrong ones.
_NORMALIZED_SPLITS = ("real_authors", "world_facts")
NUM_PARTS = 9


def compute(context: EvalContext) -> dict[str, Any]:
    """Return the harmonic mean of probability, ROUGE-L recall and truth ratio on retain, real authors, world facts.

    Parts that cannot be computed (a set is missing, or has no wrong answers) are listed under "missing", and
    "is_complete" is False: such a value compares with others of the same parts only, not with published ones.

    Source:
        Maini et al. 2024 (TOFU), arXiv:2401.06121, section 2.2.1.
    """
    parts: dict[str, float] = {}
    missing: list[str] = []
    given = [name for name in UTILITY_SPLITS if name in context.splits]
    if not given:
        raise MetricUnavailableError(f"needs at least one of the splits {', '.join(UTILITY_SPLITS)}")
    for split in UTILITY_SPLITS:
        for metric in ("probability", "rouge_l", "truth_ratio"):
            value = _part(context, split, metric) if split in given else None
            if value is None:
                missing.append(f"{split}/{metric}")
            else:
                parts[f"{split}/{metric}"] = value
    return {
        "value": harmonic_mean(list(parts.values())),
        "parts": parts,
        "missing": missing,
        "is_complete": len(parts) == NUM_PARTS,
    }


def _part(context: EvalContext, split: str, metric: str) -> float | None:
    try:
        found = context.result(metric)["splits"].get(split)
    except MetricUnavailableError:
        return None
    if found is None:
        return None
    if metric == "probability" and split in _NORMALIZED_SPLITS:
        found = found.get("normalized")
    if metric == "truth_ratio":
        return float(found["preference_for_truth"])
    return None if found is None else float(found["value"])


MODEL_UTILITY = register(
    Metric(
        name="model_utility",
        compute=compute,
        unit="harmonic mean of nine scores",
        value_range="0 to 1",
        direction="higher = more of what should be kept is kept; wanted near the original and the retrained model's",
        source="TOFU, arXiv:2401.06121",
    )
)
