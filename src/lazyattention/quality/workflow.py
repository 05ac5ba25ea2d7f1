# SPDX-License-Identifier: Apache-2.0
"""From data to report: collect questions (or let the model write them), measure, summarise, draw, remember the loss."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lazyattention.documents.document import Document
from lazyattention.documents.readers import read_documents
from lazyattention.documents.retrieval import BM25Retriever
from lazyattention.engine.calibration import remember_calibration
from lazyattention.engine.engine import Engine
from lazyattention.engine.gate import remember_loss
from lazyattention.errors import ConfigError
from lazyattention.quality.calibrate import MAX_TRIALS, calibrate
from lazyattention.quality.datasets import build_dataset, is_builtin
from lazyattention.quality.examples import QualityExample, read_answers, read_examples, read_lines
from lazyattention.quality.measure import MeasureConfig, Record, measure, read_records
from lazyattention.quality.options import reuse_option
from lazyattention.quality.plots import save_plot
from lazyattention.quality.progress import progress_bar
from lazyattention.quality.questions import passages_of, write_questions
from lazyattention.quality.report import loss_of, summarize, summarize_against
from lazyattention.utils.environment import describe_environment

QUESTIONS_NAME = "questions.jsonl"
REPORT_NAME = "report.json"


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
        progress: Show bars on a terminal.
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


def run_quality(engine: Engine, request: QualityRequest) -> dict[str, Any]:
    """Measure and write `report.json` (and `plot.png`) into the output folder; return the report.

    Raises:
        ConfigError: Data cannot be read or made, or the output folder holds another run.
        LazyAttentionError: A prompt cannot be served.
    """
    if not request.data:
        raise ConfigError("no data was given; name a built-in set, a JSONL file or a folder of documents")
    sets: dict[str, Any] = {}
    everything: list[Record] = []
    for source in request.data:
        for name, examples in collect_examples(engine, source, request):
            folder = request.output / name
            with progress_bar(f"measuring {name}", len(examples), is_enabled=request.progress) as advance:
                records = measure(engine, examples, request.config, folder, on_done=advance)
            everything += records
            sets[name] = summarize(records)
            if request.against is not None:
                sets[name]["against"] = summarize_against(records, read_records(request.against / name))
    report: dict[str, Any] = {
        "model": engine.loaded.name,
        "weights_id": engine.loaded.weights_id,
        "dtype": str(engine.loaded.dtype),
        "config": asdict(request.config),
        "data": list(request.data),
        "seed": request.seed,
        "environment": describe_environment(),
        "loss": {name: asdict(loss_of(everything, name, _data_name(request))) for name in request.config.options},
        "sets": sets,
        "all": summarize(everything),
    }
    (request.output / REPORT_NAME).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if request.with_plot:
        save_plot(report["all"], request.output / "plot.png", f"{engine.loaded.name}: {_data_name(request)}")
    if request.with_gate:
        _remember(engine, everything, request)
    return report


def run_calibration(engine: Engine, request: QualityRequest) -> dict[str, Any]:
    """Find temperature and bias for each of the request's options, and keep them for engines that ask for `calibrated`.

    Returns:
        Option -> what was found.

    Raises:
        ConfigError: Data cannot be read or made, or there are too few questions.
        LazyAttentionError: A prompt cannot be served.
    """
    sets = [examples for source in request.data for _, examples in collect_examples(engine, source, request)]
    examples = [example for one in sets for example in one]
    found = {}
    for name in request.config.options:
        options = reuse_option(name).chunk_options(engine.config.chunk)
        options = replace(options, calibrated=False, chunk_temperature=1.0, chunk_bias=0.0)
        with progress_bar(f"calibrating {name}", MAX_TRIALS, is_enabled=request.progress) as advance:
            calibration = calibrate(
                engine,
                examples,
                options,
                request.config,
                data=_data_name(request),
                on_trial=advance,
            )
        config = engine.config.of(engine.config, chunk=options)
        path = remember_calibration(engine.loaded.weights_id, config, calibration)
        found[name] = {**asdict(calibration), "file": str(path)}
    return found


def collect_examples(engine: Engine, source: str, request: QualityRequest) -> list[tuple[str, list[QualityExample]]]:
    """Return the sets a source gives: name and examples. Questions the model writes are kept in the output folder.

    Raises:
        ConfigError: The source is neither a built-in set nor a path, or cannot be read.
    """
    if is_builtin(source):
        name = source.partition(":")[0]
        return [
            (
                f"{name}-{count}",
                build_dataset(source, num_documents=count, num_questions=request.num_questions, seed=request.seed),
            )
            for count in request.num_documents
        ]
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(
            f"data {source!r} is neither a path nor a built-in set; give JSONL with questions, a folder of documents, or "
            "nq:PATH, hotpotqa:PATH, needle, two_hop"
        )
    if path.suffix == ".jsonl":
        return [(path.stem, _from_lines(path, request)[: request.num_questions])]
    return [
        (f"{path.stem or 'documents'}-{count}", _own_questions(engine, path, count, request))
        for count in request.num_documents
    ]


def _from_lines(path: Path, request: QualityRequest) -> list[QualityExample]:
    lines = read_lines(path)
    if any("documents" in fields for _, fields in lines):
        return read_examples(path)
    if not request.documents:
        raise ConfigError(
            f"{path} has no 'documents'; add them to each line, or name a folder to look in with --documents"
        )
    retriever = BM25Retriever(_read(request.documents))
    examples = []
    for number, fields in lines:
        question = fields.get("question")
        if not isinstance(question, str) or not question.strip():
            raise ConfigError(f"{path}, line {number}: 'question' must be a non-empty string, got {question!r:.80}")
        found = retriever.retrieve(question, max(request.num_documents))
        documents = tuple(item.document for item in found)
        answers = read_answers(fields, f"{path}, line {number}")
        examples.append(QualityExample(str(fields.get("id", number)), question, documents, answers))
    return examples


def _own_questions(engine: Engine, path: Path, num_documents: int, request: QualityRequest) -> list[QualityExample]:
    kept = request.output / f"{path.stem or 'documents'}-{num_documents}" / QUESTIONS_NAME
    if kept.exists():
        return read_examples(kept)
    passages = passages_of(_read((path,)), engine)
    with progress_bar("writing questions", request.num_questions, is_enabled=request.progress) as advance:
        examples = write_questions(
            engine,
            passages,
            num_questions=request.num_questions,
            num_documents=num_documents,
            seed=request.seed,
            on_done=advance,
        )
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(example.to_dict(), ensure_ascii=False) + "\n" for example in examples]
    kept.write_text("".join(lines), encoding="utf-8")
    return examples


def _read(paths: Sequence[Path]) -> list[Document]:
    documents = read_documents(paths).documents
    if not documents:
        raise ConfigError(f"no documents were found in {', '.join(map(str, paths))}; name files or folders with text")
    return documents


def _remember(engine: Engine, records: Sequence[Record], request: QualityRequest) -> None:
    for name in request.config.options:
        option = reuse_option(name)
        recompute = option.recompute or engine.config.recompute
        chunk_options = engine.resolve(option.chunk_options(engine.config.chunk))
        config = engine.config.of(engine.config, chunk=chunk_options, recompute=recompute)
        remember_loss(engine.loaded.weights_id, config, loss_of(records, name, _data_name(request)))


def _data_name(request: QualityRequest) -> str:
    return ", ".join(
        Path(source).name if not is_builtin(source) else source.partition(":")[0] for source in request.data
    )
