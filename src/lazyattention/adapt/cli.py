# SPDX-License-Identifier: Apache-2.0
"""`lazyattention adapt`: an adapter that makes a model answer over reused documents as it does with full attention.

Heavy imports stand inside the command, so that `--help` answers at once.
"""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lazyattention import envs
from lazyattention.errors import ConfigError
from lazyattention.quality.cli import flags_of, refuse_without_effect

_out, _err = Console(highlight=False, markup=False, soft_wrap=True), Console(stderr=True, markup=False)


def adapt_command(
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            help="Files or folders of documents, which the model asks itself about; JSONL with question, documents and "
            "(for --objective labels) answers; or nq-train:PATH, needle, two_hop. Repeatable.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the adapter; an interrupted run goes on.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder, GGUF file or hub name; default: a small model from a package."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    num_questions: Annotated[
        list[int],
        typer.Option(
            min=4,
            help="Prompts to learn from, per --data, at most: one number, or repeated, one for each in order.",
            show_default="1000",
        ),
    ] = [1000],  # noqa: B006 - read only
    num_documents: Annotated[
        str, typer.Option(help="Documents per prompt: a number, or a range such as 2-10.")
    ] = "5-10",
    distractors: Annotated[
        str,
        typer.Option(
            help="Of questions the model writes, which documents stand beside the right one: similar = in part those that share "
            "most words with the question, as a retriever brings them; or random."
        ),
    ] = "similar",
    objective: Annotated[
        str,
        typer.Option(help="distill = the model's own full-attention answers, no labels; labels = gold answers."),
    ] = "distill",
    teacher_documents: Annotated[
        str,
        typer.Option(
            help="What the teacher reads: gold = only the documents a question is about, where they are known (as of "
            "questions the model writes); all = what the student reads."
        ),
    ] = "gold",
    system: Annotated[str | None, typer.Option(help='System message; "" = none.', show_default="short answers")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 32,
    rank: Annotated[int, typer.Option(min=1, help="Of the LoRA matrices.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 2e-4,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per step.")] = 16,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per forward pass; less needs less memory.")] = (
        16384
    ),
    full_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of prompts trained with full attention, to serve there, too.")
    ] = 0.2,
    keep_full: Annotated[
        bool,
        typer.Option(
            "--keep-full",
            help="Let the teacher read all documents of these, so that full attention answers as it did without the adapter.",
        ),
    ] = False,
    plain_share: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Plain text of the documents, rows per prompt, to keep ordinary use as it is."
        ),
    ] = 0.3,
    max_steps: Annotated[int, typer.Option(min=1, help="Steps at most.")] = 300,
    max_minutes: Annotated[float | None, typer.Option(help="Minutes of training at most.")] = None,
    eval_steps: Annotated[int, typer.Option(min=1, help="Steps between held-out measurements (checkpoints).")] = 25,
    patience: Annotated[int, typer.Option(min=1, help="Measurements without improvement until training stops.")] = 4,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--gradient-checkpointing/--no-gradient-checkpointing",
            help="Recompute activations: less memory, a third more time.",
            show_default="on a GPU",
        ),
    ] = None,
    held_out: Annotated[int, typer.Option(min=1, help="Prompts kept for these measurements.")] = 64,
    engine_options: dict[str, Any] | None = None,
) -> None:
    """Train an adapter, without labels, that takes back what reuse costs in answers.

    The engine's options (of chunks, chat template, chunk length) must be those it is served with. --seed also decides
    questions, order and initial matrices.
    """
    from lazyattention.adapt.config import AdaptConfig
    from lazyattention.adapt.objectives import OBJECTIVES
    from lazyattention.adapt.request import AdaptRequest
    from lazyattention.adapt.sources import check_data
    from lazyattention.adapt.workflow import run_adapt
    from lazyattention.config import EngineConfig
    from lazyattention.models.loader import load_model
    from lazyattention.quality.measure import SHORT_ANSWERS
    from lazyattention.quality.output import hold_output

    OBJECTIVES[objective]
    ignored = ("max_loss", "reuse_method", "compile", "cuda_graphs")
    refuse_without_effect(engine_options or {}, ignored, "training has ways of its own")
    engine_config = EngineConfig.of(None, **(engine_options or {}))
    config = AdaptConfig(
        objective=objective,
        teacher_documents=teacher_documents,
        keep_full=keep_full,
        chunk=engine_config.chunk,
        rank=rank,
        alpha=2 * rank,
        learning_rate=learning_rate,
        batch_size=batch_size,
        micro_batch_tokens=micro_batch_tokens,
        full_share=full_share,
        plain_share=plain_share,
        max_steps=max_steps,
        max_minutes=max_minutes,
        eval_steps=eval_steps,
        patience=patience,
        held_out=held_out,
        gradient_checkpointing=gradient_checkpointing,
        seed=engine_config.seed or 0,
    )
    request = AdaptRequest(
        data=tuple(data),
        output=output,
        num_questions=num_questions[0] if len(num_questions) == 1 else tuple(num_questions),
        num_documents=read_range(num_documents),
        distractors=distractors,
        system=SHORT_ANSWERS if system is None else system,
        max_tokens=max_tokens,
        config=config,
        progress=envs.PROGRESS,
    )
    check_data(request)
    with hold_output(output):
        pass  # a folder that cannot be used is named before the model is loaded
    loaded = load_model(model, dtype=dtype, device=device, progress=_err.is_terminal and envs.PROGRESS)
    log = run_adapt(loaded, request, engine_config)
    first = log.evaluations[0]
    best = next(evaluation for evaluation in log.evaluations if evaluation["step"] == log.best_step)
    _out.print(f"adapter: {output}")
    _out.print(
        f"held-out loss under the chunk mask {first['chunk']:.4f} -> {best['chunk']:.4f} (step {log.best_step} of "
        f"{log.num_steps}, {log.num_prompts} prompts, {log.train_s:.0f} s; ended by {log.stopped})"
    )
    _out.print(f"the same with full attention {first['full']:.4f} -> {best['full']:.4f}")
    if "plain" in best:
        _out.print(f"on plain text of the documents {first['plain']:.4f} -> {best['plain']:.4f}")
    if log.num_skipped:
        _err.print(f"{log.num_skipped} steps were skipped: their gradients were not finite")
    measure = ["lazyattention", "quality", *(["--model", model] if model else []), "--adapter", str(output)]
    measure += [word for source in data for word in ("--data", source)]
    measure += ["--against", "quality", "--output", "quality-adapted", *flags_of(engine_options or {})]
    _out.print(f"next: {shlex.join(measure)}")
    _out.print(
        "(the folder behind --against: what `lazyattention quality` wrote without the adapter, over the same data and numbers "
        "of documents)"
    )


def read_range(text: str) -> tuple[int, int]:
    """Read "7" or "2-10"."""
    low, separator, high = text.partition("-")
    try:
        found = int(low), int(high) if separator else int(low)
    except ValueError as error:
        raise ConfigError(f"--num-documents {text!r} is neither a number nor a range such as 2-10") from error
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"--num-documents {text!r} must be at least 1 and rise, such as 2-10")
    return found
