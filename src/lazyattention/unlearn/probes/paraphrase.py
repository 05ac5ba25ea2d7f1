# SPDX-License-Identifier: Apache-2.0
"""Is the answer forgotten, or only the question as it was put?"""

from dataclasses import replace
from typing import Any

from lazyattention.unlearn.probes.context import ProbeContext, ProbeUnavailableError, change, worst_of
from lazyattention.unlearn.probes.registry import Probe, register


def run(context: ProbeContext) -> dict[str, Any]:
    """Ask the paraphrased questions of the forget set; "worst" takes the better of both wordings per example."""
    examples = [example for example in context.chosen("forget") if example.paraphrased_question]
    if not examples:
        raise ProbeUnavailableError("needs forget examples with a paraphrased_question")
    model = context.intact_model()
    paraphrased = [replace(example, question=example.paraphrased_question or "") for example in examples]
    measured = context.measure(model, {"plain": examples, "paraphrased": paraphrased})
    before, after = measured["plain"].as_dict(), measured["paraphrased"].as_dict()
    return {
        "method": "the paraphrased question of each forget example instead of its own; same true answer",
        "before": {"forget": before},
        "after": {"forget": after},
        "change": {"forget": change(before, after)},
        "worst": {"forget": worst_of(list(measured.values())).as_dict()},
    }


PARAPHRASE = register(Probe(name="paraphrase", run=run, source="TOFU, arXiv:2401.06121, has the paraphrases"))
