# SPDX-License-Identifier: Apache-2.0
"""From what the user names as data to questions over documents: read, built, or written by the model."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from lazyattention.config import ChunkOptions
from lazyattention.documents.document import Document
from lazyattention.documents.readers import read_documents
from lazyattention.documents.retrieval import BM25Retriever
from lazyattention.engine.engine import Engine
from lazyattention.errors import ConfigError
from lazyattention.quality.datasets import build_dataset, find_dataset, is_builtin
from lazyattention.quality.examples import QualityExample, digest_examples, read_examples, read_lines
from lazyattention.quality.measure import RUN_NAME, answer_token_ids, layout_of
from lazyattention.quality.options import REUSE_METHOD
from lazyattention.quality.output import is_kept, write_whole
from lazyattention.quality.progress import progress_bar
from lazyattention.quality.questions import passages_of, write_questions
from lazyattention.quality.request import QualityRequest
from lazyattention.reuse import REUSE_METHODS
from lazyattention.utils.hashing import digest_fields
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

QUESTIONS_NAME = "questions.jsonl"
ASKED_NAME = "asked.json"
"""What QUESTIONS_NAME depends on."""


def check_data(request: QualityRequest) -> None:
    """Refuse what can be seen to be wrong before a model is loaded.

    Raises:
        ConfigError: Data is missing, malformed, or gives two sets of one name.
    """
    if not request.data:
        raise ConfigError("no data was given; name a built-in set, a JSONL file or a folder of documents")
    sources: dict[str, str] = {}
    are_documents_used = False
    for path in request.documents:
        if not path.exists():
            raise ConfigError(f"documents {str(path)!r} does not exist; name a file or folder with text")
    for source in request.data:
        check_source(source, "JSONL with questions, a folder of documents, or nq:PATH, hotpotqa:PATH, needle, two_hop")
        if is_jsonl(source):
            path = Path(source).expanduser()
            are_documents_used |= any("documents" not in fields for _, fields in read_lines(path))
            read_examples(path, (lambda _: ()) if request.documents else None)
        for name in _set_names(source, request):
            if name in sources:
                raise ConfigError(
                    f"data {sources[name]!r} and {source!r} both make a set {name!r}; leave one out, rename it, or measure it "
                    "in a run with another output folder"
                )
            sources[name] = source
    if request.documents and not are_documents_used:
        raise ConfigError(
            f"documents {', '.join(map(str, request.documents))} are for JSONL questions that bring none, and there are no "
            "such lines; leave them out"
        )


def check_source(source: str, expected: str) -> None:
    """Refuse what is neither a built-in set nor a path; `expected` is what may be given.

    Raises:
        ConfigError: It is neither, or the built-in set's file is missing.
    """
    if is_builtin(source):
        find_dataset(source)
    elif not Path(source).expanduser().exists():
        raise ConfigError(f"data {source!r} is neither a path nor a built-in set; give {expected}")


def is_jsonl(source: str) -> bool:
    """Whether data is a file with a question a line."""
    return not is_builtin(source) and Path(source).suffix == ".jsonl"


def _set_names(source: str, request: QualityRequest) -> list[str]:
    if is_jsonl(source):
        return [Path(source).stem]
    name = source.partition(":")[0] if is_builtin(source) else Path(source).stem or "documents"
    return [f"{name}-{count}" for count in request.num_documents]


def collect_examples(engine: Engine, source: str, request: QualityRequest) -> list[tuple[str, list[QualityExample]]]:
    """Return the sets a source gives: name and examples. Questions the model writes are kept in the output folder.

    Raises:
        ConfigError: The source cannot be read, or questions kept earlier are of another run.
    """
    names = _set_names(source, request)
    if is_builtin(source):
        return [
            (
                name,
                build_dataset(source, num_documents=count, num_questions=request.num_questions, seed=request.seed),
            )
            for name, count in zip(names, request.num_documents, strict=True)
        ]
    path = Path(source).expanduser()
    if is_jsonl(source):
        finder = _finder(request) if request.documents else None
        return [(names[0], read_examples(path, finder)[: request.num_questions])]
    if request.against is not None:
        return [(name, _questions_of(request.against, name)[: request.num_questions]) for name in names]
    passages = passages_of(read_all((path,)), engine)
    return [
        (name, _own_questions(engine, passages, request.output / name, count, request))
        for name, count in zip(names, request.num_documents, strict=True)
    ]


def _finder(request: QualityRequest) -> Callable[[str], tuple[Document, ...]]:
    retriever = BM25Retriever(read_all(request.documents))

    def find(question: str) -> tuple[Document, ...]:
        return tuple(item.document for item in retriever.retrieve(question, max(request.num_documents)))

    return find


def _own_questions(
    engine: Engine, passages: Sequence[Document], folder: Path, num_documents: int, request: QualityRequest
) -> list[QualityExample]:
    kept, asked = folder / QUESTIONS_NAME, folder / ASKED_NAME
    run = {
        "weights_id": engine.loaded.weights_id,
        "passages": digest_fields([json.dumps([p.document_id, p.title, p.text]) for p in passages]).hex(),
        "num_questions": request.num_questions,
        "num_documents": num_documents,
        "seed": request.seed,
    }
    if is_kept(kept, asked, run):
        return read_examples(kept)
    with progress_bar(
        f"writing questions {folder.name}", request.num_questions, is_enabled=request.progress
    ) as advance:
        examples = write_questions(
            engine,
            passages,
            num_questions=request.num_questions,
            num_documents=num_documents,
            seed=request.seed,
            on_done=advance,
        )
    write_whole(kept, [json.dumps(example.to_dict(), ensure_ascii=False) + "\n" for example in examples])
    return examples


def _questions_of(other: Path, name: str) -> list[QualityExample]:
    """What another run's model asked: another model, such as an adapted one, would ask other questions."""
    path = other / name / QUESTIONS_NAME
    if not path.exists():
        held = sorted(kept.parent.name for kept in other.glob(f"*/{QUESTIONS_NAME}"))
        raise ConfigError(
            f"against: {path} is not there ({other} holds {', '.join(held) or 'no questions of a model'}); give the data and "
            "the number of documents of that run"
        )
    return read_examples(path)


def check_same_questions(other: Path, name: str, examples: Sequence[QualityExample]) -> None:
    """Refuse to compare runs question by question that did not ask the same.

    Raises:
        ConfigError: The run in the folder `other` has no such set, or one of other questions.
    """
    path = other / name / RUN_NAME
    try:
        known = json.loads(path.read_text(encoding="utf-8"))["examples"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"against: {path} describes no run ({error}); name the output folder of a run over the same data"
        ) from error
    if known != digest_examples(examples):
        raise ConfigError(
            f"against: {other / name} is a run over other questions; give the same data, number of documents, number of "
            "questions and seed"
        )


def refuse_too_long(
    engine: Engine,
    examples: Sequence[QualityExample],
    *,
    system: str,
    max_tokens: int,
    chunk_options: Sequence[ChunkOptions] = (),
) -> None:
    """Find prompts that do not fit, with full attention or any of the chunk options, before the first one is asked.

    Raises:
        ConfigError: One does not.
    """
    chunkings = [engine.prompts.chunking(options) for options in chunk_options]
    for example in examples:
        layout = layout_of(engine, example, system)
        plans = [REUSE_METHODS[REUSE_METHOD].plan(layout, chunking) for chunking in chunkings]
        num_prompt = max([layout.num_tokens, *(plan.num_positions for plan in plans)])
        num_gold = len(answer_token_ids(engine, layout, example.answers[0])) if example.answers else 0
        num_answer = max(max_tokens, num_gold)
        if num_prompt + num_answer > engine.max_model_len:
            raise ConfigError(
                f"question {example.id!r} has {num_prompt} tokens with its documents ({len(example.documents)}), "
                f"and its answer up to {num_answer}, but max_model_len is {engine.max_model_len}; give fewer documents "
                "(num_documents) or shorter ones, or leave the question out"
            )


def read_all(paths: Sequence[Path]) -> list[Document]:
    """Read documents; says in the log what was left out.

    Raises:
        NotFoundError: A path does not exist.
        RequestError: There is no document.
    """
    report = read_documents(paths)
    for item in report.skipped:
        logger.warning("%s is left out: %s", item.path, item.reason)
    return report.documents
