# SPDX-License-Identifier: Apache-2.0
"""A few metrics on a few examples, cheap enough to look at while a model is being trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lazyattention.errors import ConfigError
from lazyattention.unlearn.data import QAExample, Template
from lazyattention.unlearn.metrics.context import EvalContext, EvalOptions
from lazyattention.unlearn.metrics.exact_memorization import exact_memorization
from lazyattention.unlearn.metrics.extraction_strength import extraction_strength
from lazyattention.unlearn.metrics.probability import answer_probability
from lazyattention.unlearn.metrics.rouge_l import rouge_l

# Room for an answer that is a little longer than the true one.
_EXTRA_TOKENS = 8


def quick_metrics(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[QAExample],
    retain: Sequence[QAExample],
    *,
    max_examples: int = 32,
    batch_size: int | None = None,
    template: Template = "auto",
    max_len: int = 512,
    with_rouge: bool = True,
) -> dict[str, dict[str, float]]:
    """Measure forgetting and keeping on evenly spaced examples of both sets.

    One scoring pass per set, and for ROUGE-L one generation of at most the longest true answer plus 8 tokens.
    The model's mode, gradients, generation settings and random state are as before afterwards.

    Args:
        model: May be in training mode, wrapped by PEFT or with gradient checkpointing.
        tokenizer: Of the model.
        forget: To be forgotten. May be empty, as may `retain`; an empty set has no entry in the result.
        retain: To be kept.
        max_examples: Of each set at most so many, the same ones on every call.
        batch_size: Examples per pass; None = by device.
        template: See `encode_example`.
        max_len: See `encode_example`.
        with_rouge: False skips generation, the slow part, and leaves "rouge_l" out.

    Returns:
        "forget" and "retain", each with means over examples of "extraction_strength", "exact_memorization",
        "answer_probability", "rouge_l" (recall), all 0 to 1 and higher = better known; "mean_nll", nats per token
        over all tokens; "num_examples".
    """
    if max_examples < 1:
        raise ConfigError(f"max_examples must be at least 1, got {max_examples}")
    chosen = {
        name: evenly_spaced(examples, max_examples)
        for name, examples in (("forget", forget), ("retain", retain))
        if examples
    }
    measured = measure_each(
        model, tokenizer, chosen, batch_size=batch_size, template=template, max_len=max_len, with_rouge=with_rouge
    )
    return {name: item.means() for name, item in measured.items()}


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[QAExample],
    *,
    batch_size: int | None = None,
    template: Template = "auto",
    max_len: int = 512,
    with_rouge: bool = True,
) -> dict[str, float]:
    """Measure one set; see `quick_metrics`."""
    return measure_each(
        model,
        tokenizer,
        {"set": examples},
        batch_size=batch_size,
        template=template,
        max_len=max_len,
        with_rouge=with_rouge,
    )["set"].means()


@dataclass(frozen=True, slots=True)
class QuickMeasurement:
    """One set's metrics.

    Attributes:
        per_example: Metric name to values in the order of the set.
        mean_nll: Nats per token over all tokens of the set.
    """

    per_example: Mapping[str, Sequence[float]]
    mean_nll: float

    def means(self) -> dict[str, float]:
        """Return what `quick_metrics` does for one set."""
        means = {name: float(np.mean(values)) for name, values in self.per_example.items()}
        num_examples = len(next(iter(self.per_example.values())))
        return {**means, "mean_nll": self.mean_nll, "num_examples": float(num_examples)}


def measure_each(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sets: Mapping[str, Sequence[QAExample]],
    *,
    batch_size: int | None = None,
    template: Template = "auto",
    max_len: int = 512,
    with_rouge: bool = True,
) -> dict[str, QuickMeasurement]:
    """Return the metrics of `quick_metrics` for each example of each set; all sets are answered in one pass."""
    context = EvalContext(model, tokenizer, sets, EvalOptions(template=template, max_len=max_len), batch_size)
    if with_rouge:
        context.generate(
            sets, {name: max(len(item.answer_ids) for item in context.encoded(name)) + _EXTRA_TOKENS for name in sets}
        )
    measured = {}
    for name, examples in sets.items():
        scores = context.scores(name)
        values = {
            "extraction_strength": [extraction_strength(item) for item in scores],
            "exact_memorization": [exact_memorization(item) for item in scores],
            "answer_probability": [answer_probability(item) for item in scores],
        }
        if with_rouge:
            values["rouge_l"] = [
                rouge_l(example.answer, text).recall
                for example, text in zip(examples, context.texts(name), strict=True)
            ]
        mean_nll = sum(item.nll for item in scores) / sum(len(item.logprobs) for item in scores)
        measured[name] = QuickMeasurement(values, mean_nll)
    return measured


def evenly_spaced(examples: Sequence[QAExample], count: int) -> list[QAExample]:
    """Pick `count` examples spread over the whole list, always the same ones; all of them if there are fewer."""
    if len(examples) <= count:
        return list(examples)
    return [examples[index * len(examples) // count] for index in range(count)]
