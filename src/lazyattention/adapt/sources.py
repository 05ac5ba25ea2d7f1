# SPDX-License-Identifier: Apache-2.0
"""From what the user names as data to questions to learn from: read, built, or written by the model."""

import json
from pathlib import Path
from typing import Any

from lazyattention.adapt.config import AdaptConfig
from lazyattention.adapt.objectives import OBJECTIVES
from lazyattention.adapt.request import DEFAULT_DISTRACTORS, AdaptRequest
from lazyattention.documents.readers import read_documents
from lazyattention.engine.engine import Engine
from lazyattention.errors import ConfigError
from lazyattention.quality.datasets import build_dataset, is_builtin
from lazyattention.quality.examples import QualityExample, digest_examples, read_examples
from lazyattention.quality.progress import progress_bar
from lazyattention.quality.questions import DISTRACTORS, passages_of, write_questions
from lazyattention.quality.sources import check_source, is_jsonl, read_all
from lazyattention.utils.hashing import digest_fields

# Options of what the teacher gives.
_OF_THE_TEACHER = ("teacher_documents", "keep_full", "question_weight", "plain_share")
# Generated sets make other questions here than `quality` asks with the same seed: what was learnt must not be asked.
_TRAINING_SEEDS = 1_000_000
MIN_PROMPTS = 4
"""So many prompts can be split into some to train on and some held out."""


def check_data(request: AdaptRequest) -> None:
    """Refuse what can be seen to be wrong before a model is loaded.

    Raises:
        ConfigError: Data is missing or malformed, or given twice; or an option has no effect on it.
    """
    if not request.data:
        raise ConfigError("no data was given; name a folder of documents, a JSONL file or a built-in set")
    if not isinstance(request.num_questions, int) and len(request.num_questions) != len(request.data):
        raise ConfigError(
            f"num_questions must be one number, or one for each of the {len(request.data)} data sources, got "
            f"{len(request.num_questions)}"
        )
    low, high = request.num_documents
    if not 1 <= low <= high:
        raise ConfigError(f"num_documents must be a range of at least 1, got {low} to {high}")
    if request.distractors not in DISTRACTORS:
        raise ConfigError(f"distractors must be {' or '.join(map(repr, DISTRACTORS))}, got {request.distractors!r}")
    _refuse_without_teacher(request.config)
    for index, source in enumerate(request.data):
        if source in request.data[:index]:
            raise ConfigError(f"data {source!r} was given twice; give it once")
        check_source(source, "a file or folder of documents, JSONL with questions, or nq-train:PATH, needle, two_hop")
        if is_jsonl(source):
            read_examples(Path(source).expanduser())
    if request.distractors != DEFAULT_DISTRACTORS and all(
        is_builtin(source) or is_jsonl(source) for source in request.data
    ):
        raise ConfigError(
            f"distractors={request.distractors!r} has no effect on questions that are given with their documents; leave it "
            "out, or give documents for the model to ask about"
        )


def _refuse_without_teacher(config: AdaptConfig) -> None:
    defaults = AdaptConfig()
    changed = [name for name in _OF_THE_TEACHER if getattr(config, name) != getattr(defaults, name)]
    if changed and not OBJECTIVES[config.objective].needs_teacher:
        raise ConfigError(
            f"{', '.join(changed)} has no effect with the objective {config.objective!r}, which has no teacher; leave it out"
        )


def describe_samples(engine: Engine, request: AdaptRequest) -> dict[str, Any]:
    """Everything that samples depend on."""
    return {
        "weights_id": engine.loaded.weights_id,
        "data": [_digest_source(source) for source in request.data],
        "num_questions": request.num_questions,
        "num_documents": request.num_documents,
        "distractors": request.distractors,
        "system": request.system,
        "max_tokens": request.max_tokens,
        "teacher_documents": request.config.teacher_documents,
        "use_gold": OBJECTIVES[request.config.objective].needs_answers,
        "seed": request.config.seed,
        "max_chunk_len": engine.config.cache.max_chunk_len,
        "documents_place": engine.config.documents_place,
        "chat_template": engine.config.chat_template,
    }


def _digest_source(source: str) -> str:
    """Name a built-in set, or the content of files, wherever they lie."""
    if is_builtin(source):
        return source
    if is_jsonl(source):
        return digest_examples(read_examples(Path(source).expanduser()))
    documents = read_documents((Path(source).expanduser(),)).documents
    return digest_fields([json.dumps([d.title, d.text]) for d in documents]).hex()


def collect_examples(engine: Engine, request: AdaptRequest) -> list[QualityExample]:
    """Return the questions of all sources; those about documents are written by the model.

    Raises:
        ConfigError: A source cannot be read or made.
    """
    found: list[QualityExample] = []
    for source in request.data:
        num_questions = request.num_questions_of(source)
        if is_builtin(source):
            found += _from_builtin(source, num_questions, request)
            continue
        path = Path(source).expanduser()
        if is_jsonl(source):
            found += read_examples(path)[:num_questions]
            continue
        passages = passages_of(read_all((path,)), engine)
        with progress_bar("writing questions", num_questions, is_enabled=request.progress) as advance:
            found += write_questions(
                engine,
                passages,
                num_questions=num_questions,
                num_documents=request.num_documents,
                distractors=request.distractors,
                seed=request.config.seed,
                on_done=advance,
            )
    if len(found) < MIN_PROMPTS:
        raise ConfigError(
            f"data {', '.join(request.data)} gives {len(found)} prompts to learn from; at least {MIN_PROMPTS} are needed; "
            "give more"
        )
    return found


def _from_builtin(source: str, num_questions: int, request: AdaptRequest) -> list[QualityExample]:
    """Take each question once, with each number of documents of the range in turn."""
    low, high = request.num_documents
    counts = list(range(low, high + 1))
    sets = [
        build_dataset(source, num_documents=n, num_questions=num_questions, seed=_TRAINING_SEEDS + request.config.seed)
        for n in counts
    ]
    return [sets[index % len(sets)][index] for index in range(len(sets[0]))]
