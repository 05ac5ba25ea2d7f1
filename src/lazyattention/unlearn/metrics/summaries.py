# SPDX-License-Identifier: Apache-2.0
"""Small arithmetic that several metrics share: means with their error, harmonic means, areas under a ROC curve."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyattention.errors import RequestError


def mean_over_examples(ids: Sequence[str], values: Sequence[float]) -> dict[str, Any]:
    """Return "value" (the mean), "stderr" (of the mean; None for one example), "num_examples" and "per_example"."""
    array = np.asarray(values, dtype=np.float64)
    stderr = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return {
        "value": float(array.mean()),
        "stderr": stderr,
        "num_examples": len(array),
        "per_example": dict(zip(ids, (float(value) for value in array), strict=True)),
    }


def harmonic_mean(values: Sequence[float]) -> float:
    """Return n / sum(1/x). It is 0 as soon as one part is 0, and close to the smallest part otherwise.

    Raises:
        RequestError: No value, or a negative one.
    """
    if not values:
        raise RequestError("harmonic mean of no values; give at least one")
    if min(values) < 0:
        raise RequestError(f"harmonic mean needs values of at least 0, got {min(values)}")
    if min(values) == 0:
        return 0.0
    return len(values) / math.fsum(1 / value for value in values)


@dataclass(frozen=True, slots=True)
class Auc:
    """Area under the ROC curve.

    Attributes:
        value: Chance that a random positive scores above a random negative; ties count half. 0.5 = no better than
            guessing.
        low, high: 95 % confidence interval (DeLong), cut to 0..1. As wide as the sets are small. Around a perfect
            separation it has no width: it describes the sample, not the next one.
    """

    value: float
    low: float
    high: float


def area_under_roc(positives: Sequence[float], negatives: Sequence[float]) -> Auc:
    """Compute the area under the ROC curve with its interval.

    Source:
        DeLong, DeLong & Clarke-Pearson 1988, Biometrics 44:837, for the variance.
    """
    pos = np.asarray(positives, dtype=np.float64)
    neg = np.asarray(negatives, dtype=np.float64)
    if not len(pos) or not len(neg):
        raise RequestError(f"an area under the curve needs members and non-members, got {len(pos)} and {len(neg)}")
    above = _placements(pos, neg)  # [num_positives]
    below = 1.0 - _placements(neg, pos)  # [num_negatives]
    value = float(above.mean())
    variance = sum(float(part.var(ddof=1)) / len(part) for part in (above, below) if len(part) > 1)
    margin = 1.959963984540054 * math.sqrt(variance)
    return Auc(value, max(0.0, value - margin), min(1.0, value + margin))


def _placements(values: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each value the share of others below it, ties counting half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, values, side="left")
    not_above = np.searchsorted(ordered, values, side="right")
    return (below + not_above) / (2.0 * len(others))


def json_safe(value: Any) -> Any:  # noqa: ANN401
    """Turn tuples and numpy numbers into plain ones, and numbers that JSON cannot write (nan, infinity) into None."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
