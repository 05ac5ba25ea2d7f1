# SPDX-License-Identifier: Apache-2.0
"""How surprised the model is by the answers of a set."""

import math
from collections.abc import Sequence
from typing import Any

from lazyattention.unlearn.metrics.context import EvalContext, ids_of
from lazyattention.unlearn.metrics.registry import Metric, register
from lazyattention.unlearn.metrics.score import AnswerScores
from lazyattention.unlearn.metrics.summaries import mean_over_examples


def perplexity(scores: Sequence[AnswerScores]) -> float:
    """Return exp(sum of nll / number of tokens) over a whole set, every token counting the same. 1 upwards.

    1 = certain; the vocabulary size = guessing among all tokens; more = certain of something else.
    """
    num_tokens = sum(len(item.logprobs) for item in scores)
    # exp beyond 700 overflows.
    return math.exp(min(700.0, math.fsum(item.nll for item in scores) / num_tokens))


def compute(context: EvalContext) -> dict[str, Any]:
    """Per set: `perplexity`, and the mean nll in nats per token of each example."""
    splits: dict[str, Any] = {}
    for name, examples in context.splits.items():
        scores = context.scores(name)
        nats = mean_over_examples(ids_of(examples), [item.mean_nll for item in scores])
        splits[name] = {
            "value": perplexity(scores),
            "num_examples": len(scores),
            "num_tokens": sum(len(item.logprobs) for item in scores),
            "mean_nll": nats,
        }
    return {"splits": splits}


PERPLEXITY = register(
    Metric(
        name="perplexity",
        compute=compute,
        unit="tokens (exp of nats per token)",
        value_range="1 upwards",
        direction=(
            "higher = more surprised: low wanted on retain and holdout; on forget near the retrained model's, "
            "as far above it means damage, not forgetting"
        ),
        source="standard",
    )
)
