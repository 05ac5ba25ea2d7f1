# SPDX-License-Identifier: Apache-2.0
"""What a model still knows of what it should forget, and what it lost of what it should keep. One metric, one file."""

from lazyattention.unlearn.metrics import (  # noqa: F401  (importing a metric registers it)
    exact_memorization,
    extraction_strength,
    forget_quality,
    lume,
    mia_loss,
    mia_min_k,
    mia_min_k_plus_plus,
    mia_zlib,
    model_utility,
    perplexity,
    privleak,
    probability,
    rouge_l,
    truth_ratio,
)
from lazyattention.unlearn.metrics.context import EvalContext, EvalOptions, MetricUnavailableError
from lazyattention.unlearn.metrics.evaluate import evaluate, summarize
from lazyattention.unlearn.metrics.quick import quick_metrics
from lazyattention.unlearn.metrics.registry import METRICS, Metric
from lazyattention.unlearn.metrics.score import AnswerScores, score_answers

__all__ = [
    "METRICS",
    "AnswerScores",
    "EvalContext",
    "EvalOptions",
    "Metric",
    "MetricUnavailableError",
    "evaluate",
    "quick_metrics",
    "score_answers",
    "summarize",
]
