# SPDX-License-Identifier: Apache-2.0
"""What is to be measured: the options of a run."""

from dataclasses import dataclass, field
from pathlib import Path

from lazyattention.quality.measure import MeasureConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRequest:
    """What is to be measured.

    Attributes:
        data: Built-in sets ("nq:PATH"), JSONL files of questions, or files and folders of documents to ask about.
        output: Folder for records, report and plot.
        documents: Where questions without documents of their own look for them, by BM25.
        num_documents: Documents per question, each value a set of its own; for JSONL with documents of no effect.
        num_questions: At most so many per set.
        seed: Of drawn questions and documents.
        config: How questions are asked.
        against: Output folder of another run over the same data; its full attention is compared with, too.
        with_plot: Draw plot.png.
        with_gate: Remember the loss for `max_loss`.
        progress: Say how far it is: bars on a terminal, else lines now and then.
    """

    data: tuple[str, ...]
    output: Path
    documents: tuple[Path, ...] = ()
    num_documents: tuple[int, ...] = (10,)
    num_questions: int = 200
    seed: int = 0
    config: MeasureConfig = field(default_factory=MeasureConfig)
    against: Path | None = None
    with_plot: bool = True
    with_gate: bool = True
    progress: bool = True
