# SPDX-License-Identifier: Apache-2.0
"""What metrics share: the model, the sets, and each forward pass done once however many metrics need it."""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.data import (
    QAExample,
    Template,
    dataset_digest,
    encode_examples,
    pad_id_of,
    resolve_template,
)
from lazyattention.unlearn.data.encode import EncodedExample
from lazyattention.unlearn.metrics.generate import generate_texts, stop_token_ids_of
from lazyattention.unlearn.metrics.progress import Progress
from lazyattention.unlearn.metrics.registry import METRICS
from lazyattention.unlearn.metrics.score import AnswerScores, score_answers
from lazyattention.unlearn.metrics.summaries import mean_over_examples

AnswerField = Literal["answer", "paraphrased", "perturbed"]


class MetricUnavailableError(RequestError):
    """A metric cannot be computed from the sets or logs given; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """How examples are shown to the model and how metrics are computed. Part of what a result depends on.

    Attributes:
        template: "chat", "plain" or "auto" (chat if the tokenizer has a template).
        max_len: Tokens of prompt and answer together.
        max_new_tokens: Longest generated answer. TOFU uses 200.
        min_k_fraction: Share of least likely tokens in `mia_min_k`, `mia_min_k_plus_plus` and `privleak`; MUSE uses 0.4.
        mmlu_accuracy: Measured elsewhere, 0 to 1, for LUME's final score; None leaves that score out.
    """

    template: Template = "auto"
    max_len: int = 512
    max_new_tokens: int = 200
    min_k_fraction: float = 0.4
    mmlu_accuracy: float | None = None

    def __post_init__(self) -> None:
        if self.max_len < 2 or self.max_new_tokens < 1:
            raise ConfigError(
                f"max_len must be at least 2 and max_new_tokens at least 1, got {self.max_len}, {self.max_new_tokens}"
            )
        if not 0 < self.min_k_fraction <= 1:
            raise ConfigError(f"min_k_fraction must be above 0 and at most 1, got {self.min_k_fraction}")
        if self.mmlu_accuracy is not None and not 0 <= self.mmlu_accuracy <= 1:
            raise ConfigError(f"mmlu_accuracy must lie between 0 and 1, got {self.mmlu_accuracy}")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a result file."""
        return asdict(self)


@dataclass(slots=True)
class EvalContext:
    """Everything a metric may ask for. Scores, texts and results of other metrics are computed once and kept.

    Attributes:
        model, tokenizer: What is measured.
        splits: Name of the set ("forget", "retain", "holdout", "real_authors", "world_facts", or any) to examples.
        options: See `EvalOptions`.
        batch_size: Examples per forward pass; None = by device.
        retrained: The result of `evaluate` on the retrained model, or None.
        progress: Shows how far the passes are.
        results: Name of a metric to its result.
        has_warned_of_lengths: Every membership attack sees the same sets; one warning about them is enough.
        pass_timings_s: Seconds of each pass, such as "score/forget/answer" and "generate/forget+retain".
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    splits: Mapping[str, Sequence[QAExample]]
    options: EvalOptions = field(default_factory=EvalOptions)
    batch_size: int | None = None
    retrained: Mapping[str, Any] | None = None
    progress: Progress = field(default_factory=lambda: Progress(is_enabled=False))
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    pass_timings_s: dict[str, float] = field(default_factory=dict)
    has_warned_of_lengths: bool = False
    _encoded: dict[tuple[str, AnswerField], list[EncodedExample]] = field(default_factory=dict)
    _scores: dict[tuple[str, AnswerField], list[AnswerScores]] = field(default_factory=dict)
    _texts: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        resolve_template(self.tokenizer, self.options.template)
        for name, examples in self.splits.items():
            if not examples:
                raise RequestError(f"split {name!r} holds no example; leave it out or fill it")

    def split(self, name: str) -> Sequence[QAExample]:
        """Return a set that a metric needs; MetricUnavailableError if it was not given."""
        if name not in self.splits:
            raise MetricUnavailableError(f"needs the split {name!r}; given are {', '.join(self.splits)}")
        return self.splits[name]

    def result(self, metric: str) -> dict[str, Any]:
        """Return the result of another metric, computing it if need be."""
        if metric not in self.results:
            self.results[metric] = METRICS[metric].compute(self)
        return self.results[metric]

    def retrained_result(self, metric: str, *splits: str) -> Mapping[str, Any]:
        """Return a metric of the retrained model, after checking that it was measured on the same sets, shown alike."""
        if self.retrained is None:
            raise MetricUnavailableError(
                "needs retrained_logs: the result of evaluate() on a model trained without the forget set"
            )
        logs = self.retrained
        if metric not in logs.get("metrics", {}):
            raise MetricUnavailableError(
                f"needs {metric!r} in retrained_logs; evaluate the retrained model with it too"
            )
        for split in splits:
            if logs["digests"].get(f"split/{split}") != dataset_digest(self.split(split)):
                raise MetricUnavailableError(
                    f"needs retrained_logs of the same {split!r} examples; evaluate both models on the same sets"
                )
        for name, value in self.shown_as().items():
            if logs["settings"].get(name) != value:
                raise MetricUnavailableError(
                    f"needs retrained_logs made with {name}={value!r}, they have {logs['settings'].get(name)!r}; "
                    "evaluate both models with the same options"
                )
        result: Mapping[str, Any] = logs["metrics"][metric]
        return result

    def shown_as(self) -> dict[str, Any]:
        """Return the settings that must agree for two models' likelihoods to be comparable."""
        return {
            "resolved_template": resolve_template(self.tokenizer, self.options.template),
            "max_len": self.options.max_len,
        }

    def scores(self, split: str, which: AnswerField = "answer") -> list[AnswerScores]:
        """Score one kind of answer of a set; see `answers_of` for the order of "perturbed"."""
        key = (split, which)
        if key not in self._scores:
            encoded = self.encoded(split, which)
            with self._pass(f"score/{split}/{which}", len(encoded)) as advance:
                self._scores[key] = score_answers(
                    self.model,
                    encoded,
                    pad_id=pad_id_of(self.tokenizer),
                    batch_size=self.batch_size,
                    on_batch=advance,
                )
        return self._scores[key]

    def encoded(self, split: str, which: AnswerField = "answer") -> list[EncodedExample]:
        """Encode one kind of answer of a set."""
        key = (split, which)
        if key not in self._encoded:
            self._encoded[key] = encode_examples(
                self.tokenizer,
                answers_of(self.split(split), which),
                template=self.options.template,
                max_len=self.options.max_len,
            )
        return self._encoded[key]

    def texts(self, split: str) -> list[str]:
        """Return a greedy answer to every question of a set."""
        self.generate([split])
        return self._texts[split]

    def generate(self, splits: Iterable[str], max_new_tokens: Mapping[str, int] | None = None) -> None:
        """Answer every question of the sets that have no texts yet, all in one pass: `texts` then has them.

        A batch takes as long as its longest answer, whatever its size, so few large batches beat one pass per set.
        The continuation of a "completion" is cut to as many tokens as the true one has: it has no end of its own.

        Args:
            splits: Names of sets.
            max_new_tokens: Of each set; None = `EvalOptions.max_new_tokens` for all.
        """
        missing = [split for split in splits if split not in self._texts]
        prompts: list[list[int]] = []
        limits: list[int] = []
        for split in missing:
            longest = self.options.max_new_tokens if max_new_tokens is None else max_new_tokens[split]
            for item, example in zip(self.encoded(split), self.splits[split], strict=True):
                prompts.append(item.prompt_ids)
                limits.append(min(longest, len(item.answer_ids)) if example.kind == "completion" else longest)
        if not missing:
            return
        with self._pass(f"generate/{'+'.join(missing)}", len(prompts)) as advance:
            texts = iter(
                generate_texts(
                    self.model,
                    self.tokenizer,
                    prompts,
                    max_new_tokens=limits,
                    stop_token_ids=stop_token_ids_of(self.model, self.tokenizer, self.options.template),
                    batch_size=self.batch_size,
                    on_batch=advance,
                )
            )
        for split in missing:
            self._texts[split] = list(itertools.islice(texts, len(self.splits[split])))

    @contextlib.contextmanager
    def _pass(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        started = time.monotonic()
        with self.progress.task(name, total) as advance:
            yield advance
        self.pass_timings_s[name] = round(time.monotonic() - started, 3)


def answers_of(examples: Sequence[QAExample], which: AnswerField) -> list[QAExample]:
    """Return examples whose `answer` is the chosen kind.

    "paraphrased" falls back to the answer itself where there is no paraphrase, as TOFU does for real authors and
    world facts. "perturbed" gives one entry per wrong answer: all of the first example, then of the second, …
    """
    if which == "answer":
        return list(examples)
    if which == "paraphrased":
        return [replace(example, answer=example.paraphrased_answer or example.answer) for example in examples]
    return [replace(example, answer=wrong) for example in examples for wrong in example.perturbed_answers]


def mean_over_answers(context: EvalContext, value: Callable[[AnswerScores], float]) -> dict[str, Any]:
    """Return the result of a metric that looks at one answer at a time: the mean of `value` over each set."""
    return {
        "splits": {
            name: mean_over_examples(ids_of(examples), [value(scores) for scores in context.scores(name)])
            for name, examples in context.splits.items()
        }
    }


def ids_of(examples: Sequence[QAExample]) -> list[str]:
    """Return one different name per example: its id, or its place where there is none or it stands twice."""
    counts = Counter(example.example_id for example in examples)
    return [
        example.example_id if example.example_id and counts[example.example_id] == 1 else f"#{index}"
        for index, example in enumerate(examples)
    ]
