# SPDX-License-Identifier: Apache-2.0
"""From data to report: collect questions, measure, summarise, draw, remember the loss."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lazyattention.engine.calibration import remember_calibration
from lazyattention.engine.engine import Engine
from lazyattention.engine.gate import remember_loss
from lazyattention.quality.calibrate import MAX_TRIALS, calibrate
from lazyattention.quality.datasets import is_builtin
from lazyattention.quality.examples import QualityExample
from lazyattention.quality.measure import Record, measure, read_records
from lazyattention.quality.options import reuse_option
from lazyattention.quality.output import hold_output
from lazyattention.quality.plots import save_plot
from lazyattention.quality.progress import progress_bar
from lazyattention.quality.report import loss_of, summarize, summarize_against
from lazyattention.quality.request import QualityRequest
from lazyattention.quality.sources import check_data, check_same_questions, collect_examples, refuse_too_long
from lazyattention.utils.environment import describe_environment
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)

REPORT_NAME = "report.json"


def run_quality(engine: Engine, request: QualityRequest) -> dict[str, Any]:
    """Measure and write `report.json` (and `plot.png`) into the output folder; return the report.

    Raises:
        ConfigError: Data cannot be read or made, or the output folder holds another run.
        LazyAttentionError: A prompt cannot be served.
    """
    check_data(request)
    with hold_output(request.output):
        return _run_quality(engine, request)


def _run_quality(engine: Engine, request: QualityRequest) -> dict[str, Any]:
    asked = _collect(engine, request)
    if request.against is not None:
        for name, examples in asked:
            check_same_questions(request.against, name, examples)
    _check_lengths(engine, asked, request)
    sets: dict[str, Any] = {}
    everything: list[Record] = []
    for name, examples in asked:
        with progress_bar(f"measuring {name}", len(examples), is_enabled=request.progress) as advance:
            records = measure(engine, examples, request.config, request.output / name, on_done=advance)
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
    check_data(request)
    with hold_output(request.output):
        return _run_calibration(engine, request)


def _run_calibration(engine: Engine, request: QualityRequest) -> dict[str, Any]:
    asked = _collect(engine, request)
    _check_lengths(engine, asked, request)
    examples = [example for _, one in asked for example in one]
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


def _collect(engine: Engine, request: QualityRequest) -> list[tuple[str, list[QualityExample]]]:
    """Return all sets, name and examples, so that what is wrong with one is said before any is asked."""
    return [one for source in request.data for one in collect_examples(engine, source, request)]


def _check_lengths(engine: Engine, asked: Sequence[tuple[str, list[QualityExample]]], request: QualityRequest) -> None:
    config = request.config
    chunk_options = [reuse_option(name).chunk_options(engine.config.chunk) for name in config.options]
    for _, examples in asked:
        refuse_too_long(
            engine, examples, system=config.system, max_tokens=config.max_tokens, chunk_options=chunk_options
        )


def _remember(engine: Engine, records: Sequence[Record], request: QualityRequest) -> None:
    if len(records) < 2:
        logger.warning("one question says nothing about the next: the loss is not kept for max_loss; ask more")
        return
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
