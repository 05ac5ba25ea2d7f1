# SPDX-License-Identifier: Apache-2.0
"""`lazyattention quality`: what reuse costs in answers, on your model, documents and questions.

Heavy imports stand inside the command, so that `--help` answers at once.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lazyattention import envs
from lazyattention.errors import ConfigError
from lazyattention.utils.packages import require_package

if TYPE_CHECKING:
    from lazyattention.quality.request import QualityRequest

# Engine options that `lazyattention adapt` refuses.
_NOT_FOR_TRAINING = (
    "max_loss",
    "reuse_method",
    "compile",
    "cuda_graphs",
    "recompute",
    "chunk_temperature",
    "chunk_bias",
    "calibrated",
)
# Bootstrap intervals of fewer are too narrow.
_FEW_QUESTIONS = 30
_out, _err = Console(highlight=False, markup=False, soft_wrap=True), Console(stderr=True)


def quality_command(
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            help="JSONL with question, documents, answers; a file or folder of documents to ask about; or nq:PATH, "
            "hotpotqa:PATH, needle, two_hop. Repeatable.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder, GGUF file or hub name; default: a small model from a package."),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="PEFT adapter folder to load onto the model.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for records, report and plot; an interrupted run goes on.")
    ] = Path("quality"),
    documents: Annotated[
        list[Path] | None, typer.Option(help="Where questions without documents find them. Repeatable.")
    ] = None,
    num_documents: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Documents per question; several values, several sets.", show_default="10"),
    ] = None,
    num_questions: Annotated[int, typer.Option(min=1, help="Questions per set, at most.")] = 200,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Reuse option to compare: a name, or composed, such as parallel+num_hidden=8. Repeatable.",
            show_default="after_preamble, isolated",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help='System message; "" = none.', show_default="short answers")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 32,
    group_size: Annotated[int, typer.Option(min=1, help="Questions in the engine at the same time.")] = 8,
    num_timed: Annotated[
        int, typer.Option(min=0, help="Measure tokens computed and TTFT on so many questions, one at a time.")
    ] = 50,
    against: Annotated[
        Path | None, typer.Option(help="Output folder of another run to compare with, such as one without the adapter.")
    ] = None,
    plot: Annotated[bool, typer.Option(help="Draw plot.png (needs matplotlib).")] = True,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure nothing; find chunk temperature and bias for each option and keep them for --calibrated.",
        ),
    ] = False,
    remember: Annotated[bool, typer.Option(help="Keep the loss for --max-loss.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")] = False,
    engine_options: dict[str, Any] | None = None,
) -> None:
    """Measure what reuse costs in answers, compared with full attention. --seed also decides which questions are drawn."""
    from lazyattention.config import EngineConfig
    from lazyattention.quality.measure import SHORT_ANSWERS, MeasureConfig
    from lazyattention.quality.output import hold_output
    from lazyattention.quality.request import QualityRequest
    from lazyattention.quality.sources import check_data
    from lazyattention.quality.workflow import run_calibration, run_quality

    if against is not None and not against.is_dir():
        raise ConfigError(f"--against {against} is not a folder; name the output folder of another run")
    if plot and not calibrate:
        require_package("matplotlib", "drawing plot.png (or give --no-plot)", "quality")
    config = MeasureConfig(
        options=tuple(option or ("after_preamble", "isolated")),
        system=SHORT_ANSWERS if system is None else system,
        max_tokens=max_tokens,
        group_size=group_size,
        num_timed=num_timed,
    )
    refuse_without_effect(engine_options or {}, ("max_loss", "reuse_method"), "measuring compares both sides anyway")
    engine_config = EngineConfig.of(None, **(engine_options or {}))
    request = QualityRequest(
        data=tuple(data),
        output=output,
        documents=tuple(documents or ()),
        num_documents=tuple(dict.fromkeys(num_documents or (10,))),
        num_questions=num_questions,
        seed=engine_config.seed or 0,
        config=config,
        against=against,
        with_plot=plot,
        with_gate=remember,
        progress=envs.PROGRESS,
    )
    check_data(request)
    with hold_output(output):
        pass  # a folder that cannot be used is named before the model is loaded
    from lazyattention.engine.engine import Engine
    from lazyattention.models.loader import load_model

    show = _err.is_terminal and envs.PROGRESS
    loaded = load_model(model, dtype=dtype, device=device, adapter=adapter, progress=show)
    engine = Engine(loaded, engine_config)
    if calibrate:
        found = run_calibration(engine, request)
        if as_json:
            _out.print_json(json.dumps(found))
        else:
            _print_calibrations(found)
        return
    report = run_quality(engine, request)
    if as_json:
        _out.print_json(json.dumps(report))
    else:
        _print_report(report, request)
        _print_next(request, ["--model", model] if model else [], adapter, engine_options or {})


def _print_calibrations(found: dict[str, Any]) -> None:
    for name, one in found.items():
        _out.print(
            f"{name}: chunk_temperature {one['chunk_temperature']:.3f}, chunk_bias {one['chunk_bias']:+.3f}; KL from full "
            f"attention {one['kl_before']:.4f} -> {one['kl']:.4f} on questions kept apart"
        )
    _out.print("kept for --calibrated; measure them: lazyattention quality --option calibrated ...")


def _print_report(report: dict[str, Any], request: "QualityRequest") -> None:
    from lazyattention.quality.report import group_table, summary_table

    for name, summary in report["sets"].items():
        _out.print(summary_table(summary, f"{report['model']}, {name}, {summary['num_questions']} questions"))
        if "against" in summary:
            _out.print(summary_table(summary["against"], f"{name}: compared with full attention in {request.against}"))
    for grouping in ("by_num_documents", "by_gold_position"):
        table = group_table(report["all"], grouping)
        if table is not None:
            _out.print(table)
    _out.print(
        "Below each value: its difference to full attention, question by question, and the 95 % interval. NLL and KL: nats "
        "per token, along full attention's own answer (its answer) or the gold one. Tokens computed: median share of the "
        "prompt, choosing included; it and the TTFT are those of one question at a time over stored documents."
    )
    if request.against is not None:
        _out.print(f"Same answer and word overlap (F1) compare with what full attention answered in {request.against}.")
    num_questions = report["all"]["num_questions"]
    kept = "; --max-loss compares with the latter" if request.with_gate and num_questions > 1 else ""
    for name, loss in report["loss"].items():
        _out.print(f"loss of {name}: {loss['loss']:.3f} nats per answer token, at most {loss['loss_high']:.3f}{kept}")
    if 1 < num_questions < _FEW_QUESTIONS:
        _out.print(f"{num_questions} questions are few: their intervals are rough. Ask more before you rely on them.")
    for path in sorted(request.output.glob("*/questions.jsonl")):
        _out.print(f"questions the model wrote (look at a few): {path}")
    _out.print(f"report: {request.output / 'report.json'}")


def _print_next(
    request: "QualityRequest", model: list[str], adapter: str | None, engine_options: Mapping[str, Any]
) -> None:
    """What a user does now, as commands to copy."""
    if adapter is None:
        flags = flags_of({name: value for name, value in engine_options.items() if name not in _NOT_FOR_TRAINING})
        data = [word for source in request.data for word in ("--data", source)]
        train = shlex.join(["lazyattention", "adapt", *model, *data, "--output", "adapter", *flags])
        _out.print(f"next, if that is too much: {train}")
    adapted = ["--adapter", adapter] if adapter else []
    serve = shlex.join(["lazyattention", "serve", *model, *adapted, *flags_of(engine_options)])
    _out.print(f"next, to serve: {serve} --max-loss X (full attention where the loss is larger than X)")


def refuse_without_effect(engine_options: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    """Raise ConfigError for engine options that a command would ignore."""
    given = [name for name in names if name in engine_options]
    if given:
        raise ConfigError(
            f"{', '.join(flags_of(dict.fromkeys(given, True)))} has no effect here, since {why}; leave it out"
        )


def flags_of(engine_options: Mapping[str, Any]) -> list[str]:
    """Return engine options as they stand on a command line."""
    flags: list[str] = []
    for name, value in engine_options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags
