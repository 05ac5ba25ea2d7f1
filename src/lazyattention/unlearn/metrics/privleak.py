# SPDX-License-Identifier: Apache-2.0
"""Does an attacker learn more about the forget set than from a model that never saw it?"""

from typing import Any

from lazyattention.unlearn.metrics.context import EvalContext, MetricUnavailableError
from lazyattention.unlearn.metrics.registry import Metric, register

CHANCE = 0.5


def privleak(auc: float, retrained_auc: float) -> float | None:
    """Return ((1 - AUC) - (1 - AUC_retrained)) / (1 - AUC_retrained) * 100, with forget as members. Per cent.

    0 = as the retrained model (wanted); negative, down to -100 = still betrayed as members (forgot too little);
    positive, without bound = less likely than text never seen (forgot too much). None if AUC_retrained is 1.

    Source:
        Shi et al. 2024 (MUSE), arXiv:2407.06460, section 3.3. There non-members are the positive class, so its AUC
        is 1 minus ours.
    """
    reference = 1.0 - retrained_auc
    return None if reference == 0 else ((1.0 - auc) - reference) / reference * 100.0


def compute(context: EvalContext) -> dict[str, Any]:
    """Compare the AUC of `mia_min_k` with the retrained model's, or with 0.5 when there are no logs ("reference")."""
    own = context.result("mia_min_k")["value"]
    reference, source = CHANCE, "chance"
    if context.retrained is not None:
        logged = context.retrained_result("mia_min_k", "forget", "holdout")
        if logged["min_k_fraction"] != context.options.min_k_fraction:
            raise MetricUnavailableError(
                f"needs retrained_logs made with min_k_fraction={context.options.min_k_fraction}, they have "
                f"{logged['min_k_fraction']}; use the same for both models"
            )
        reference, source = float(logged["value"]), "retrained"
    return {
        "value": privleak(own, reference),
        "auc": own,
        "reference_auc": reference,
        "reference": source,
    }


PRIVLEAK = register(
    Metric(
        name="privleak",
        compute=compute,
        unit="per cent",
        value_range="-100 upwards",
        direction="0 = as the retrained model (wanted); negative = forgot too little; positive = forgot too much",
        source="MUSE, arXiv:2407.06460",
    )
)
