# SPDX-License-Identifier: Apache-2.0
"""Built-in data sets by name: two public ones from files at hand, two generated ones that need no file.

A data set is one function: add it here and register it. The same arguments always give the same examples.
"""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyattention.documents.document import Document
from lazyattention.errors import ConfigError
from lazyattention.quality.examples import QualityExample
from lazyattention.quality.metrics import normalize
from lazyattention.quality.synthetic import needle_examples, two_hop_examples
from lazyattention.utils.registry import Registry

# Questions of a file that are asked in tests; the others may be trained on. Their passages are distractors apart, too.
_NUM_TEST_QUESTIONS = 1000
_SPLIT_SEED = 7


@dataclass(frozen=True, slots=True)
class Dataset:
    """How examples are made.

    Attributes:
        build: `(path, num_documents, num_questions, seed) -> examples`; `path` is None for generated sets.
        needs_file: True if a file must be named: `name:path`.
        summary: One line for `--help`.
    """

    build: Callable[[Path | None, int, int, int], list[QualityExample]]
    needs_file: bool
    summary: str


DATASETS: Registry[Dataset] = Registry("data set")


def build_dataset(spec: str, *, num_documents: int, num_questions: int, seed: int = 0) -> list[QualityExample]:
    """Make the examples of a built-in set.

    Args:
        spec: "name" or "name:path".
        num_documents: Per question.
        num_questions: At most; a file may hold fewer.
        seed: Of the choice of questions, distractors and their order.

    Raises:
        ConfigError: There is no such set, or its file is missing or of another form.
    """
    dataset, path = find_dataset(spec)
    if num_documents < 1 or num_questions < 1:
        raise ConfigError(
            f"data set {spec!r}: num_documents and num_questions must be at least 1, got {num_documents}, {num_questions}"
        )
    examples = dataset.build(path, num_documents, num_questions, seed)
    if not examples:
        raise ConfigError(f"data set {spec!r} gives no questions; its file must hold some")
    return examples


def find_dataset(spec: str) -> tuple[Dataset, Path | None]:
    """Return the built-in set that "name" or "name:path" names, and its file.

    Raises:
        ConfigError: There is no such set, or its file is missing.
    """
    name, _, file = spec.partition(":")
    dataset = DATASETS[name]
    if dataset.needs_file != bool(file):
        need = f"a file: {name}:PATH" if dataset.needs_file else f"no file; write {name}"
        raise ConfigError(f"data set {spec!r}: {name} takes {need}")
    path = Path(file).expanduser() if file else None
    if path is not None and not path.is_file():
        raise ConfigError(f"data file {path} cannot be read: it is no file; give the path of the file itself")
    return dataset, path


def is_builtin(spec: str) -> bool:
    """Whether `spec` names a built-in set and not a path."""
    return spec.partition(":")[0] in DATASETS


def _nq(split: str) -> Callable[[Path | None, int, int, int], list[QualityExample]]:
    def build(path: Path | None, num_documents: int, num_questions: int, seed: int) -> list[QualityExample]:
        assert path is not None
        try:
            rows = [json.loads(line) for line in _read_text(path).split("\n") if line.strip()]
            pool = [(row["question"], tuple(row["answers"]), row["ctxs"][0]) for row in rows]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} is not of the form of nq-open-oracle.jsonl.gz (question, answers, ctxs): {error!r}"
            ) from error
        random.Random(_SPLIT_SEED).shuffle(pool)
        tested, pool = pool[:_NUM_TEST_QUESTIONS], pool[_NUM_TEST_QUESTIONS:]
        if split == "test":
            pool = tested
        else:
            # Several questions share an article; what is tested must not be trained on, passages included.
            titles = {gold["title"] for _, _, gold in tested}
            pool = [row for row in pool if row[2]["title"] not in titles]
        draw = random.Random(f"nq {split} {num_documents} {seed}")
        examples = []
        for index, (question, answers, gold) in enumerate(pool[:num_questions]):
            others = _distractors(pool, index, answers, num_documents - 1, draw)
            place = draw.randrange(len(others) + 1)
            passages = [*others[:place], gold, *others[place:]]
            documents = tuple(Document(p["text"], title=p["title"]) for p in passages)
            examples.append(QualityExample(f"nq-{split}-{index}", question, documents, answers, (place,)))
        return examples

    return build


def _distractors(
    pool: Sequence[tuple[str, tuple[str, ...], dict[str, Any]]],
    index: int,
    answers: Sequence[str],
    wanted: int,
    draw: random.Random,
) -> list[dict[str, Any]]:
    """Other questions' gold passages, none of which holds an answer, no passage twice."""
    words = [normalize(answer) for answer in answers]
    found: list[dict[str, Any]] = []
    seen = {pool[index][2]["text"]}
    for candidate in draw.sample(range(len(pool)), len(pool)):
        if len(found) == wanted:
            break
        passage = pool[candidate][2]
        text = f" {normalize(passage['text'])} "
        if passage["text"] in seen or any(word and f" {word} " in text for word in words):
            continue
        seen.add(passage["text"])
        found.append(passage)
    return found


def _hotpotqa(path: Path | None, num_documents: int, num_questions: int, seed: int) -> list[QualityExample]:
    assert path is not None
    try:
        rows = json.loads(_read_text(path))
        examples = [
            _hotpotqa_example(row, num_documents, random.Random(f"hotpotqa {num_documents} {seed} {index}"))
            for index, row in enumerate(rows[:num_questions])
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not of HotpotQA's distractor form (question, answer, context, supporting_facts): {error!r}"
        ) from error
    return examples


def _hotpotqa_example(row: dict[str, Any], num_documents: int, draw: random.Random) -> QualityExample:
    titles = {title for title, _ in row["supporting_facts"]}
    places = list(range(len(row["context"])))
    gold = [place for place in places if row["context"][place][0] in titles]
    others = [place for place in places if place not in gold]
    kept = sorted(gold + draw.sample(others, min(len(others), max(0, num_documents - len(gold)))))
    documents = tuple(Document("".join(row["context"][p][1]), title=row["context"][p][0]) for p in kept)
    gold_documents = tuple(kept.index(place) for place in gold)
    return QualityExample(f"hotpotqa-{row['_id']}", row["question"], documents, (row["answer"],), gold_documents)


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"data file {path} cannot be read: {error}; give the path of the file itself") from error


DATASETS.register("nq", Dataset(_nq("test"), True, "Natural Questions, one gold passage among random others"))
DATASETS.register("nq-train", Dataset(_nq("train"), True, "the same file's other questions, for training"))
DATASETS.register("hotpotqa", Dataset(_hotpotqa, True, "HotpotQA, two gold paragraphs among distractors"))
DATASETS.register(
    "needle",
    Dataset(lambda _, d, q, seed: needle_examples(d, q, seed), False, "one fact among like ones, at every depth"),
)
DATASETS.register(
    "two_hop",
    Dataset(lambda _, d, q, seed: two_hop_examples(d, q, seed), False, "two facts in two documents must be joined"),
)
