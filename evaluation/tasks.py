# SPDX-License-Identifier: Apache-2.0
"""The question-answering tasks that evaluations run: name -> data set, documents per question, number of questions."""

from dataclasses import dataclass
from pathlib import Path

from lazyattention.quality.datasets import build_dataset
from lazyattention.quality.examples import QualityExample
from lazyattention.utils.registry import Registry


@dataclass(frozen=True, slots=True)
class Task:
    """One set of questions.

    Attributes:
        dataset: Name of a built-in data set.
        file: Its file inside the data folder; None for generated sets.
        num_documents: Per question.
        num_questions: In the full evaluation.
        max_chunk_len: Longer documents are stored as several chunks, tokens.
    """

    dataset: str
    file: str | None
    num_documents: int
    num_questions: int
    max_chunk_len: int = 1024

    def examples(self, data_folder: Path, num_questions: int | None = None) -> list[QualityExample]:
        """Build the questions, always the same ones; fewer if asked for."""
        spec = self.dataset if self.file is None else f"{self.dataset}:{data_folder / self.file}"
        return build_dataset(
            spec,
            num_documents=self.num_documents,
            num_questions=min(self.num_questions, num_questions or self.num_questions),
        )


TASKS: Registry[Task] = Registry("task")
for _name, _task in {
    "nq-10": Task("nq", "nq-open-oracle.jsonl.gz", 10, 1000),
    "nq-1": Task("nq", "nq-open-oracle.jsonl.gz", 1, 1000),
    "nq-5": Task("nq", "nq-open-oracle.jsonl.gz", 5, 1000),
    "nq-40": Task("nq", "nq-open-oracle.jsonl.gz", 40, 1000),
    "nq-10-chunk-64": Task("nq", "nq-open-oracle.jsonl.gz", 10, 1000, max_chunk_len=64),
    "nq-20": Task("nq", "nq-open-oracle.jsonl.gz", 20, 1000),
    "hotpotqa-10": Task("hotpotqa", "hotpotqa_100.json", 10, 100),
    "needle-10": Task("needle", None, 10, 200),
    "two_hop-10": Task("two_hop", None, 10, 200),
}.items():
    TASKS.register(_name, _task)
