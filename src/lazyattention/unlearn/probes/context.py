# SPDX-License-Identifier: Apache-2.0
"""What probes share: how to get a fresh model, the sets, and how a set is measured before and after an attack."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.data import QAExample, Template
from lazyattention.unlearn.metrics.quick import evenly_spaced, measure_each


class ProbeUnavailableError(RequestError):
    """A probe cannot be run on the sets given; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """How hard the attacks are. A probe that finds nothing says nothing about a harder one.

    Attributes:
        template, max_len, batch_size: As in `evaluate`.
        max_examples: Of each set at most so many are measured, evenly spaced.
        relearn_source: Train the attack on part of the forget set, or on the retain set.
        relearn_fraction: Share of the forget set the attacker has. The rest is measured, never trained on.
        relearn_steps: Measure after so many optimiser steps, in rising order; the last ends the attack.
        relearn_learning_rate: Of AdamW, constant, no weight decay.
        relearn_batch_size: Examples per optimiser step.
        relearn_dtype: "float32" trains float32 weights, as bfloat16 rounds small steps away; "keep" saves memory.
        quantize_bits: Bits per weight.
        quantize_group_size: Weights that share a scale and an offset, along the input dimension.
        num_shots: Question-answer pairs of the retain set shown before the question by the prefix probe.
        answer_start_fraction: Share of the answer's tokens given away by the prefix probe.
    """

    template: Template = "auto"
    max_len: int = 512
    batch_size: int | None = None
    max_examples: int = 100
    relearn_source: Literal["forget", "retain"] = "forget"
    relearn_fraction: float = 0.1
    relearn_steps: tuple[int, ...] = (1, 5, 10, 20)
    relearn_learning_rate: float = 2e-5
    relearn_batch_size: int = 8
    relearn_dtype: Literal["float32", "keep"] = "float32"
    quantize_bits: int = 4
    quantize_group_size: int = 128
    num_shots: int = 3
    answer_start_fraction: float = 0.25

    def __post_init__(self) -> None:
        steps = self.relearn_steps
        checks = {
            "max_examples and batch_size must be at least 1": self.max_examples >= 1
            and (self.batch_size is None or self.batch_size >= 1),
            "relearn_source must be 'forget' or 'retain'": self.relearn_source in ("forget", "retain"),
            "relearn_fraction must lie between 0 and 1": 0 < self.relearn_fraction < 1,
            "relearn_steps must be rising whole numbers from 1": bool(steps)
            and steps[0] >= 1
            and all(a < b for a, b in zip(steps, steps[1:], strict=False)),
            "relearn_learning_rate must be above 0": self.relearn_learning_rate > 0,
            "relearn_batch_size must be at least 1": self.relearn_batch_size >= 1,
            "relearn_dtype must be 'float32' or 'keep'": self.relearn_dtype in ("float32", "keep"),
            "quantize_bits must be 2 to 8": 2 <= self.quantize_bits <= 8,
            "quantize_group_size must be at least 2": self.quantize_group_size >= 2,
            "num_shots must be at least 0": self.num_shots >= 0,
            "answer_start_fraction must lie between 0 and 1": 0 < self.answer_start_fraction < 1,
        }
        for message, holds in checks.items():
            if not holds:
                raise ConfigError(f"{message}; got {self}")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a result file."""
        return asdict(self)


@dataclass(slots=True)
class ProbeContext:
    """What a probe may ask for.

    Attributes:
        load_model: Returns a fresh copy of the attacked model each time; a probe may ruin what it gets.
        tokenizer: Of the model.
        splits: "forget" is needed; "retain" is measured beside it where given.
        options: See `ProbeOptions`.
        seed: Of everything random in a probe.
    """

    load_model: Callable[[], PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    splits: Mapping[str, Sequence[QAExample]]
    options: ProbeOptions = field(default_factory=ProbeOptions)
    seed: int = 0
    _intact: PreTrainedModel | None = None

    def intact_model(self) -> PreTrainedModel:
        """Return the model for probes that only ask; loaded once, and never to be changed."""
        if self._intact is None:
            self._intact = self.load_model()
        return self._intact

    def fresh_model(self) -> PreTrainedModel:
        """Return a model to change. The intact one is dropped first: there is never more than one in memory."""
        self._intact = None
        # A model holds cycles; what is left of the last one must go before the next one comes.
        gc.collect()
        return self.load_model()

    def chosen(self, split: str) -> list[QAExample]:
        """Return the examples of a set that are measured; empty if there is no such set."""
        return evenly_spaced(self.splits.get(split, []), self.options.max_examples)

    def measure(self, model: PreTrainedModel, sets: Mapping[str, Sequence[QAExample]]) -> "dict[str, Measurement]":
        """Measure several sets, or one set asked in several ways, in one pass."""
        measured = measure_each(
            model,
            self.tokenizer,
            sets,
            batch_size=self.options.batch_size,
            template=self.options.template,
            max_len=self.options.max_len,
        )
        return {name: Measurement(item.per_example, item.mean_nll) for name, item in measured.items()}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Metrics of each example of a set.

    Attributes:
        per_example: Metric name to values in the order of the set.
        mean_nll: Nats per token over the whole set; None where it has no meaning.
    """

    per_example: Mapping[str, Sequence[float]]
    mean_nll: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return means, "stderr" of each mean, "mean_nll" and "num_examples"."""
        count = len(next(iter(self.per_example.values())))
        return {
            **{name: float(np.mean(values)) for name, values in self.per_example.items()},
            "mean_nll": self.mean_nll,
            "stderr": {
                name: float(np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else None
                for name, values in self.per_example.items()
            },
            "num_examples": count,
        }


def worst_of(measurements: Sequence[Measurement]) -> Measurement:
    """Take for each example and metric the highest value: what an attacker who tries everything gets.

    The highest of several noisy values is high by chance alone: compare with the retrained model under the same probe.
    """
    names = measurements[0].per_example.keys()
    return Measurement(
        {name: np.max([item.per_example[name] for item in measurements], axis=0).tolist() for name in names}
    )


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return after minus before for each mean; on a forget set a rise means that something came back."""
    return {
        name: after[name] - value
        for name, value in before.items()
        if isinstance(value, float) and isinstance(after.get(name), float)
    }
