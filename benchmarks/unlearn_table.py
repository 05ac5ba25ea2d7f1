# SPDX-License-Identifier: Apache-2.0
"""Results of `bench_unlearn.py` as Markdown: for its own output, and for docs/unlearning.md (`make docs`)."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

Results = Mapping[str, Any]


def section(results: Results) -> str:
    """Everything the documentation says about one results file."""
    parts = [_setting(results), table(results), _verdicts(results), _times(results)]
    if "seven_b" in results:
        parts.append(_seven_b(results["seven_b"]))
    wrapped = (
        part if part.startswith("|") else textwrap.fill(part, 130, break_on_hyphens=False) for part in parts if part
    )
    return "\n\n".join(wrapped) + "\n"


def table(results: Results) -> str:
    """One line per model and arm, means over the seeds that ran."""
    comparison = results["comparison"]
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
    for index, arm in enumerate(comparison["arms"]):
        runs = _runs_of(results, arm["arm"])
        if not runs:
            continue
        difference = "reference" if index == 0 else _with_interval(arm["difference"])
        memory = max(run["peak_memory_bytes"] or 0 for run in runs)
        lines.append(
            f"| `{arm['arm']}` | {arm['num_matched']} of {arm['num_runs']} | {_with_interval(arm['utility'])} "
            f"| {difference} | {' | '.join(_measured(runs))} | {runs[0]['neuron_share']:.2%} | {_gib(memory)} |"
        )
    return "\n".join(lines)


def _setting(results: Results) -> str:
    environment, arguments, reference = results["environment"], results["arguments"], results["reference"]
    losses = {name: part["forget"]["mean_nll"] for name, part in reference.items()}
    prepared = ", ".join(
        f"{name} {part['num_examples']:,.0f} examples in {part['training_s']:.0f} s"
        for name, part in results["prepared"].items()
    )
    where = ", ".join(environment["gpu"]) or environment["processor"]
    seeds = {len(_runs_of(results, arm["arm"])) for arm in results["comparison"]["arms"]} - {0}
    return (
        f"{where}, torch {environment['versions']['torch']}, transformers {environment['versions']['transformers']}, "
        f"commit {environment['commit'] or results['commit'] or 'unknown'}. Fine-tuned for {arguments['epochs']} epochs at {arguments['lr']} ({prepared}). "
        f"Forget loss: original {losses['original']:.3f}, retrained {losses['retrained']:.3f} nats per token; each run "
        f"ends where it reaches the latter. {' or '.join(map(str, sorted(seeds)))} seeds per arm; intervals are 95 %, "
        f"differences paired by seed. Probes with seed {' and '.join(map(str, range(int(arguments['probe_seeds']))))}; "
        "their columns are the extraction strength of the forget set afterwards."
    )


def _verdicts(results: Results) -> str:
    arms = results["comparison"]["arms"]
    found = [f"`{arm['arm']}` {arm['verdict']}" for arm in arms[1:] if arm["num_runs"]]
    return f"Against `{arms[0]['arm']}`: {'; '.join(found)}." if found else ""


def _times(results: Results) -> str:
    """How each arm was trained: update, rate and weight, which are its own; seconds, alone and beside others."""
    lines = [
        "| arm | update | learning rate | retain weight | steps | training | the same, alone on the device | step 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in results["comparison"]["arms"]:
        runs = _runs_of(results, arm["arm"])
        if not runs:
            continue
        alone = results["alone"].get(arm["arm"])
        attribution = next((run["attribution"] for run in runs if "attribution" in run), None)
        steps = _mean([float(run["trajectory"][-1]["step"]) for run in runs], ".0f")
        shared = f"{_mean([run['training_s'] for run in runs], '.1f')} s"
        if (num_workers := runs[0]["num_workers"]) > 1:
            shared += f", {num_workers} processes on it"
        step_1 = f"{attribution['elapsed_s']:.1f} s, {_gib(attribution['peak_memory_bytes'])}" if attribution else ""
        config = results["configurations"][arm["arm"]]
        update, objective = config["optimizer"], config["objective"]
        lines.append(
            f"| `{arm['arm']}` | {update['name']} | {update['lr']:g} | {objective['retain_weight']:g} | {steps} | {shared} "
            f"| {_seconds(alone)} | {step_1} |"
        )
    return "\n".join(lines) + "\n\nStep 1 is computed once for all arms and seeds that share it."


def _seven_b(found: Results) -> str:
    layerwise, fast = found["attribution_layerwise"], found["attribution_fast"]
    size, seq_len = found["batch"]
    steps = found["step_s"]
    return (
        f"A {found['num_params'] / 1e9:.2f} B model of random weights in {found['dtype'].removeprefix('torch.')}, batches "
        f"of {size} × {seq_len} tokens. Step 1 with {found['num_steps']} points: {layerwise['measured_s_per_batch']:.1f} s "
        f"per batch and {_gib(layerwise['peak_memory_bytes'])} at its peak (`fast`: {fast['measured_s_per_batch']:.2f} s, "
        f"{_gib(fast['peak_memory_bytes'])}); 400 examples with 20 points would take "
        f"{found['attribution_400_examples_20_points_extrapolated_s'] / 60:.0f} minutes (extrapolated by FLOP). Step 2 with "
        f"attention in full and 5 % of the neurons: {steps[-1]:.2f} s per step ({steps[0]:.2f} s with a curvature "
        f"estimate), {_gib(found['training_peak_memory_bytes'])} at its peak, of which optimizer.state "
        f"{_gib(found['optimizer_state_bytes'])}; Sophia on all weights would need "
        f"{_gib(found['dense_sophia_state_bytes_computed'])} (computed)."
    )


def _runs_of(results: Results, arm: str) -> list[Results]:
    return [run for run in results["comparison"]["runs"] if run["arm"] == arm]


def _measured(records: Sequence[Results]) -> list[str]:
    """KS, extraction strength, utility, and extraction strength after two probes; means over what was measured."""
    evaluations = [record["evaluation"] for record in records if "evaluation" in record]
    quality = [found["forget_quality"] for found in evaluations]
    ks = (
        f"{_mean([q['statistic'] for q in quality])} ({_mean([q['value'] for q in quality], '.1e')})"
        if quality
        else "–"
    )
    summaries = [found["summary"] for found in evaluations]
    return [
        ks,
        _mean([summary["extraction_strength/forget"] for summary in summaries]),
        _mean([summary["model_utility"] for summary in summaries]),
        *(_mean([_probed(record, probe) for record in records]) for probe in ("relearn", "quantize")),
    ]


def _probed(record: Results, probe: str) -> float | None:
    found = record.get("probes", {}).get("probes", {}).get(probe)
    return found["after"]["forget"]["extraction_strength"] if found else None


def _mean(values: Sequence[float | None], form: str = ".3f") -> str:
    given = [value for value in values if value is not None]
    return format(sum(given) / len(given), form) if given else "–"


def _seconds(alone: Results | None) -> str:
    return f"{alone['training_s']:.1f} s" if alone else ""


def _gib(num_bytes: float | None) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes else "–"


def _with_interval(part: Results | None) -> str:
    """Mean and bounds in one cell."""
    if not part or part["mean"] is None:
        return "–"
    return f"{part['mean']:.3f}" + ("" if part["low"] is None else f" [{part['low']:.3f}, {part['high']:.3f}]")
