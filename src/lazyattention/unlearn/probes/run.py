# SPDX-License-Identifier: Apache-2.0
"""All probes on one model, and the results of several models side by side."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lazyattention.errors import RequestError
from lazyattention.unlearn.data import QAExample
from lazyattention.unlearn.metrics.progress import Progress
from lazyattention.unlearn.metrics.summaries import json_safe
from lazyattention.unlearn.probes.context import ProbeContext, ProbeOptions, ProbeUnavailableError
from lazyattention.unlearn.probes.registry import PROBES

SCHEMA = "lazyattention.unlearn.probes/1"


def run_probes(
    load_model: Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    splits: Mapping[str, Sequence[QAExample]],
    *,
    probes: Sequence[str] | None = None,
    seed: int = 0,
    progress: bool = True,
    options: ProbeOptions | None = None,
) -> dict[str, Any]:
    """Try to bring back what was forgotten.

    A probe that finds nothing shows that this attack, at this strength, found nothing; it proves no erasure.

    Args:
        load_model: Returns a fresh copy of the model each time; called once for all probes that only ask and once
            for each that changes weights. One copy is in memory at a time.
        tokenizer: Of the model.
        splits: "forget" is needed, "retain" is measured beside it and gives the examples for few-shot prompts.
        probes: Names from `PROBES`; None runs all the sets allow and lists the others under "skipped".
        seed: Of everything random; the same seed gives the same result on the same machine.
        progress: Show a bar on a terminal.
        options: How hard the attacks are.

    Returns:
        "probes": name to {"method", "before", "after", "change", …}; before and after are the attack's, each
        {"forget": {"extraction_strength", "exact_memorization", "answer_probability", "rouge_l", "mean_nll",
        "stderr", "num_examples"}, "retain": …}. "skipped", "timings_s", "settings", "seed", "schema". JSON-able.

    Raises:
        ConfigError: An unknown probe.
        RequestError: No forget set, or a probe asked for by name cannot be run.
    """
    if not splits.get("forget"):
        raise RequestError(f"probes need a non-empty split 'forget'; given are {', '.join(splits) or 'none'}")
    names = list(dict.fromkeys(probes)) if probes is not None else list(PROBES)
    chosen = [PROBES[name] for name in names]  # an unknown name fails before anything is computed
    context = ProbeContext(load_model, tokenizer, splits, options or ProbeOptions(), seed)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "seed": seed,
        "settings": json_safe(context.options.as_dict()),
        "probes": {},
        "skipped": {},
        "timings_s": {},
    }
    with Progress(is_enabled=progress).task("probing", len(chosen)) as advance:
        for probe in chosen:
            started = time.monotonic()
            try:
                report["probes"][probe.name] = json_safe(probe.run(context))
            except ProbeUnavailableError as error:
                if probes is not None:
                    raise RequestError(f"probe {probe.name!r} cannot be run: it {error}") from error
                report["skipped"][probe.name] = str(error)
                continue
            finally:
                advance(1)
            report["timings_s"][probe.name] = round(time.monotonic() - started, 3)
    return report


def compare_probes(reports: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put results of `run_probes` for several models side by side.

    Args:
        reports: For example {"original_model": …, "unlearned_model": …, "retrained_model": …}.

    Returns:
        One row per probe, set and metric that occurs in any report: "probe", "split", "metric", and for each model
        {"before", "after"}, None where that model has no such value.

    Raises:
        RequestError: The reports were made with different seeds or settings: their attacks differ.
    """
    if not reports:
        raise RequestError("no report to compare; give at least one")
    first_name, first = next(iter(reports.items()))
    for name, report in reports.items():
        for key in ("seed", "settings"):
            if report[key] != first[key]:
                raise RequestError(
                    f"{name} was probed with another {key} than {first_name}: {report[key]} and {first[key]}; probe all "
                    "models alike"
                )
    keys: dict[tuple[str, str, str], None] = {}
    for report in reports.values():
        for probe, found in report["probes"].items():
            for split, means in found["after"].items():
                keys.update({(probe, split, name): None for name, value in means.items() if isinstance(value, float)})
    return [
        {
            "probe": probe,
            "split": split,
            "metric": metric,
            **{
                model: {moment: _value(report, probe, moment, split, metric) for moment in ("before", "after")}
                for model, report in reports.items()
            },
        }
        for probe, split, metric in keys
    ]


def _value(report: Mapping[str, Any], probe: str, moment: str, split: str, metric: str) -> float | None:
    value = report["probes"].get(probe, {}).get(moment, {}).get(split, {}).get(metric)
    return value if isinstance(value, float) else None
