# SPDX-License-Identifier: Apache-2.0
"""From records to what is reported: means, paired differences and shares, over all questions and over groups of them."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from lazyattention.engine.gate import MeasuredLoss
from lazyattention.errors import ConfigError
from lazyattention.quality.measure import COSTS, DISTANCES, SHARES, Record
from lazyattention.quality.metrics import f1
from lazyattention.quality.options import FULL_ATTENTION
from lazyattention.quality.statistics import interval, paired_difference

_TITLES = {
    "nll": "NLL, its answer",
    "kl": "KL",
    "gold_nll": "NLL, gold answer",
    "agreement": "same answer",
    "gold_greedy": "gold is greedy",
    "exact_match": "exact match",
    "f1": "F1",
    "containment": "contains gold",
    "overlap": "word overlap",
    "computed_share": "tokens computed",
    "ttft_s": "TTFT, median s",
}
# Likeness to the answers of another run is known of comparisons with one only.
_METRICS = (*DISTANCES, *SHARES, "overlap", *COSTS)
_GROUPINGS: dict[str, Callable[[Record], str | None]] = {
    "by_num_documents": lambda record: str(record.num_documents),
    "by_gold_position": lambda record: record.gold_position,
}


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """Summarise records of one run.

    Returns:
        `num_questions`; `options`: option -> metric -> `{value, difference, retained_share}`, where value and difference
        (against full attention, paired) are intervals and the share is missing for distances and zero scores; costs have
        a `median` instead;
        `by_num_documents` and `by_gold_position`: group -> the same.
    """
    summary = _summarize(records)
    for name, group_of in _GROUPINGS.items():
        groups = sorted({group for record in records if (group := group_of(record)) is not None}, key=_group_order)
        summary[name] = {group: _summarize([r for r in records if group_of(r) == group]) for group in groups}
    return summary


def _group_order(group: str) -> tuple[int, str]:
    return (int(group), "") if group.isdigit() else (("first", "middle", "last").index(group), group)


def _summarize(records: Sequence[Record], baseline: dict[str, dict[str, float]] | None = None) -> dict[str, Any]:
    """`baseline` maps ids to the metrics compared with; None = the record's own full attention."""
    names = list(records[0].metrics) if records else []
    options: dict[str, Any] = {}
    for name in names:
        options[name] = {}
        for metric in _METRICS:
            pairs = [
                (record.metrics[name][metric], reference[metric])
                for record in records
                for reference in [record.metrics[FULL_ATTENTION] if baseline is None else baseline[record.id]]
                if metric in record.metrics[name] and metric in reference
            ]
            if pairs:
                options[name][metric] = _compare(metric, [a for a, _ in pairs], [b for _, b in pairs])
    return {"num_questions": len(records), "options": options}


def _compare(metric: str, values: list[float], references: list[float]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "value": interval(values).to_dict(),
        "difference": paired_difference(values, references).to_dict(),
    }
    if metric in COSTS:
        entry["median"] = statistics.median(values)
    if metric in SHARES and sum(references) > 0:
        entry["retained_share"] = sum(values) / sum(references)
    return entry


def summarize_against(records: Sequence[Record], others: Sequence[Record]) -> dict[str, Any]:
    """Compare one run's options with the full attention of another run over the same questions, question by question.

    This is how an adapter is judged: the adapted model under the chunk mask against the unadapted one with full attention.
    NLL and KL refer to each model's own full-attention answers, costs to its run; they are left out. `agreement` and
    `overlap` (F1 of words) say how like the answers are to those of the other run's full attention.

    Raises:
        ConfigError: The runs share no question, or not all of them.
    """
    known = {record.id: record for record in others}
    missing = [record.id for record in records if record.id not in known]
    if missing or not records:
        raise ConfigError(
            f"the other run lacks {len(missing)} of {len(records)} questions; both runs must be over the same data with "
            "the same seed"
        )
    baseline = {
        record.id: {
            metric: value
            for metric, value in known[record.id].metrics[FULL_ATTENTION].items()
            if metric not in ("nll", "kl", *COSTS)
        }
        | {"agreement": 1.0, "overlap": 1.0}
        for record in records
    }
    return _summarize([_likened(record, known[record.id].answers[FULL_ATTENTION]) for record in records], baseline)


def _likened(record: Record, answer: str) -> Record:
    """The record with how like its answers are to this one."""
    metrics = {
        name: values | {"agreement": float(text == answer), "overlap": 1.0 if text == answer else f1(text, [answer])}
        for name, values in record.metrics.items()
        for text in [record.answers[name]]
    }
    return dataclasses.replace(record, metrics=metrics)


def loss_of(records: Sequence[Record], option: str, data: str) -> MeasuredLoss:
    """What the gate decides by: how much less likely answers become, nats per answer token.

    Gold answers where all questions have one, else full attention's own answers.
    """
    has_golds = all("gold_nll" in record.metrics[option] for record in records)
    metric = "gold_nll" if has_golds else "nll"
    found = paired_difference(
        [record.metrics[option][metric] for record in records],
        [record.metrics[FULL_ATTENTION][metric] for record in records],
    )
    return MeasuredLoss(found.mean, found.high, found.num_questions, metric, data)


def summary_table(summary: dict[str, Any], title: str) -> Table:
    """One row per metric, one column per option; differences to full attention with their 95 % intervals."""
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    for name in summary["options"]:
        table.add_column(name, justify="right")
    for metric in _METRICS:
        cells = []
        for name, metrics in summary["options"].items():
            entry = metrics.get(metric)
            cells.append("" if entry is None else _cell(entry, is_full=name == FULL_ATTENTION))
        if any(cells):
            table.add_row(_TITLES[metric], *cells)
    return table


def group_table(summary: dict[str, Any], grouping: str) -> Table | None:
    """One row per group of questions and option; None when there is only one group."""
    groups = summary[grouping]
    if len(groups) < 2:
        return None
    has_golds = all("gold_nll" in part["options"][FULL_ATTENTION] for part in groups.values())
    metrics = ("gold_nll", "containment") if has_golds else ("nll", "agreement")
    table = Table(title=grouping.replace("_", " "), title_justify="left")
    for title in ("group", "option"):
        table.add_column(title)
    for title in ("questions", *(_TITLES[metric] for metric in metrics)):
        table.add_column(title, justify="right")
    for group, part in groups.items():
        for name, found in part["options"].items():
            values = [f"{found[metric]['value']['mean']:.3f}" for metric in metrics]
            is_first = name == FULL_ATTENTION
            table.add_row(group if is_first else "", name, str(part["num_questions"]) if is_first else "", *values)
    return table


def _cell(entry: dict[str, Any], *, is_full: bool) -> str:
    if "median" in entry:
        return f"{entry['median']:.3f}"
    text = f"{entry['value']['mean']:.3f}"
    if is_full:
        return text
    difference = entry["difference"]
    return f"{text}\n{difference['mean']:+.3f} ({difference['low']:+.3f}…{difference['high']:+.3f})"
