# SPDX-License-Identifier: Apache-2.0
"""Read examples from a file: one's own JSON lines, TOFU, LUME; or by name from the generator of fictitious people."""

import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lazyattention.errors import ConfigError, NotFoundError, RequestError
from lazyattention.unlearn.data.example import QAExample
from lazyattention.unlearn.data.people import generate_people
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

# Task 3 of LUME is about real people: it is read only if asked for.
DEFAULT_LUME_TASKS = ("Task1", "Task2")
_SUFFIXES = (".jsonl", ".json")
_OPTIONAL_FIELDS = (
    "paraphrased_question",
    "paraphrased_answer",
    "perturbed_answers",
    "perturbed_answer",
    "split",
    "example_id",
    "id",
    "group",
)
_FORMATS = (
    '{"question", "answer"} with optional "paraphrased_question", "paraphrased_answer", "perturbed_answers" '
    '(TOFU files are read as they are); {"prompt", "completion"}; {"text"}; LUME\'s {"id", "input", "output", "task"}'
)


def load_examples(
    path_or_name: str | Path,
    *,
    data_dir: str | Path | None = None,
    split: str | None = None,
    limit: int | None = None,
    lume_tasks: Collection[str] = DEFAULT_LUME_TASKS,
) -> list[QAExample]:
    """Read a list of examples.

    The format is told by the fields of the first record, and every record must have the same: question/answer
    (TOFU's files included), prompt/completion, text, or LUME's id/input/output/task. A file holds one JSON object
    per line, or one JSON array. Without ids, examples are named after file and line.

    Args:
        path_or_name: A file; or a name: "people/forget", "people/retain", "people/holdout" (fictitious people made
            at run time, options as in "people/forget?num_people=40&seed=1"), or the name of a file in `data_dir`
            without its suffix, such as "tofu_forget10".
        data_dir: Where named files are looked for.
        split: What to write into `QAExample.split`; None keeps the record's own or takes the file's name.
        limit: Read only the first `limit` examples.
        lume_tasks: Which sub-tasks of a LUME file to keep. Task 3 is about real people and left out by default.

    Raises:
        NotFoundError: No such file or name.
        RequestError: A record is not as it should be; the message names file, line and field.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}; leave it out to read everything")
    if str(path_or_name).startswith("people/"):
        examples = _load_people(str(path_or_name))
    else:
        path = _find_file(path_or_name, data_dir)
        examples = _load_file(path, split, lume_tasks)
    if not examples:
        raise RequestError(f"{path_or_name} holds no example; check the file, or lume_tasks for a LUME file")
    return examples[:limit]


def _find_file(path_or_name: str | Path, data_dir: str | Path | None) -> Path:
    path = Path(path_or_name).expanduser()
    if path.is_file():
        return path
    if data_dir is not None:
        for suffix in ("", *_SUFFIXES):
            candidate = Path(data_dir) / f"{path_or_name}{suffix}"
            if candidate.is_file():
                return candidate
    where = f" nor a file in {data_dir}" if data_dir is not None else ""
    raise NotFoundError(
        f"{str(path_or_name)!r} is not a file{where}; give a .jsonl file, or 'people/forget', 'people/retain' or "
        "'people/holdout' for made-up people"
    )


def _load_people(name: str) -> list[QAExample]:
    split, _, query = name.removeprefix("people/").partition("?")
    allowed: dict[str, Callable[[str], Any]] = {
        "num_people": int,
        "seed": int,
        "num_facts": int,
        "forget_fraction": float,
        "holdout_fraction": float,
    }
    options: dict[str, Any] = {}
    for pair in filter(None, query.split("&")):
        key, _, value = pair.partition("=")
        if key not in allowed:
            raise RequestError(f"{name!r} has the unknown option {key!r}; allowed: {', '.join(allowed)}")
        try:
            options[key] = allowed[key](value)
        except ValueError:
            raise RequestError(f"option {key!r} of {name!r} must be a number, got {value!r}") from None
    splits = generate_people(**{"num_people": 40, "seed": 0, **options})
    if split not in splits:
        raise NotFoundError(f"{name!r} names no split of the generated people; there are: {', '.join(splits)}")
    return splits[split]


def _load_file(path: Path, split: str | None, lume_tasks: Collection[str]) -> list[QAExample]:
    examples: list[QAExample] = []
    seen_ids: dict[str, str] = {}
    reader: Callable[[Mapping[str, Any], str], QAExample | None] | None = None
    for where, record in _records(path):
        if reader is None:
            reader = _reader_for(record, where, lume_tasks)
        example = reader(record, where)
        if example is None:
            continue
        example_id = example.example_id or f"{path.stem}:{where.rpartition(' ')[2]}"
        if example_id in seen_ids:
            raise RequestError(
                f"{where}: id {example_id!r} stands already in {seen_ids[example_id]}; ids must be unique in a file"
            )
        seen_ids[example_id] = where
        examples.append(replace(example, example_id=example_id, split=split or example.split or path.stem))
    return examples


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield `("<file>, line <n>", record)`; for a JSON array `("<file>, item <n>", record)`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except json.JSONDecodeError as error:
            raise RequestError(
                f"{path}, line {error.lineno}: not valid JSON ({error.msg}, column {error.colno})"
            ) from error
        numbered = [(f"{path}, item {number}", item) for number, item in enumerate(items, 1)]
    else:
        numbered = []
        # Not splitlines(): it also cuts at U+2028 and its like, which JSON strings may hold.
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                numbered.append((f"{path}, line {number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise RequestError(
                    f"{path}, line {number}: not valid JSON ({error.msg}, column {error.colno}); "
                    "write one JSON object per line, or one JSON array"
                ) from error
    for where, item in numbered:
        if not isinstance(item, dict):
            raise RequestError(f"{where}: expected a JSON object, got {type(item).__name__}; known records: {_FORMATS}")
        yield where, item


def _reader_for(
    record: Mapping[str, Any], where: str, lume_tasks: Collection[str]
) -> Callable[[Mapping[str, Any], str], QAExample | None]:
    if "question" in record:
        return _read_qa
    if "prompt" in record:
        return _read_prompt_completion
    if {"input", "output", "task"} <= record.keys():
        return lambda item, place: _read_lume(item, place, lume_tasks)
    if "text" in record:
        return _read_text
    raise RequestError(f"{where}: fields {sorted(record)} are of no known record; known: {_FORMATS}")


def _read_qa(record: Mapping[str, Any], where: str) -> QAExample:
    _check_spelling(record, where, ("question", "answer", *_OPTIONAL_FIELDS))
    wrong: list[str] = []
    for name in ("perturbed_answers", "perturbed_answer"):
        value = record.get(name)
        if value is None:
            continue
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) and item.strip() for item in values):
            raise RequestError(f"{where}: field {name!r} must be a list of non-empty strings, got {value!r}")
        wrong.extend(values)
    return QAExample(
        question=_text(record, "question", where),
        answer=_text(record, "answer", where),
        paraphrased_question=_optional_text(record, "paraphrased_question", where),
        paraphrased_answer=_optional_text(record, "paraphrased_answer", where),
        perturbed_answers=tuple(wrong),
        split=_optional_text(record, "split", where) or "",
        example_id=_id_of(record, where),
        group=_optional_text(record, "group", where) or "",
    )


def _read_prompt_completion(record: Mapping[str, Any], where: str) -> QAExample:
    _check_spelling(record, where, ("prompt", "completion", "split", "example_id", "id", "group"))
    return QAExample(
        question=_text(record, "prompt", where),
        answer=_text(record, "completion", where),
        split=_optional_text(record, "split", where) or "",
        example_id=_id_of(record, where),
        kind="completion",
        group=_optional_text(record, "group", where) or "",
    )


def _read_text(record: Mapping[str, Any], where: str) -> QAExample:
    return QAExample(
        question="",
        answer=_text(record, "text", where),
        split=_optional_text(record, "split", where) or "",
        example_id=_id_of(record, where),
        kind="completion",
        group=_optional_text(record, "group", where) or "",
    )


def _read_lume(record: Mapping[str, Any], where: str, tasks: Collection[str]) -> QAExample | None:
    task = _text(record, "task", where)
    if task not in tasks:
        return None
    # Ids end in "sc1" (sentence completion) or "qa0" (question and answer); some hold stray quotation marks.
    example_id = _text(record, "id", where).replace('"', "")
    stem = example_id.rstrip("0123456789")
    if not stem.endswith(("sc", "qa")):
        raise RequestError(f"{where}: LUME id {example_id!r} must end in 'sc<number>' or 'qa<number>'")
    return QAExample(
        question=_text(record, "input", where),
        answer=_text(record, "output", where),
        example_id=example_id,
        kind="completion" if stem.endswith("sc") else "qa",
        group=task,
    )


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    if field not in record:
        near = difflib.get_close_matches(field, record, n=1)
        hint = f"; did you mean it by {near[0]!r}?" if near else ""
        raise RequestError(f"{where}: field {field!r} is missing, the record has {sorted(record)}{hint}")
    value = record[field]
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{where}: field {field!r} must be a non-empty string, got {value!r}")
    return value


def _optional_text(record: Mapping[str, Any], field: str, where: str) -> str | None:
    return None if record.get(field) is None else _text(record, field, where)


def _id_of(record: Mapping[str, Any], where: str) -> str:
    for field in ("example_id", "id"):
        value = record.get(field)
        if value is None:
            continue
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise RequestError(f"{where}: field {field!r} must be a string or a whole number, got {value!r}")
        return str(value)
    return ""


def _check_spelling(record: Mapping[str, Any], where: str, known: tuple[str, ...]) -> None:
    """Other fields are allowed and ignored, but not one that looks like a misspelt field of ours."""
    for field in record.keys() - set(known):
        near = [name for name in difflib.get_close_matches(field, known, n=1, cutoff=0.85) if name not in record]
        if near:
            raise RequestError(f"{where}: unknown field {field!r}; did you mean {near[0]!r}?")
