# SPDX-License-Identifier: Apache-2.0
"""All metrics of one model on given sets, as JSON, continued where an interrupted run stopped."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lazyattention.errors import ConfigError, RequestError
from lazyattention.models.weights_id import tensors_digest
from lazyattention.unlearn.data import QAExample, dataset_digest
from lazyattention.unlearn.metrics.context import EvalContext, EvalOptions, MetricUnavailableError
from lazyattention.unlearn.metrics.progress import Progress
from lazyattention.unlearn.metrics.registry import METRICS
from lazyattention.unlearn.metrics.summaries import json_safe
from lazyattention.utils.hashing import digest_fields

SCHEMA = "lazyattention.unlearn.evaluation/1"


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: Mapping[str, Sequence[QAExample]],
    *,
    metrics: Sequence[str] | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    retrained_logs: Mapping[str, Any] | str | Path | None = None,
    resume_path: str | Path | None = None,
    progress: bool = True,
    options: EvalOptions | None = None,
) -> dict[str, Any]:
    """Compute metrics of a model.

    Each answer is scored in one forward pass and each question answered once, however many metrics use them.

    Args:
        model: Any causal language model, PEFT wrapped or not. Its mode and generation settings are restored.
        tokenizer: Of the model.
        splits: "forget", "retain", "holdout" (never trained on, same distribution), "real_authors", "world_facts";
            others are allowed and get every metric that works on a single set.
        metrics: Names from `METRICS`; None computes all that the splits allow and lists the others under "skipped".
        batch_size: Examples per forward pass; None = by device. Changes results by rounding only.
        device: Where to move the model; None leaves it where it is.
        retrained_logs: What this function returned for the retrained model, or the JSON file it was written to.
        resume_path: A JSON file: finished metrics are read from it and each new one is written as it is done. The
            file belongs to this model, these sets and these options; for others it is refused.
        progress: Show bars on a terminal.
        options: How examples are shown to the model; see `EvalOptions`.

    Returns:
        "metrics": name to result, either {"splits": {split: {"value", …}}} or {"value", …}; "summary": the values
        alone, as {"truth_ratio/forget": 0.4, "model_utility": 0.6, …}; "skipped": name to reason; "timings_s": of
        each pass ("score/forget/answer", "generate/forget+retain"), the arithmetic being free; "settings";
        "num_examples"; "digests" of data and, with `resume_path`, of weights; "schema".

    Raises:
        ConfigError: An unknown metric.
        RequestError: A metric asked for by name cannot be computed, or `resume_path` belongs to something else.
    """
    if not splits:
        raise RequestError("splits is empty; give at least one, such as {'forget': examples}")
    names = list(dict.fromkeys(metrics)) if metrics is not None else list(METRICS)
    for name in names:
        METRICS[name]  # an unknown name fails before anything is computed
    if device is not None:
        model.to(torch.device(device))  # type: ignore[arg-type]  # transformers narrows the signature of Module.to
    context = EvalContext(
        model,
        tokenizer,
        splits,
        options or EvalOptions(),
        batch_size,
        _read_logs(retrained_logs),
        Progress(is_enabled=progress),
    )
    report = _new_report(context, with_weights=resume_path is not None)
    path = Path(resume_path) if resume_path is not None else None
    if path is not None and path.exists():
        _resume(report, path)
    context.results.update(report["metrics"])
    for name in names:
        if name in report["metrics"]:
            continue
        try:
            result = json_safe(context.result(name))
        except MetricUnavailableError as error:
            if metrics is not None:
                raise RequestError(f"metric {name!r} cannot be computed: it {error}") from error
            report["skipped"][name] = str(error)
            continue
        report["metrics"][name] = result
        report["timings_s"].update(context.pass_timings_s)
        report["summary"] = summarize(report["metrics"])
        if path is not None:
            _write(report, path)
    report["metrics"] = {name: report["metrics"][name] for name in names if name in report["metrics"]}
    report["summary"] = summarize(report["metrics"])
    if path is not None:
        _write(report, path)
    return report


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Flatten results to their values: "<metric>/<split>", or "<metric>" for one that needs several splits."""
    flat: dict[str, float | None] = {}
    for name, result in results.items():
        if "splits" in result:
            flat.update({f"{name}/{split}": part["value"] for split, part in result["splits"].items()})
        else:
            flat[name] = result["value"]
    return flat


def _new_report(context: EvalContext, *, with_weights: bool) -> dict[str, Any]:
    settings = {
        **context.options.as_dict(),
        **context.shown_as(),
        "dtype": str(next(context.model.parameters()).dtype).removeprefix("torch."),
    }
    digests = {f"split/{name}": dataset_digest(examples) for name, examples in context.splits.items()}
    if context.retrained is not None:
        logged = json.dumps(json_safe(context.retrained.get("metrics")), sort_keys=True)
        digests["retrained_logs"] = digest_fields((logged,)).hex()
    if with_weights:
        digests["weights"] = tensors_digest(dict(context.model.state_dict()))
    return {
        "schema": SCHEMA,
        "settings": settings,
        "digests": digests,
        "num_examples": {name: len(examples) for name, examples in context.splits.items()},
        "metrics": {},
        "summary": {},
        "skipped": {},
        "timings_s": {},
    }


def _resume(report: dict[str, Any], path: Path) -> None:
    """Take over finished metrics from `path`, after checking that they are of the same model, sets and options."""
    earlier = _read_json(path)
    if earlier.get("schema") != SCHEMA:
        raise RequestError(f"{path} is not a result file of evaluate(); give another resume_path or delete it")
    for part in ("settings", "digests"):
        for key in report[part].keys() | earlier[part].keys():
            if report[part].get(key) != earlier[part].get(key):
                raise RequestError(
                    f"{path} belongs to another run: {part}[{key!r}] is {earlier[part].get(key)!r} there and "
                    f"{report[part].get(key)!r} here; give another resume_path or delete the file"
                )
    for part in ("metrics", "timings_s"):
        report[part].update(earlier[part])


def _read_logs(logs: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any] | None:
    if logs is None or isinstance(logs, Mapping):
        return logs
    return _read_json(Path(logs))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the file evaluate() wrote") from error
    except ValueError as error:
        raise RequestError(
            f"{path} is not valid JSON ({error}); give the file evaluate() wrote, or delete it"
        ) from error
    if not isinstance(content, dict):
        raise RequestError(f"{path} holds no JSON object; give the file evaluate() wrote")
    return content


def _write(report: Mapping[str, Any], path: Path) -> None:
    """Write beside the file and rename, so that an interruption leaves the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(beside, path)
