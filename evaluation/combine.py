# SPDX-License-Identifier: Apache-2.0
"""Put the variants of one study into one result file: the main run whole, of the others what a table needs.

python3 evaluation/combine.py study --main seed-0 --output evaluation/results/NAME-adapt.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

_METRICS = ("gold_greedy", "containment", "f1", "gold_nll", "kl", "nll", "agreement")


def main() -> None:
    """Combine, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder whose folders are the variants")
    parser.add_argument("--main", required=True, help="the variant that is kept whole")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    result = combine(arguments.study, arguments.main)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_table(result)


def combine(study: Path, main_name: str) -> dict[str, Any]:
    """Return the main run with a summary of every variant under `variants`."""
    runs = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in study.glob("*/*-adapt.json")}
    finished = {name: run for name, run in runs.items() if run["against_unadapted_full"]}
    if main_name not in finished:
        raise SystemExit(
            f"{study} holds no finished variant {main_name!r}; finished are: {', '.join(sorted(finished))}"
        )
    result = dict(finished[main_name])
    result["main_variant"] = main_name
    if "options" in runs:  # the unadapted model with every reuse option
        result["options"] = {name: stages["unadapted"] for name, stages in runs["options"]["tasks"].items()}
    result["variants"] = {name: summary(run) for name, run in sorted(finished.items())}
    return result


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Return one variant's options that matter, training and scores."""
    training = run["training"]
    return {
        "config": training["config"],
        "train_option": run["arguments"]["train_option"],
        "num_samples": training["num_samples"],
        "num_prompts": training["num_prompts"],
        "num_skipped": training["num_skipped"],
        "best_step": training["best_step"],
        "stopped": training["stopped"],
        "train_s": round(training["train_s"], 1),
        "sampling_s": round(training["sampling_s"], 1),
        "held_out": training["evaluations"],
        "plain_text_nll_difference": run["plain_text_nll_difference"],
        "tasks": {
            name: {
                "adapted": {
                    option: {metric: found[metric]["value"] for metric in _METRICS if metric in found}
                    for option, found in stages["adapted"]["options"].items()
                },
                "against_unadapted_full": {
                    option: {metric: found[metric]["difference"] for metric in _METRICS if metric in found}
                    for option, found in run["against_unadapted_full"][name]["options"].items()
                },
            }
            for name, stages in run["tasks"].items()
            if "adapted" in stages
        },
    }


def print_table(result: dict[str, Any]) -> None:
    """Print one row per variant and task: scores under the trained option, and the difference that decides."""
    print(f"{'variant':18} {'task':16} {'gold greedy':>11} {'contains':>9} {'gold NLL':>9}  contains - unadapted full")
    for name, stages in result["tasks"].items():
        for option, found in stages["unadapted"]["options"].items():
            row = [found[metric]["value"]["mean"] for metric in ("gold_greedy", "containment", "gold_nll")]
            print(f"{'stock ' + option:18.18} {name:16} {row[0]:11.3f} {row[1]:9.3f} {row[2]:9.3f}")
    for variant, run in result["variants"].items():
        option = run["train_option"]
        for name, found in run["tasks"].items():
            values = found["adapted"][option]
            row = [values[metric]["mean"] for metric in ("gold_greedy", "containment", "gold_nll")]
            difference = found["against_unadapted_full"][option]["containment"]
            print(
                f"{variant:18} {name:16} {row[0]:11.3f} {row[1]:9.3f} {row[2]:9.3f}  "
                f"{difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"
            )


if __name__ == "__main__":
    main()
