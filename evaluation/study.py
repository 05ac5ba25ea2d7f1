# SPDX-License-Identifier: Apache-2.0
"""Run all variants of a plan, one after the other on one GPU, and keep one result file up to date.

    PYTHONPATH=src python3 evaluation/study.py evaluation/plans/qwen2.5-coder-1.5b.json --model model.gguf \
        --data-folder DATA --study STUDY --output evaluation/results/NAME-adapt.json --minutes 25

A plan is JSON: `name`, `main` (the variant that the result file holds whole), `common`, `base` and `variants` (name -> what
to add), each a line of `gpu_adapt.py`'s arguments. What is done is not done again; a variant that fails costs no other; none
is begun after `--minutes`. One process, since each would read the model, compile and wait for its share of the GPU anew.
"""

import argparse
import gc
import json
import shlex
import shutil
import time
import traceback
from pathlib import Path

import combine
import gpu_adapt
import torch

from lazyattention.adapt.workflow import MADE_NAME, SAMPLES_NAME
from lazyattention.models.adapter import REPORT_NAME

# Arguments that decide which prompts there are and how they are answered; `adapt` checks that none is overlooked.
_OF_SAMPLES = {
    *("train", "train_questions", "train_documents", "distractors"),
    *("teacher_documents", "objective", "max_tokens", "seed", "model"),
}


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--model", required=True, help="folder or GGUF file")
    parser.add_argument("--data-folder", type=Path, required=True)
    parser.add_argument("--study", type=Path, required=True, help="receives a folder per variant")
    parser.add_argument("--output", type=Path, required=True, help="the result file")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing after so many")
    parser.add_argument("--only", nargs="+", help="of the variants; the base always runs")
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text(encoding="utf-8"))
    names = list(plan["variants"]) if arguments.only is None else arguments.only
    unknown = sorted(set(names) - set(plan["variants"]))
    if unknown:
        parser.error(f"--only: no variants {', '.join(unknown)}; there are {', '.join(plan['variants'])}")
    ends_s = time.perf_counter() + 60 * arguments.minutes
    base = arguments.study / "base"
    common = ["--model", arguments.model, "--name", plan["name"], "--data-folder", str(arguments.data_folder)]
    common += shlex.split(plan["common"])
    lines = {name: [*common, *shlex.split(more)] for name, more in plan["variants"].items()}
    if not (base / "done").exists():
        gpu_adapt.main([*common, "--out", str(base), "--stage", "unadapted", *shlex.split(plan["base"])])
        (base / "done").touch()
    failed = []
    for name in names:
        out = arguments.study / name
        if (out / "done").exists():
            continue
        if time.perf_counter() >= ends_s:
            print(f"no time left for {name} and what comes after it", flush=True)
            break
        print(f"== {name}", flush=True)
        try:
            share_samples(arguments.study, name, lines)
            gpu_adapt.main([*lines[name], "--out", str(out), "--base", str(base)])
            (out / "done").touch()
        except Exception:  # one broken variant must not cost the others
            traceback.print_exc()
            failed.append(name)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        write_result(arguments.study, plan["main"], arguments.output)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def share_samples(study: Path, name: str, lines: dict[str, list[str]]) -> None:
    """Take the prompts and answers of another variant that learns from the same ones, if there is one."""
    adapter = study / name / "adapter"
    if (adapter / SAMPLES_NAME).exists():
        return
    wanted = _of_samples(lines[name])
    for other, line in lines.items():
        made = [study / other / "adapter" / file for file in (SAMPLES_NAME, MADE_NAME)]
        if all(path.exists() for path in made) and _of_samples(line) == wanted:
            adapter.mkdir(parents=True, exist_ok=True)
            for path in made:
                shutil.copy(path, adapter)
            print(f"  prompts of {other}", flush=True)
            return


def _of_samples(line: list[str]) -> dict[str, object]:
    arguments = vars(gpu_adapt.parse([*line, "--out", "."]))
    return {key: arguments[key] for key in _OF_SAMPLES}


def write_result(study: Path, main_name: str, output: Path) -> None:
    """Write what is known so far; nothing before the main variant was trained."""
    if not (study / main_name / "adapter" / REPORT_NAME).exists():
        return
    result = combine.combine(study, main_name)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    combine.print_table(result)


if __name__ == "__main__":
    main()
