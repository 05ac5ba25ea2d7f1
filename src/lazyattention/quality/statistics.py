# SPDX-License-Identifier: Apache-2.0
"""Means with bootstrap intervals over questions; differences are paired, question by question."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_NUM_RESAMPLES = 2000
_CHUNK = 200
_SEED = 20260


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over questions.

    Attributes:
        mean: Over all questions.
        low: Lower end of the 95 % percentile bootstrap interval.
        high: Upper end.
        num_questions: How many.
    """

    mean: float
    low: float
    high: float
    num_questions: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def interval(values: Sequence[float]) -> Interval:
    """Mean of at least one value and its interval; the same values always give the same interval."""
    array = np.asarray(values, dtype=np.float64)
    assert array.ndim == 1
    assert len(array)
    draw = np.random.default_rng(_SEED)
    means = [
        array[draw.integers(0, len(array), size=(_CHUNK, len(array)))].mean(axis=1)
        for _ in range(_NUM_RESAMPLES // _CHUNK)
    ]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return Interval(float(array.mean()), float(low), float(high), len(array))


def paired_difference(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Mean of `values - others`, question by question: much narrower than the difference of two intervals."""
    assert len(values) == len(others)
    return interval([value - other for value, other in zip(values, others, strict=True)])
