# SPDX-License-Identifier: Apache-2.0
"""Questions over documents, as the measurement takes them, and the JSONL they are read from."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyattention.documents.document import Document
from lazyattention.errors import ConfigError, RequestError
from lazyattention.utils.hashing import digest_fields

_FIELDS = ("question", "documents", "answers", "answer", "gold_documents", "id")


@dataclass(frozen=True, slots=True)
class QualityExample:
    """One question and the documents it is asked over, in prompt order.

    Attributes:
        id: Unique within a data set; pairs records of different runs.
        question: What is asked.
        documents: At least one.
        answers: Gold answers, any of which is right; empty = none known.
        gold_documents: Indices of the documents that hold the answer; empty = not known.
    """

    id: str
    question: str
    documents: tuple[Document, ...]
    answers: tuple[str, ...] = ()
    gold_documents: tuple[int, ...] = ()

    @property
    def gold_position(self) -> str | None:
        """Where the (first) gold document stands: "first", "middle", "last"; None if unknown or there is one document."""
        if not self.gold_documents or len(self.documents) < 2:
            return None
        place = self.gold_documents[0]
        return "first" if place == 0 else "last" if place == len(self.documents) - 1 else "middle"

    def to_dict(self) -> dict[str, Any]:
        """As a line of JSONL that `read_examples` reads."""
        documents = [
            {key: value for key, value in (("text", d.text), ("id", d.id), ("title", d.title)) if value is not None}
            for d in self.documents
        ]
        return {
            "id": self.id,
            "question": self.question,
            "documents": documents,
            "answers": list(self.answers),
            "gold_documents": list(self.gold_documents),
        }


def read_examples(
    path: Path, find_documents: Callable[[str], tuple[Document, ...]] | None = None
) -> list[QualityExample]:
    """Read JSONL: one object per line with `question`, `documents`, and optionally `answers`, `gold_documents`, `id`.

    `documents` are strings or objects with `text`, `title`, `id`; `gold_documents` are indices into them, or ids.

    Args:
        path: The file.
        find_documents: From a question to its documents, for lines without `documents`.

    Raises:
        ConfigError: The file cannot be read, a line is not such an object, or two have the same id.
    """
    examples = []
    places: dict[str, int] = {}
    for number, fields in read_lines(path):
        example = parse_example(fields, f"{path}, line {number}", str(number), find_documents)
        if example.id in places:
            raise ConfigError(
                f"{path}, line {number}: id {example.id!r} is that of line {places[example.id]}; give each line an 'id' of "
                "its own, or none"
            )
        places[example.id] = number
        examples.append(example)
    return examples


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of a JSONL file with their line numbers; blank lines are left out.

    Raises:
        ConfigError: The file cannot be read, is empty, or a line is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; expected a JSONL file in UTF-8") from error
    found = []
    # Not splitlines(): a text may hold other line ends of Unicode, which JSON need not escape.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            # Its own text counts lines anew.
            reason = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            raise ConfigError(f"{path}, line {number} is not JSON: {reason}; write one object per line") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}, line {number} is a {type(fields).__name__}; write one object per line")
        found.append((number, fields))
    if not found:
        raise ConfigError(f"{path} holds no questions; write one JSON object with 'question' per line")
    return found


def parse_example(
    fields: Mapping[str, Any],
    where: str,
    default_id: str,
    find_documents: Callable[[str], tuple[Document, ...]] | None = None,
) -> QualityExample:
    """Make an example of one line's fields; `where` names the line in errors.

    Raises:
        ConfigError: A field is missing, unknown or of another form.
    """
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise ConfigError(f"{where}: unknown field(s) {', '.join(unknown)}; allowed: {', '.join(_FIELDS)}")
    _check_text(fields, where)
    question = fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ConfigError(f"{where}: 'question' must be a non-empty string, got {question!r:.80}")
    if "documents" in fields or find_documents is None:
        documents = _documents(fields, where)
    elif fields.get("gold_documents"):
        raise ConfigError(
            f"{where}: 'gold_documents' name some of the line's 'documents', and it has none; leave them out"
        )
    else:
        documents = find_documents(question)
    answers = read_answers(fields, where)
    gold = _gold(fields.get("gold_documents"), documents, where)
    return QualityExample(_id(fields, where, default_id), question, documents, answers, gold)


def digest_examples(examples: Sequence[QualityExample]) -> str:
    """Equal exactly for the same questions over the same documents, in the same order."""
    return digest_fields([json.dumps(example.to_dict(), sort_keys=True) for example in examples]).hex()


def _check_text(fields: Mapping[str, Any], where: str) -> None:
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where} holds half of a surrogate pair ({error.object[error.start]!a}), which is no character; write both "
            "halves, or the character itself"
        ) from error


def _id(fields: Mapping[str, Any], where: str, default_id: str) -> str:
    given = fields.get("id")
    if given is None:
        return default_id
    if not isinstance(given, str | int) or isinstance(given, bool) or given == "":
        raise ConfigError(f"{where}: 'id' must be a non-empty string or a whole number, got {given!r:.80}")
    return str(given)


def _documents(fields: Mapping[str, Any], where: str) -> tuple[Document, ...]:
    if "documents" not in fields:
        raise ConfigError(
            f"{where} has no 'documents'; add them, or let `lazyattention quality` look for them in a folder that you name "
            "with --documents"
        )
    documents = fields["documents"]
    if not isinstance(documents, list) or not documents:
        raise ConfigError(
            f"{where}: 'documents' must be a non-empty list of strings or objects with 'text', got {documents!r:.80}"
        )
    try:
        return tuple(Document.of(document) for document in documents)
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_answers(fields: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return `answers` (a list) or `answer` (one string) of a line; ConfigError if they are something else."""
    given = fields.get("answers", [fields["answer"]] if fields.get("answer") is not None else [])
    if not isinstance(given, list) or not all(isinstance(answer, str) for answer in given):
        raise ConfigError(f"{where}: 'answers' must be a list of strings, got {given!r:.80}")
    return tuple(answer for answer in given if answer.strip())


def _gold(given: object, documents: Sequence[Document], where: str) -> tuple[int, ...]:
    if given is None:
        return ()
    ids = [document.document_id for document in documents]
    places = []
    for item in given if isinstance(given, list) else [given]:
        if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < len(documents):
            places.append(item)
        elif isinstance(item, str) and item in ids:
            places += [place for place, document_id in enumerate(ids) if document_id == item]
        else:
            raise ConfigError(
                f"{where}: 'gold_documents' holds {item!r:.80}; allowed are indices below {len(documents)} and ids of "
                "this line's documents"
            )
    return tuple(places)
