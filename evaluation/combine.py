# SPDX-License-Identifier: Apache-2.0
"""Put the variants of one study into one result file: the main run whole, of the others what a table needs.

    python3 evaluation/combine.py study --main seed-0 --output evaluation/results/NAME-adapt.json

Everything is computed from the records and training reports that the runs of `gpu_adapt.py` left, so that a run cut short
counts with what it has; `num_questions` says how many that are.
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lazyattention.models.adapter import REPORT_NAME
from lazyattention.quality.measure import RECORDS_NAME, Record, read_records
from lazyattention.quality.options import FULL_ATTENTION
from lazyattention.quality.report import summarize, summarize_against
from lazyattention.quality.statistics import paired_difference

_METRICS = ("gold_greedy", "containment", "exact_match", "f1", "gold_nll", "kl", "nll", "agreement")
PLAIN_NAME = "plain_text_nll.json"


def main() -> None:
    """Combine, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder whose folders are the runs")
    parser.add_argument("--main", required=True, help="the variant that is kept whole")
    parser.add_argument("--base", default="base", help="the run of the unadapted model")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    result = combine(arguments.study, arguments.main, arguments.base)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_table(result)


def combine(study: Path, main_name: str, base_name: str = "base") -> dict[str, Any]:
    """Return the main run with a summary of every variant that was trained under `variants`."""
    base = read_stage(study / base_name / "unadapted")
    trained = sorted(path.parent.parent.name for path in study.glob(f"*/adapter/{REPORT_NAME}"))
    if main_name not in trained:
        raise SystemExit(f"{study} holds no trained variant {main_name!r}; trained are: {', '.join(trained) or 'none'}")
    variants = {name: variant(study / name, base, study / base_name) for name in trained}
    main_run = variants[main_name]
    training, run = read_run(study / main_name)
    training["data"] = [without_folder(source) for source in training["data"]]
    tasks = {name: {"unadapted": summarize(records)} for name, records in base.items()}
    for name, records in read_stage(study / main_name / "adapted").items():
        tasks[name]["adapted"] = summarize(records)
    result = {
        **{key: run[key] for key in ("model", "environment", "arguments")},
        "main_variant": main_name,
        "training": training,
        "tasks": tasks,
        "against_unadapted_full": {name: task["against_unadapted_full"] for name, task in main_run["tasks"].items()},
        "retained_share": {name: task["retained_share"] for name, task in main_run["tasks"].items()},
        "plain_text_nll_difference": main_run["plain_text_nll_difference"],
        "variants": variants,
    }
    options = list((study / "options").glob("*-adapt.json"))
    if options:  # the unadapted model with every reuse option
        found = json.loads(options[0].read_text(encoding="utf-8"))["tasks"]
        result["options"] = {name: stages["unadapted"] for name, stages in found.items()}
    return result


def without_folder(source: str) -> str:
    """Return data as it was named, a file by its name alone: where it lay says nothing."""
    name, colon, file = source.partition(":")
    return f"{name}{colon}{Path(file).name}" if colon else Path(name).name


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the training report and what `gpu_adapt.py` wrote of the run; a run killed early may lack the latter."""
    training = json.loads((folder / "adapter" / REPORT_NAME).read_text(encoding="utf-8"))
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*-adapt.json")]
    bare = {"model": training["model"], "environment": training["environment"], "arguments": {}}
    return training, runs[0] if runs else bare


def read_stage(folder: Path) -> dict[str, list[Record]]:
    """Return the records of every task that has some."""
    found = {path.parent.name: read_records(path.parent) for path in sorted(folder.glob(f"*/{RECORDS_NAME}"))}
    return {name: records for name, records in found.items() if records}


def mean_words(records: Iterable[Record]) -> dict[str, float]:
    """Return the mean length of the answers, option by option."""
    answers = [record.answers for record in records]
    return {name: statistics.mean(len(one[name].split()) for one in answers) for name in answers[0]}


def variant(folder: Path, base: dict[str, list[Record]], base_folder: Path) -> dict[str, Any]:
    """Return one variant's options that matter, training and scores; it may have been trained and not yet measured."""
    training, run = read_run(folder)
    trained_option = run["arguments"].get("train_option", training["config"]["chunk"]["encoding"])
    tasks = {}
    for name, records in read_stage(folder / "adapted").items():
        asked = {record.id for record in records}
        against = summarize_against(records, base[name])["options"]
        tasks[name] = {
            "num_questions": len(records),
            "mean_answer_words": {
                "unadapted": mean_words(record for record in base[name] if record.id in asked),
                "adapted": mean_words(records),
            },
            "adapted": {
                option: {metric: found[metric]["value"] for metric in _METRICS if metric in found}
                for option, found in summarize(records)["options"].items()
            },
            "against_unadapted_full": {
                option: {metric: found[metric]["difference"] for metric in _METRICS if metric in found}
                for option, found in against.items()
            },
            "retained_share": against.get(trained_option, {}).get("containment", {}).get("retained_share"),
            "retained_share_full_attention": against[FULL_ATTENTION].get("containment", {}).get("retained_share"),
        }
    plain = [
        path for path in (base_folder / "unadapted" / PLAIN_NAME, folder / "adapted" / PLAIN_NAME) if path.exists()
    ]
    before_after = [json.loads(path.read_text(encoding="utf-8")) for path in plain]
    return {
        "commit": run["environment"]["commit"],
        "config": training["config"],
        "train_option": trained_option,
        "num_samples": training["num_samples"],
        "num_prompts": training["num_prompts"],
        "num_steps": training["num_steps"],
        "num_skipped": training["num_skipped"],
        "best_step": training["best_step"],
        "stopped": training["stopped"],
        "train_s": round(training["train_s"], 1),
        "sampling_s": round(training["sampling_s"], 1),
        "peak_memory_bytes": training["peak_memory_bytes"],
        "held_out": training["evaluations"],
        "plain_text_nll_difference": (
            paired_difference(before_after[1], before_after[0]).to_dict() if len(before_after) == 2 else None
        ),
        "tasks": tasks,
    }


def print_table(result: dict[str, Any]) -> None:
    """Print one row per variant and task: scores under the trained option, and the difference that decides."""
    print(
        f"{'variant':18} {'task':15} {'n':>5} {'greedy':>7} {'contains':>9} {'gold NLL':>9}  contains - unadapted full"
    )
    for name, stages in result["tasks"].items():
        for option, found in stages["unadapted"]["options"].items():
            row = [found[metric]["value"]["mean"] for metric in ("gold_greedy", "containment", "gold_nll")]
            count = stages["unadapted"]["num_questions"]
            print(f"{'stock ' + option:18.18} {name:15} {count:5} {row[0]:7.3f} {row[1]:9.3f} {row[2]:9.3f}")
    for variant_name, run in result["variants"].items():
        for name, found in run["tasks"].items():
            for option in dict.fromkeys((FULL_ATTENTION, run["train_option"])):
                values = found["adapted"].get(option)
                if values is None:
                    continue
                row = [values[metric]["mean"] for metric in ("gold_greedy", "containment", "gold_nll")]
                difference = found["against_unadapted_full"][option]["containment"]
                print(
                    f"{variant_name + ' ' + option:18.18} {name:15} {found['num_questions']:5} {row[0]:7.3f} {row[1]:9.3f} "
                    f"{row[2]:9.3f}  {difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"
                )
    print(f"\n{'variant':18} {'steps':>5} {'seconds':>8}  held-out KL: chunk mask, full attention")
    for variant_name, run in result["variants"].items():
        steps = ", ".join(f"{e['step']:.0f}: {e['chunk']:.3f} {e['full']:.3f}" for e in run["held_out"])
        print(f"{variant_name:18} {run['num_steps']:5} {run['train_s']:8.1f}  {steps}")


if __name__ == "__main__":
    main()
