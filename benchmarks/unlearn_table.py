# SPDX-License-Identifier: Apache-2.0
"""Results of `bench_unlearn.py` put together, and their tables for the documentation.

python benchmarks/unlearn_table.py FILE [--write]    prints the tables; --write puts them into docs/unlearning.md
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unlearn_models import read_json

from lazyattention.unlearn.compare import SCHEMA, CompareOptions, summarize_arms

PAGE = Path(__file__).resolve().parent.parent / "docs" / "unlearning.md"


def results_of(work: Path, options: CompareOptions, arms: Sequence[str]) -> dict[str, Any]:
    """Collect what lies under WORK; runs that were not finished are counted if they were trained, and named."""
    paths = sorted((work / "runs").glob("*.json"))
    records = [record for record in map(read_json, paths) if record["arm"] is not None]
    order = {arm: index for index, arm in enumerate(arms)}
    trained = [record for record in records if "run" in record and record["arm"] in order]
    trained.sort(key=lambda record: (order[record["arm"]], record["seed"]))
    runs = [
        record["run"] | {key: record[key] for key in _KEPT if key in record} for record in trained
    ]  # fmt: skip
    prepared = {name: read_json(work / f"prepared_{name}.json") for name in ("original", "retrained")}
    alone = work / "alone.json"
    return {
        "reference": {name: record["reference"] for name, record in prepared.items()},
        "prepared": {name: record["stages_s"] | record["fine_tuning"] for name, record in prepared.items()},
        "models": {record["arm"]: record for record in records if record["arm"] in prepared},
        "comparison": {
            "schema": SCHEMA,
            "level_metric": options.level_metric,
            "level": options.level,
            "utility_metric": options.utility_metric,
            "confidence": options.confidence,
            "seeds": list(options.seeds),
            "runs": runs,
            "arms": summarize_arms(runs, list(arms), options),
        },
        "alone": read_json(alone) if alone.exists() else {},
        "unfinished": [f"{r['arm']}:{r['seed']} {r['status']}" for r in records if r["status"] != "done"],
    }


_KEPT = ("status", "num_workers", "stages_s", "attribution", "evaluation", "probes", "measuring_peak_memory_bytes")


def table(results: dict[str, Any]) -> str:
    """Markdown: one line per model and arm, means over the seeds that ran."""
    comparison = results["comparison"]
    runs = comparison["runs"]
    lines = [
        "| model or arm | reached the level | retain tokens known there | difference | KS statistic (p) "
        "| forget extraction strength | model utility | after relearning | in 4 bits | neurons moved | peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ("original", "retrained"):
        if name in results["models"]:
            known = results["reference"][name]["retain"]["exact_memorization"]
            found = results["models"][name]
            lines.append(f"| {name} model | | {known:.3f} | | {' | '.join(_measured([found]))} | | |")
    for arm in comparison["arms"]:
        own = [run for run in runs if run["arm"] == arm["arm"]]
        if not own:
            continue
        difference = "reference" if arm is comparison["arms"][0] else with_interval(arm["difference"])
        memory = max(run["peak_memory_bytes"] or 0 for run in own) / 2**30
        lines.append(
            f"| `{arm['arm']}` | {arm['num_matched']} of {arm['num_runs']} | {with_interval(arm['utility'])} "
            f"| {difference} | {' | '.join(_measured(own))} | {own[0]['neuron_share']:.2%} "
            f"| {f'{memory:.1f} GiB' if memory else ''} |"
        )
    return "\n".join(lines)


def _measured(records: Sequence[dict[str, Any]]) -> list[str]:
    """KS, extraction strength, utility, and extraction strength after two probes; means over what was measured."""
    evaluations = [record["evaluation"] for record in records if "evaluation" in record]
    quality = [found["forget_quality"] for found in evaluations]
    ks = (
        f"{_mean([q['statistic'] for q in quality])} ({_mean([q['value'] for q in quality], '.1e')})" if quality else ""
    )
    summaries = [found["summary"] for found in evaluations]
    return [
        ks,
        _mean([summary["extraction_strength/forget"] for summary in summaries]),
        _mean([summary["model_utility"] for summary in summaries]),
        *(_mean([_probed(record, probe) for record in records]) for probe in ("relearn", "quantize")),
    ]


def _probed(record: dict[str, Any], probe: str) -> float | None:
    found = record.get("probes", {}).get("probes", {}).get(probe)
    return found["after"]["forget"]["extraction_strength"] if found else None


def _mean(values: Sequence[float | None], form: str = ".3f") -> str:
    given = [value for value in values if value is not None]
    return format(sum(given) / len(given), form) if given else "–"


def with_interval(part: dict[str, Any] | None) -> str:
    """Mean and bounds in one cell."""
    if not part or part["mean"] is None:
        return "–"
    return f"{part['mean']:.3f}" + ("" if part["low"] is None else f" [{part['low']:.3f}, {part['high']:.3f}]")


def main() -> None:
    """Print, or write into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    print(table(read_json(args.file)))


if __name__ == "__main__":
    main()
