# SPDX-License-Identifier: Apache-2.0
"""What is to be adapted to: the options of a run."""

from dataclasses import dataclass, field
from pathlib import Path

from lazyattention.adapt.config import AdaptConfig
from lazyattention.quality.measure import SHORT_ANSWERS

DEFAULT_DISTRACTORS = "similar"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptRequest:
    """What to adapt to.

    Attributes:
        data: Built-in sets ("nq-train:PATH"), JSONL with questions and documents, or files and folders of documents.
        output: Folder of the adapter and of all that is needed to go on.
        num_questions: At most so many per source: one number for all, or one for each of `data`, in order.
        num_documents: Documents per question: the range (low, high) to draw from; built-in sets take turns within it.
        distractors: Of questions that the model writes: which documents stand beside the one it is about, "random" or
            "similar" (see `write_questions`).
        system: System message; empty = none.
        max_tokens: Longest answer.
        config: How to train.
        progress: Say how far it is: bars on a terminal, else lines now and then.
    """

    data: tuple[str, ...]
    output: Path
    num_questions: int | tuple[int, ...] = 1000
    num_documents: tuple[int, int] = (5, 10)
    distractors: str = DEFAULT_DISTRACTORS
    system: str = SHORT_ANSWERS
    max_tokens: int = 32
    config: AdaptConfig = field(default_factory=AdaptConfig)
    progress: bool = True

    def num_questions_of(self, source: str) -> int:
        """Return how many prompts an entry of `data` gives at most."""
        if isinstance(self.num_questions, int):
            return self.num_questions
        return self.num_questions[self.data.index(source)]
