# SPDX-License-Identifier: Apache-2.0
"""Prompts to learn from: given ones or ones the model writes, each with the answer full attention gives (or a gold one).

Made once with the engine, kept as JSONL, read again when a run is resumed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lazyattention.engine.engine import Engine
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.engine.scoring import run_requests
from lazyattention.errors import ConfigError
from lazyattention.quality.examples import QualityExample, parse_example, read_lines
from lazyattention.quality.measure import answer_token_ids, layout_of
from lazyattention.quality.output import write_whole
from lazyattention.reuse import PromptLayout


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its answer.

    Attributes:
        layout: The prompt.
        answer: Token ids, the end-of-sequence token included.
    """

    layout: PromptLayout
    answer: tuple[int, ...]


def answer_samples(
    engine: Engine,
    examples: Sequence[QualityExample],
    *,
    system: str,
    max_tokens: int,
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
        use_gold: Take gold answers instead of asking.
        path: JSONL, written as a whole.
        on_done: Called as each example is answered.

    Raises:
        ConfigError: `use_gold` and an example has none; or the file is not one of these.
    """
    if path.exists():
        return read_samples(engine, path, system=system)
    layouts = [layout_of(engine, example, system) for example in examples]
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
        params = [SamplingParams(temperature=0.0, max_tokens=max_tokens) for _ in layouts]
        outputs = run_requests(engine, layouts, params, reuse_method="full_recompute", on_done=on_done)
        answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    lines = [
        json.dumps({"example": example.to_dict(), "answer": list(answer)}, ensure_ascii=False) + "\n"
        for example, answer in zip(examples, answers, strict=True)
    ]
    write_whole(path, lines)
    return [Sample(layout, answer) for layout, answer in zip(layouts, answers, strict=True)]


def read_samples(engine: Engine, path: Path, *, system: str) -> list[Sample]:
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
        samples.append(Sample(layout_of(engine, example, system), tuple(answer)))
    return samples
