# SPDX-License-Identifier: Apache-2.0
"""Can truth ratios of the unlearned model be told from those of a model that never saw the forget set?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from lazyattention.unlearn.metrics.context import EvalContext, MetricUnavailableError
from lazyattention.unlearn.metrics.registry import Metric, register


def forget_quality(ratios: Sequence[float], retrained_ratios: Sequence[float]) -> dict[str, Any]:
    """Compare two samples of truth ratios by the two-sample Kolmogorov-Smirnov test.

    Returns:
        "value": the p-value, 0 to 1; higher = harder to tell apart. It saturates: beyond a few hundred examples
        almost every method is near 0, so it cannot rank methods. "statistic": the largest distance between the two
        distribution functions, 0 to 1, lower = closer, which can. "mean_log_ratio_difference": in nats, positive =
        wrong answers are likelier than under the retrained model (forgot too much), negative = too little.

    Source:
        Maini et al. 2024 (TOFU), arXiv:2401.06121, section 2.2.2.
    """
    test = stats.ks_2samp(ratios, retrained_ratios)
    tiny = np.finfo(np.float64).tiny
    logs = [float(np.log(np.maximum(np.asarray(values), tiny)).mean()) for values in (ratios, retrained_ratios)]
    return {
        "value": float(test.pvalue),
        "statistic": float(test.statistic),
        "mean_log_ratio_difference": logs[0] - logs[1],
        "num_examples": len(ratios),
        "num_retrained_examples": len(retrained_ratios),
    }


def compute(context: EvalContext) -> dict[str, Any]:
    """Test the truth ratios on "forget" against those in the retrained model's logs."""
    logged = context.retrained_result("truth_ratio", "forget")["splits"].get("forget")
    own = context.result("truth_ratio")["splits"].get("forget")
    if own is None or logged is None:
        raise MetricUnavailableError("needs a split 'forget' whose examples all have perturbed_answers")
    return forget_quality(list(own["ratios"].values()), list(logged["ratios"].values()))


FORGET_QUALITY = register(
    Metric(
        name="forget_quality",
        compute=compute,
        unit="p-value of a Kolmogorov-Smirnov test; its statistic beside it",
        value_range="0 to 1",
        direction="higher = less distinguishable from the retrained model; read the statistic (lower = closer) to rank",
        source="TOFU, arXiv:2401.06121",
    )
)
