# SPDX-License-Identifier: Apache-2.0
"""Prompts to learn from: given ones or ones the model writes, each with the answer the teacher gives (or a gold one).

Made once with the engine, kept as JSONL, read again when a run is resumed.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lazyattention.engine.engine import Engine
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.engine.scoring import run_requests
from lazyattention.errors import ConfigError
from lazyattention.quality.examples import QualityExample, parse_example, read_lines
from lazyattention.quality.measure import answer_token_ids, layout_of
from lazyattention.quality.output import write_whole
from lazyattention.reuse import PromptLayout

# Of a document as plain text: what stands before, what follows, and what is too short for both. Tokens.
_PLAIN_PROMPT_LEN, _PLAIN_TARGET_LEN, _PLAIN_MIN_LEN = 96, 64, 24


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its answer.

    Attributes:
        layout: The prompt.
        teacher_layout: What the teacher reads in its place: the same question, perhaps over fewer documents.
        answer: Token ids, the end-of-sequence token included.
    """

    layout: PromptLayout
    teacher_layout: PromptLayout
    answer: tuple[int, ...]


def answer_samples(
    engine: Engine,
    examples: Sequence[QualityExample],
    *,
    system: str,
    max_tokens: int,
    teacher_documents: str,
    use_gold: bool,
    path: Path,
    on_done: Callable[[], None] | None = None,
) -> list[Sample]:
    """Answer every example and keep the result in `path`; what is there already is read instead.

    Args:
        engine: Answers greedily with full attention.
        examples: Questions over documents.
        system: System message; empty = none.
        max_tokens: Longest answer.
        teacher_documents: "all", or "gold": see AdaptConfig.
        use_gold: Take gold answers instead of asking.
        path: JSONL, written as a whole.
        on_done: Called as each example is answered.

    Raises:
        ConfigError: `use_gold` and an example has none; or the file is not one of these.
    """
    if path.exists():
        return read_samples(engine, path, system=system, teacher_documents=teacher_documents)
    layouts = [layout_of(engine, example, system) for example in examples]
    taught = [layout_of(engine, taught_example(example, teacher_documents), system) for example in examples]
    if use_gold:
        lacking = [example.id for example in examples if not example.answers]
        if lacking:
            raise ConfigError(
                f"{len(lacking)} of {len(examples)} questions have no gold answer (the first: {lacking[0]}); add "
                "'answers', or use the objective 'distill', which needs none"
            )
        end = min(engine.loaded.eos_token_ids)
        end_ids = [engine.loaded.tokenizer.eos_token_id if engine.loaded.tokenizer.eos_token_id is not None else end]
        answers = [
            (*answer_token_ids(engine, layout, example.answers[0]), *end_ids)
            for example, layout in zip(examples, layouts, strict=True)
        ]
    else:
        params = [SamplingParams(temperature=0.0, max_tokens=max_tokens) for _ in taught]
        outputs = run_requests(engine, taught, params, reuse_method="full_recompute", on_done=on_done)
        answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    lines = [
        json.dumps({"example": example.to_dict(), "answer": list(answer)}, ensure_ascii=False) + "\n"
        for example, answer in zip(examples, answers, strict=True)
    ]
    write_whole(path, lines)
    return [Sample(*one) for one in zip(layouts, taught, answers, strict=True)]


def plain_samples(samples: Sequence[Sample], first_token_ids: Sequence[int], seed: int) -> list[Sample]:
    """Return the prompts' documents as plain text, each once, in random order: its first tokens, and those that follow.

    Args:
        samples: Whose documents.
        first_token_ids: What the tokenizer puts in front of every text.
        seed: Of the order.
    """
    texts = {
        span.token_ids: None
        for sample in samples
        for span in sample.layout.spans
        if span.is_document and len(span.token_ids) >= _PLAIN_MIN_LEN
    }
    found = []
    for token_ids in random.Random(f"plain {seed}").sample(list(texts), len(texts)):
        cut = min(_PLAIN_PROMPT_LEN, 2 * len(token_ids) // 3)
        layout = PromptLayout.of_text([*first_token_ids, *token_ids[:cut]])
        found.append(Sample(layout, layout, token_ids[cut : cut + _PLAIN_TARGET_LEN]))
    return found


def taught_example(example: QualityExample, teacher_documents: str) -> QualityExample:
    """Return the question over what the teacher reads; all of it where nobody knows which documents it is about."""
    gold = sorted({place for place in example.gold_documents if example.documents[place].text.strip()})
    if teacher_documents == "all" or not gold:
        return example
    return replace(example, documents=tuple(example.documents[place] for place in gold), gold_documents=())


def read_samples(engine: Engine, path: Path, *, system: str, teacher_documents: str) -> list[Sample]:
    """Read what `answer_samples` kept.

    Raises:
        ConfigError: The file is not one of these.
    """
    samples = []
    for number, fields in read_lines(path):
        answer = fields.get("answer")
        if not isinstance(answer, list) or not isinstance(fields.get("example"), dict):
            raise ConfigError(f"{path}, line {number} is no sample; delete the file to have it made anew")
        example = parse_example(fields["example"], f"{path}, line {number}", str(number))
        taught = layout_of(engine, taught_example(example, teacher_documents), system)
        samples.append(Sample(layout_of(engine, example, system), taught, tuple(answer)))
    return samples
