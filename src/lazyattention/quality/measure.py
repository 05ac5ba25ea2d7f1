# SPDX-License-Identifier: Apache-2.0
"""Asks every question once with full attention and once per reuse option, in one engine, and writes a record of each.

Per question and option: how likely full attention's own answer is (NLL), how far the distributions along it are apart
(KL), whether greedy decoding gives the same answer, and, where gold answers are known, how likely and how often they are
given; beside it, what the option costs: the share of prompt tokens computed and the time to first token. Records are JSONL and appended as they are made, so that an interrupted run goes on where it stopped.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lazyattention.config import ChunkOptions
from lazyattention.engine.engine import Engine
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.engine.scoring import ScoredAnswer, run_requests, score
from lazyattention.errors import ConfigError
from lazyattention.quality.examples import QualityExample, digest_examples
from lazyattention.quality.metrics import containment, exact_match, f1
from lazyattention.quality.options import FULL_ATTENTION, REUSE_METHOD, reuse_option
from lazyattention.quality.output import refuse_other_run, write_whole
from lazyattention.reuse import PromptLayout
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

SHORT_ANSWERS = "You answer questions using the given documents. Reply with only a short answer of a few words."
RECORDS_NAME = "records.jsonl"
RUN_NAME = "run.json"
# Smaller is better; without gold answers the last one is missing, as are the shares below.
DISTANCES = ("nll", "kl", "gold_nll")
# What an option costs once the documents are stored, measured one question at a time.
COSTS = ("computed_share", "ttft_s")
# Larger is better, between 0 and 1.
SHARES = ("agreement", "gold_greedy", "exact_match", "f1", "containment")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """How questions are asked.

    Attributes:
        options: Reuse options, as `reuse_option` reads them.
        system: System message; empty = none.
        max_tokens: Longest answer.
        group_size: Questions in the engine at the same time. Bounds memory: each holds its answers' distributions.
        num_timed: Of so many questions, the first ones, the costs are measured too; each is asked once more, alone.
    """

    options: tuple[str, ...] = ("after_preamble", "isolated")
    system: str = SHORT_ANSWERS
    max_tokens: int = 32
    group_size: int = 8
    num_timed: int = 50

    def __post_init__(self) -> None:
        for name in self.options:
            reuse_option(name)
        if not self.options or len(set(self.options)) != len(self.options):
            raise ConfigError(f"options must be one or more different names, got {', '.join(self.options) or 'none'}")
        for name in ("max_tokens", "group_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_timed < 0:
            raise ConfigError(f"num_timed must be at least 0, got {self.num_timed}")


@dataclass(frozen=True, slots=True)
class _Way:
    """How requests of one column are asked."""

    name: str
    reuse_method: str
    chunk_options: ChunkOptions
    recompute: str | None

    @property
    def how(self) -> dict[str, Any]:
        """As keywords of `Engine.add_request`."""
        names = ("reuse_method", "chunk_options", "recompute")
        return {name: getattr(self, name) for name in names}


# The prompt as it is without reuse, whatever the options.
_FULL_WAY = _Way(FULL_ATTENTION, "full_recompute", ChunkOptions(), None)


@dataclass(frozen=True, slots=True)
class Record:
    """What one question gave.

    Attributes:
        id: The example's.
        num_documents: Documents in its prompt.
        gold_position: "first", "middle", "last" or None.
        num_prompt_tokens: Length of the prompt.
        answers: Option name ("full" included) -> the answer's text.
        metrics: Option name -> metric -> value.
    """

    id: str
    num_documents: int
    gold_position: str | None
    num_prompt_tokens: int
    answers: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)


def measure(
    engine: Engine,
    examples: Sequence[QualityExample],
    config: MeasureConfig,
    folder: Path,
    *,
    on_done: Callable[[int], None] | None = None,
) -> list[Record]:
    """Measure all examples; those with a record in `folder` already are not asked again.

    Args:
        engine: Whose model and options are measured.
        examples: With unique ids.
        config: How to ask.
        folder: Receives run.json and records.jsonl.
        on_done: Called with a number of questions as they are done.

    Returns:
        One record per example, in order.

    Raises:
        ConfigError: Ids are not unique, or the folder holds records of another run.
        LazyAttentionError: A prompt cannot be served, for example because it is too long.
    """
    ids = [example.id for example in examples]
    if len(set(ids)) != len(ids):
        raise ConfigError("examples have ids that are not unique; give each line another 'id', or none")
    records = _open_run(engine, examples, config, folder)
    if on_done is not None and records:
        on_done(len(records))
    timed_ids = frozenset(ids[: config.num_timed])
    missing = [example for example in examples if example.id not in records]
    with (folder / RECORDS_NAME).open("a", encoding="utf-8") as file:
        for start in range(0, len(missing), config.group_size):
            group = missing[start : start + config.group_size]
            for record in _measure_group(engine, group, config, timed_ids):
                records[record.id] = record
                file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
            file.flush()
            if on_done is not None:
                on_done(len(group))
    return [records[example_id] for example_id in ids]


def read_records(folder: Path) -> list[Record]:
    """Return the records of a run, in the order they were made; a last line cut short by an interruption is left out.

    Raises:
        ConfigError: There is no such run.
    """
    path = folder / RECORDS_NAME
    try:
        # Bytes, for a killed run may have stopped inside a character; not splitlines(), for texts may hold such ends.
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise ConfigError(f"{folder} holds no {RECORDS_NAME}: {error}; name the output folder of a run") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(Record(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number != len(lines):
                raise ConfigError(
                    f"{path}, line {number} is no record: {error}; start anew in another folder"
                ) from error
    return records


def layout_of(engine: Engine, example: QualityExample, system: str) -> PromptLayout:
    """Lay out an example's prompt: instructions, documents, question."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": f"Question: {example.question}"})
    return engine.prompts.chat(messages, example.documents)


def answer_token_ids(engine: Engine, layout: PromptLayout, answer: str) -> tuple[int, ...]:
    """Tokenise a given answer as it would stand behind the prompt, without an end."""
    tokenizer = engine.loaded.tokenizer
    before = str(tokenizer.decode(list(layout.spans[-1].token_ids[-1:])))
    text = answer.strip()
    if before and not before[-1].isspace() and not before.endswith(">"):
        text = f" {text}"
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _measure_group(
    engine: Engine, group: Sequence[QualityExample], config: MeasureConfig, timed_ids: frozenset[str]
) -> list[Record]:
    layouts = [layout_of(engine, example, config.system) for example in group]
    golds = [
        answer_token_ids(engine, layout, example.answers[0]) if example.answers else ()
        for example, layout in zip(group, layouts, strict=True)
    ]
    records = [
        Record(example.id, len(example.documents), example.gold_position, layout.num_tokens)
        for example, layout in zip(group, layouts, strict=True)
    ]
    full: list[ScoredAnswer] | None = None
    for way in (_FULL_WAY, *_ways_of(engine, config)):
        own, along, gold = _ask(engine, way, layouts, full, golds, config)
        full = own if full is None else full
        for index, example in enumerate(group):
            record = records[index]
            record.answers[way.name] = own[index].output.text.strip()
            record.metrics[way.name] = _metrics(example, full[index], own[index], along[index], gold.get(index))
            if example.id in timed_ids:
                record.metrics[way.name] |= _costs(engine, way, layouts[index])
    return records


def _ask(
    engine: Engine,
    way: _Way,
    layouts: Sequence[PromptLayout],
    full: Sequence[ScoredAnswer] | None,
    golds: Sequence[tuple[int, ...]],
    config: MeasureConfig,
) -> tuple[list[ScoredAnswer], list[ScoredAnswer], dict[int, ScoredAnswer]]:
    """Let one way answer, and score along full attention's answers (None = this is full attention) and along gold ones.

    Returns:
        Own answers; full attention's as this way sees them; index -> gold answer, where there is one.
    """
    with_gold = [index for index, gold in enumerate(golds) if gold]
    along = [] if full is None else [answer.token_ids for answer in full]
    # All at the same time: more requests to a step are fewer steps.
    scored = score(
        engine,
        [*layouts, *layouts[: len(along)], *(layouts[index] for index in with_gold)],
        [*[None] * len(layouts), *along, *(golds[index] for index in with_gold)],
        max_tokens=config.max_tokens,
        **way.how,
    )
    own, rest = scored[: len(layouts)], scored[len(layouts) :]
    gold = dict(zip(with_gold, rest[len(along) :], strict=True))
    return own, rest[: len(along)] or own, gold


def _metrics(
    example: QualityExample,
    reference: ScoredAnswer,
    own: ScoredAnswer,
    along: ScoredAnswer,
    gold: ScoredAnswer | None,
) -> dict[str, float]:
    """What one way's answer is worth; `reference` is full attention's, `along` the same seen by this way."""
    text = own.output.text.strip()
    values = {
        "nll": along.nll,
        "kl": kl_divergence(reference.logprobs, along.logprobs),
        "agreement": float(own.token_ids == reference.token_ids),
    }
    if example.answers:
        values |= {
            "exact_match": exact_match(text, example.answers),
            "f1": f1(text, example.answers),
            "containment": containment(text, example.answers),
        }
    if gold is not None:
        values |= {"gold_nll": gold.nll, "gold_greedy": float(gold.is_greedy)}
    return values


def _costs(engine: Engine, way: _Way, layout: PromptLayout) -> dict[str, float]:
    """Ask once more, alone, for one token, with the documents stored and no text of this question left from before."""
    for _ in range(2):
        engine.cache.forget_unused_texts()
        output = run_requests(
            engine,
            [layout],
            [SamplingParams(temperature=0.0, max_tokens=1)],
            **way.how,
        )[0]
        # A document may have been evicted since; then it is stored now.
        if all(document.status != "miss" or document.reason == "no identical prefix" for document in output.documents):
            break
    num_computed = output.num_computed_tokens + output.num_selection_tokens
    assert output.timings.ttft_s is not None
    return {"computed_share": num_computed / output.num_prompt_tokens, "ttft_s": output.timings.ttft_s}


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over positions of KL(reference || other), nats; rounding below 0 is cut off."""
    return max(0.0, float((reference.exp() * (reference - other)).sum(dim=1).mean()))


def _open_run(
    engine: Engine, examples: Sequence[QualityExample], config: MeasureConfig, folder: Path
) -> dict[str, Record]:
    """Return the records a folder already holds, having checked that they belong to this very run."""
    run = _describe_run(engine, examples, config)
    path = folder / RUN_NAME
    if not path.exists():
        write_whole(folder / RECORDS_NAME, [])
        write_whole(path, [json.dumps(run, indent=2) + "\n"])
        return {}
    refuse_other_run(path, run)
    records = read_records(folder)
    # An interruption may have cut the last line short; what follows must not be glued to it.
    write_whole(folder / RECORDS_NAME, [json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in records])
    if records:
        logger.info("%d of %d questions are measured already", len(records), len(examples))
    return {record.id: record for record in records}


def _ways_of(engine: Engine, config: MeasureConfig) -> list[_Way]:
    ways = []
    for option in map(reuse_option, config.options):
        recompute = option.recompute or engine.config.recompute
        ways.append(
            _Way(option.name, REUSE_METHOD, engine.resolve(option.chunk_options(engine.config.chunk)), recompute)
        )
    return ways


def _describe_run(engine: Engine, examples: Sequence[QualityExample], config: MeasureConfig) -> dict[str, Any]:
    """Everything that records depend on."""
    return {
        "weights_id": engine.loaded.weights_id,
        "model": engine.loaded.name,
        "dtype": str(engine.loaded.dtype),
        "examples": digest_examples(examples),
        "options": {way.name: asdict(way) for way in _ways_of(engine, config)},
        "system": config.system,
        "max_tokens": config.max_tokens,
        "max_chunk_len": engine.config.cache.max_chunk_len,
        "documents_place": engine.config.documents_place,
        "chat_template": engine.config.chat_template,
    }
