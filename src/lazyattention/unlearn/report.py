# SPDX-License-Identifier: Apache-2.0
"""The audit report: results.json for machines, report.html for people, from the same record."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyattention.unlearn.metrics import METRICS
from lazyattention.unlearn.plots import plot_comparison, plot_neurons, plot_steps, plot_trajectory
from lazyattention.unlearn.purge import describe_purge

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.55 system-ui, sans-serif; color: #0f172a; max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
table { border-collapse: collapse; width: 100%; margin: .4rem 0; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid #e2e8f0; vertical-align: top; }
th { color: #475569; font-weight: 600; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
.decision { padding: .8rem 1rem; border-left: 5px solid #15803d; background: #f0fdf4; margin: 1rem 0; }
.decision.bad { border-color: #b91c1c; background: #fef2f2; } .decision.open { border-color: #b45309; background: #fffbeb; }
.note { color: #475569; font-size: .9rem; } .warn { border-left: 5px solid #b45309; background: #fffbeb; padding: .6rem 1rem; }
code { font-size: .86rem; overflow-wrap: anywhere; } svg { width: 100%; height: auto; }
table.even { table-layout: fixed; } td { overflow-wrap: anywhere; } table:not(.even) td:first-child { overflow-wrap: normal; }
@media (max-width: 45rem) { table { display: block; overflow-x: auto; } td { min-width: 5rem; } }
details { margin: .5rem 0; } summary { cursor: pointer; color: #1d4ed8; } ul { padding-left: 1.2rem; }
"""


# Longer answers are cut in the page; results.json has them whole.
_MAX_ANSWER_CHARS = 240
_PROBE_METRICS = ("extraction_strength", "exact_memorization", "answer_probability", "rouge_l")


def write_report(record: Mapping[str, Any], folder: Path) -> Path:
    """Write results.json and report.html into `folder`; returns the HTML file."""
    (folder / "results.json").write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
    path = folder / "report.html"
    path.write_text(render_report(record), encoding="utf-8")
    return path


def render_report(record: Mapping[str, Any]) -> str:
    """Build the HTML page of a run's audit record: one file, no scripts, no network."""
    training, config = record["training"], record["config"]
    parts = [
        f"<h1>Unlearning report</h1><p class=note>request <code>{_e(record['request_id'])}</code> · model "
        f"{_e(record['model']['name'])} · {_e(_device(record['environment']))}</p>",
        _decision(record["decision"]),
        _failure(record.get("measuring_failed")),
        _summary_table(record),
        "<h2>What this report does not claim</h2><ul>"
        + "".join(f"<li>{_e(text)}</li>" for text in record["non_claims"])
        + "</ul>",
        "<h2>Forgetting and utility over the run</h2>",
        plot_trajectory(training, config["guards"]["max_utility_drop"]),
        "<h2>Metrics before and after</h2>",
        _metrics_table(record["metrics"]),
        _answers(record.get("answers")),
        _probes(record.get("probes")),
        _comparison(record.get("comparison")),
        _neurons(training),
        "<h2>Optimisation</h2>",
        plot_steps(training["steps"]),
        _options(record),
        _provenance(record),
    ]
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Unlearning report</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def render_comparison(comparison: Mapping[str, Any]) -> str:
    """Build the HTML page of `compare` alone."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Unlearning comparison</title>"
        f"<style>{_STYLE}</style></head><body><h1>Unlearning comparison</h1>{_comparison(comparison)}</body></html>"
    )


def _e(value: Any) -> str:  # noqa: ANN401 - anything printable
    return html.escape(str(value))


def _number(value: Any) -> str:  # noqa: ANN401
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else _e(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "") -> str:
    cells = "".join(f"<th>{_e(name)}</th>" for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td class=n>{_number(v)}</td>" if not isinstance(v, str) else f"<td>{_e(v)}</td>" for v in row)
        + "</tr>"
        for row in rows
    )  # fmt: skip
    return f"<table class='{kind}'><tr>{cells}</tr>{lines}</table>"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_ANSWER_CHARS else text[:_MAX_ANSWER_CHARS] + " …"


def _decision(decision: Mapping[str, Any]) -> str:
    kind = "bad" if decision["status"] == "refused" or "forced" in decision["status"] else ""
    if not kind and (not decision.get("target_reached") or decision["was_at_target"]):
        kind = "open"
    return f"<div class='decision {kind}'><b>{_e(decision['status'])}</b> – {_e(decision['reason'])}</div>"


def _failure(reason: str | None) -> str:
    if reason is None:
        return ""
    return f"<div class='decision bad'><b>not measured to the end</b> – {_e(reason)}</div>"


def _summary_table(record: Mapping[str, Any]) -> str:
    training = record["training"]
    data = record["data"]
    changed = training["num_changed"]
    rows: list[tuple[Any, ...]] = [
        ("examples", ", ".join(f"{name}: {part['num_examples']}" for name, part in data.items())),
        ("objective", record["config"]["objective"]["name"] + f" ({training['objective_source']})"),
        ("weights that changed", f"{changed:,} of {training['num_weights']:,} ({changed / training['num_weights']:.2%})"),
        ("selected neurons", f"{training['neurons']['share']:.2%} of the down-projections' {training['neurons']['axis']}put units"),
        ("time", f"attribution {training['timings_s']['attribution']:.1f} s, training {training['timings_s']['training']:.1f} s"),
    ]  # fmt: skip
    if training["peak_memory_bytes"]:
        rows.append(("peak device memory", f"{training['peak_memory_bytes'] / 2**30:.2f} GiB"))
    return _table(("", ""), rows)


def _metrics_table(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    before = metrics.get("before", {}).get("summary", {})
    after = metrics.get("after", {}).get("summary", {})
    if not before:
        return "<p class=note>Not measured.</p>"
    rows = []
    for name, value in before.items():
        new = after.get(name)
        change = new - value if isinstance(new, float) and isinstance(value, float) else None
        rows.append((name, value, new, change))
    skipped = metrics.get("after", metrics["before"]).get("skipped", {})
    note = "".join(f"<li>{_e(name)}: {_e(reason)}</li>" for name, reason in skipped.items())
    more = f"<details><summary>not computed</summary><ul class=note>{note}</ul></details>" if note else ""
    return _table(("metric / set", "before", "after", "change"), rows) + _how_to_read(rows) + more


def _how_to_read(rows: Sequence[tuple[Any, ...]]) -> str:
    """What a higher value of each metric means, and what is wanted."""
    names = dict.fromkeys(str(row[0]).partition("/")[0] for row in rows)
    lines = "".join(
        f"<li><code>{_e(name)}</code>, {_e(METRICS[name].unit)}: {_e(METRICS[name].direction)}</li>"
        for name in names
        if name in METRICS
    )
    return f"<details><summary>how to read them</summary><ul class=note>{lines}</ul></details>"


def _answers(answers: Mapping[str, Sequence[Mapping[str, str]]] | None) -> str:
    if not answers:
        return ""
    parts = [
        "<h2>Answers before and after</h2><p class=warn>This section quotes text that was to be forgotten. Before the "
        "report is passed on, <code>lazyattention unlearn report FOLDER --no-answers</code> leaves it out.</p>"
    ]
    for name, rows in answers.items():
        lines = [tuple(_short(row[key]) for key in ("question", "expected", "before", "after")) for row in rows]
        parts.append(f"<h3>{_e(name)} set</h3>" + _table(("question", "expected", "before", "after"), lines, "even"))
    return "".join(parts)


def _probes(report: Mapping[str, Any] | None) -> str:
    if not report:
        return (
            "<h2>Probes</h2><p class=note>Not run. Without them nothing is known about relearning, quantisation, "
            "paraphrases or prefixes.</p>"
        )
    rows = []
    for name, probe in report["probes"].items():
        for split, after in probe["after"].items():
            before = probe["before"].get(split, {})
            changes = [f"{_number(before.get(key))} → {_number(after.get(key))}" for key in _PROBE_METRICS]
            rows.append((name, split, *changes))
    intro = "<p class=note>Each cell: the unlearned model before → after the attack. On the forget set a rise means that something came back.</p>"
    skipped = "".join(f"<li>{_e(name)}: it {_e(reason)}</li>" for name, reason in report["skipped"].items())
    head = ("probe", "set", *(name.replace("_", " ") for name in _PROBE_METRICS))
    return "<h2>Probes</h2>" + intro + _table(head, rows) + (f"<ul class=note>{skipped}</ul>" if skipped else "")


def _comparison(comparison: Mapping[str, Any] | None) -> str:
    if not comparison:
        return (
            "<h2>Controls</h2><p class=note>Not run. Nothing in this report says that choosing neurons helped; run with "
            "controls “random” and “none” to find out for this model.</p>"
        )
    rows = []
    for arm in comparison["arms"]:
        difference = arm["difference"] or {"mean": None, "low": None, "high": None}
        rows.append(
            (arm["arm"], f"{arm['num_matched']} of {arm['num_runs']}", arm["utility"]["mean"], arm["utility"]["low"],
             arm["utility"]["high"], difference["mean"], difference["low"], difference["high"], arm["verdict"])
        )  # fmt: skip
    head = ("arm", "runs matched", "utility", "low", "high", "difference", "low", "high", "verdict")
    level = (
        f"<p class=note>Utility (retain {_e(comparison['utility_metric'])}) where the forget set first reaches "
        f"{_e(comparison['level_metric'])} = {_number(comparison['level'])}. Intervals: "
        f"{comparison['confidence']:.0%} t over {len(comparison['seeds'])} seed(s); differences are paired by seed.</p>"
    )
    return "<h2>Controls at matched forgetting</h2>" + level + plot_comparison(comparison) + _table(head, rows)


def _neurons(training: Mapping[str, Any]) -> str:
    neurons, attribution = training["neurons"], training["attribution"]
    notes = []
    if neurons["empty_layers"]:
        notes.append(f"empty layers: {neurons['empty_layers']}")
    if neurons["dual_share"] is not None:
        notes.append(f"{neurons['dual_share']:.1%} are critical for the retain set too")
    if attribution and attribution["residual_per_layer"]:
        residuals = sorted(attribution["residual_per_layer"])
        notes.append(f"completeness residual: median {residuals[len(residuals) // 2]:.1%}, largest {residuals[-1]:.1%}")
    text = f"<p class=note>{_e('; '.join(notes))}</p>" if notes else ""
    return "<h2>Neurons selected per layer</h2>" + plot_neurons(neurons) + text


def _device(environment: Mapping[str, Any]) -> str:
    return ", ".join(environment["gpu"]) or str(environment["processor"])


def _shown(value: Any) -> str:  # noqa: ANN401
    """Words for a value of the environment: lists and versions with commas."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _options(record: Mapping[str, Any]) -> str:
    unknown = set(record["unknown_from_paper"])
    rows = [
        (f"{section}.{name}", json.dumps(value), "open in the SIMU paper" if f"{section}.{name}" in unknown else "")
        for section, options in record["config"].items()
        for name, value in options.items()
    ]
    return f"<h2>Options in force</h2><details><summary>{len(rows)} options</summary>{_table(('option', 'value', ''), rows)}</details>"


def _provenance(record: Mapping[str, Any]) -> str:
    rows = [
        ("weights before", record["model"]["digest_before"]),
        ("weights after", record["model"].get("digest_after", "–")),
        *((f"data: {name}", f"{part['digest']} ({part['source']})") for name, part in record["data"].items()),
        ("configuration", record["config_digest"]),
        ("neuron mask", record["training"]["neurons"]["digest"]),
        ("ledger entry", record.get("ledger", {}).get("hash", "–")),
        ("store purge", describe_purge(record["purge"]) if record.get("purge") else "none asked for"),
        *((name.replace("_", " "), _shown(value)) for name, value in record["environment"].items()),
    ]
    return "<h2>Provenance</h2>" + _table(("", ""), rows)
