# SPDX-License-Identifier: Apache-2.0
"""One thing to forget, to keep or to test with: a question with its answer, or a text."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lazyattention.errors import RequestError

ExampleKind = Literal["qa", "completion"]


@dataclass(frozen=True, slots=True)
class QAExample:
    """A question and its answer, or a text and its continuation.

    Attributes:
        question: What the model is asked; for `kind="completion"` the text before the continuation, possibly empty.
        answer: What it should (or should no longer) say. Never empty.
        paraphrased_question: The same question in other words.
        paraphrased_answer: The same answer in other words; the truth ratio compares it with `perturbed_answers`.
        perturbed_answers: Wrong answers in the wording of `paraphrased_answer`.
        split: Which set it came from, for example "forget" or "forget10". Free text.
        example_id: Names the example in results. Unique within one list.
        kind: "qa" is wrapped in a prompt template; "completion" is fed to the model as it stands.
        group: Sub-task within the set ("Task1" of LUME); empty if there are none.
    """

    question: str
    answer: str
    paraphrased_question: str | None = None
    paraphrased_answer: str | None = None
    perturbed_answers: tuple[str, ...] = ()
    split: str = ""
    example_id: str = ""
    kind: ExampleKind = "qa"
    group: str = ""

    def __post_init__(self) -> None:
        if not self.answer.strip():
            raise RequestError(f"answer of example {self.example_id!r} is empty; give the text to learn or to forget")
        if self.kind not in ("qa", "completion"):
            raise RequestError(f"kind must be 'qa' or 'completion', got {self.kind!r} in example {self.example_id!r}")
        if self.kind == "qa" and not self.question.strip():
            raise RequestError(
                f"question of example {self.example_id!r} is empty; give one, or use kind='completion' for plain text"
            )


def dataset_digest(examples: Iterable[QAExample]) -> str:
    """Fingerprint a list of examples: every field of every example, in order. 32 hexadecimal digits."""
    h = hashlib.blake2b(digest_size=16)
    for example in examples:
        fields = (
            example.question,
            example.answer,
            example.paraphrased_question or "",
            example.paraphrased_answer or "",
            *example.perturbed_answers,
            example.split,
            example.example_id,
            example.kind,
            example.group,
        )
        h.update(len(fields).to_bytes(4, "little"))
        for field in fields:
            raw = field.encode()
            h.update(len(raw).to_bytes(8, "little") + raw)
    return h.hexdigest()


def find_overlap(first: Sequence[QAExample], second: Sequence[QAExample]) -> list[tuple[str, str]]:
    """Find examples that stand in both lists: same question and answer but for case and white space.

    A forget set that overlaps the retain set asks for two opposite things, and a hold-out set that overlaps
    either makes membership attacks meaningless.

    Returns:
        Pairs `(example_id in first, example_id in second)`.
    """

    def key(example: QAExample) -> tuple[str, str]:
        return " ".join(example.question.lower().split()), " ".join(example.answer.lower().split())

    known: dict[tuple[str, str], str] = {}
    for example in second:
        known.setdefault(key(example), example.example_id)
    return [(example.example_id, known[key(example)]) for example in first if key(example) in known]
