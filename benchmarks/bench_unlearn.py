# SPDX-License-Identifier: Apache-2.0
"""Unlearning TOFU forget10 from a small model on one GPU: SIMU, its controls and baselines at matched forgetting.

Fine-tunes the model on forget10 + retain90 (original model) and on retain90 alone (retrained model, the gold standard),
then runs every arm with every seed until the forget answers are as unlikely as under the retrained model, and measures
utility, forget quality and probes there.

    python benchmarks/bench_unlearn.py --model MODEL --data TOFU_FOLDER --output RESULTS --work WORK --workers 8

MODEL is a folder in transformers' format or a .gguf file (which needs the package gguf). WORK holds the fine-tuned
models and one file per run, written after each stage: the same command again goes on where the last one ended. A small
model leaves a GPU waiting for the host, so several processes share it; a run's time is then that of a shared GPU, and
`--alone ARMS` measures some arms again with nothing beside them.
"""

import argparse
import copy
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging
from unlearn_models import fine_tune, load_base, load_tofu
from unlearn_records import REFERENCES, Record, claim, read_json, results_of, say, write_json
from unlearn_seven_b import peak, reset_peak, seven_b
from unlearn_table import table

from lazyattention.unlearn.attribution import AttributionScores
from lazyattention.unlearn.compare import Arm, CompareOptions, attribution_key, run_arm
from lazyattention.unlearn.config import UnlearnConfig
from lazyattention.unlearn.metrics import EvalOptions, evaluate
from lazyattention.unlearn.metrics.quick import evenly_spaced, measure
from lazyattention.unlearn.presets import preset
from lazyattention.unlearn.probes import ProbeOptions, run_probes
from lazyattention.unlearn.report import render_comparison
from lazyattention.unlearn.simu import UnlearnSets, run_attribution
from lazyattention.utils.environment import describe_environment
from lazyattention.utils.hashing import digest_fields

ARMS = (
    "simu", "simu+random", "simu+none", "soul", "graddiff", "simu+all", "simu+contrast", "simu+adamw", "npo",
    "simu-mlp", "simu-mlp+random",
)  # fmt: skip
# Full-model first order needs a higher rate than the methods' defaults for 7B; every arm gets its own, stated here.
LEARNING_RATES = {"simu": 4e-5, "simu+adamw": 4e-5, "simu-mlp": 2e-4, "soul": 1e-5, "graddiff": 2e-5, "npo": 2e-5}
# The retrained model's, for the others' forget quality.
LOGGED_METRICS = ("probability", "truth_ratio")
METRICS = (
    "probability", "extraction_strength", "exact_memorization", "truth_ratio", "forget_quality", "rouge_l",
    "model_utility",
)  # fmt: skip
# Seconds between the last start of a run and the end that workers get before they are stopped.
_GRACE_S = 25.0
# Seconds between two looks at what the workers have written.
_MERGE_EVERY_S = 2.0
# What a run takes at least, until one has been seen.
_SHORTEST_RUN_S = 15.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or .gguf file")
    parser.add_argument(
        "--data", type=Path, help="folder with tofu_forget10.json, tofu_retain90.json, *_perturbed.json"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for JSON and HTML")
    parser.add_argument("--work", type=Path, help="fine-tuned models and runs; default: OUTPUT/work")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device; 1 = this one alone")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no run is started that would end later")
    parser.add_argument("--arms", default=",".join(ARMS), help="with commas; the first is the reference")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="arm:seed with commas, original:0 and retrained:0 among them; default: all")
    parser.add_argument("--alone", help="arms with commas: at the end train each with nothing beside it")
    parser.add_argument("--merge", action="store_true", help="start no run; write results and table from WORK")
    parser.add_argument("--epochs", type=int, default=6, help="of fine-tuning")
    parser.add_argument("--lr", type=float, default=3e-4, help="of fine-tuning")
    parser.add_argument("--batch-size", type=int, default=64, help="of fine-tuning")
    parser.add_argument("--unlearn-epochs", type=int, default=10)
    parser.add_argument("--num-steps", type=int, default=10, help="points of the integrated gradients")
    parser.add_argument("--eval-batch-size", type=int, default=200)
    parser.add_argument("--probes", default="quantize,relearn,paraphrase,prefix", help="none = none")
    parser.add_argument("--probe-seeds", type=int, default=1, help="seeds that are probed, from 0 on")
    parser.add_argument("--set", action="append", default=[], help="section.option=value for every arm")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--smoke", action="store_true", help="a few examples and steps: proves the script, not the method"
    )
    parser.add_argument(
        "--seven-b", action="store_true", help="also measure a 7B shape with random weights, at the end"
    )
    parser.add_argument("--only-seven-b", action="store_true")
    # What a worker is told by the process that starts it.
    parser.add_argument("--prepare", choices=REFERENCES, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=time.time(), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.work = args.work or args.output / "work"
    return args


def seconds_left(args: argparse.Namespace) -> float:
    """Until the budget's end."""
    return args.started + args.budget_s - time.time()


def arm_config(name: str, args: argparse.Namespace) -> UnlearnConfig:
    """The method's preset with this benchmark's schedule."""
    lr = LEARNING_RATES.get(name) or LEARNING_RATES[name.partition("+")[0]]
    overrides = {
        "optimizer.lr": lr,
        "train.num_epochs": 1 if args.smoke else args.unlearn_epochs,
        "train.batch_size": 2 if args.smoke else 16,
        "train.warmup_ratio": 0.1,
        "train.schedule": "constant_with_warmup",
        "attribution.num_steps": 1 if args.smoke else args.num_steps,
        "attribution.batch_size": 4 if args.smoke else 200,
        "attribution.max_examples": 2 if args.smoke else 400,
        "guards.eval_every": 1 if args.smoke else 5,
        "guards.num_examples": 4 if args.smoke else 100,
    }
    overrides |= dict(option.split("=", 1) for option in args.set)
    return preset(name, overrides=overrides)


def scores_path(args: argparse.Namespace, config: UnlearnConfig) -> Path:
    """Where step 1's scores of this configuration lie."""
    return args.work / f"scores_{digest_fields((attribution_key(config),)).hex()[:12]}.safetensors"


def prepare(name: str, args: argparse.Namespace) -> None:
    """Fine-tune one model, and measure what the arms need of it: the level and logs of the retrained one."""
    settings = {key: getattr(args, key) for key in ("model", "smoke", "epochs", "lr", "batch_size")}
    record = Record(args, args.work / f"prepared_{name}.json", {"settings": settings})
    if record.path.exists():
        record.content = read_json(record.path)
        if record.content["settings"] != settings:
            raise SystemExit(f"{args.work} holds models made with {record.content['settings']}; give another --work")
    record.content["status"] = "running"
    folder = args.work / name
    data = load_tofu(args.data, args.smoke)
    if "fine_tuning" not in record.content:
        with record.stage("load"):
            model, tokenizer = load_base(args.model, args.device)
        examples = [*data["forget"], *data["retain"]] if name == "original" else data["retain"]
        with record.stage("fine-tune"):
            reset_peak(args.device)
            record.content["fine_tuning"] = fine_tune(
                model,
                tokenizer,
                examples,
                num_epochs=1 if args.smoke else args.epochs,
                lr=args.lr,
                batch_size=args.batch_size,
            ) | {"num_examples": len(examples), "peak_memory_bytes": peak(args.device)}
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    else:
        model, tokenizer = load_prepared(name, args)
    if "reference" not in record.content:
        with record.stage("measure"):
            record.content["reference"] = {
                # The very examples that guards measure.
                split: measure(
                    model,
                    tokenizer,
                    evenly_spaced(data[split], 4 if args.smoke else 100),
                    batch_size=args.eval_batch_size,
                    with_rouge=False,
                )  # fmt: skip
                for split in ("forget", "retain")
            }
            if name == "retrained":
                logs = evaluate(
                    model, tokenizer, data["eval"], metrics=LOGGED_METRICS, batch_size=args.eval_batch_size,
                    progress=False, options=eval_options(args),
                )  # fmt: skip
                write_json(args.work / "retrained_logs.json", logs)
        say(args, f"{name}: forget loss {record.content['reference']['forget']['mean_nll']:.3f}")
    record.content["status"] = "done"
    record.write()


def load_prepared(name: str, args: argparse.Namespace) -> tuple[Any, Any]:
    """A fine-tuned model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(args.work / name, dtype=torch.float32)
    return model.to(args.device).eval(), AutoTokenizer.from_pretrained(args.work / name)


def eval_options(args: argparse.Namespace) -> EvalOptions:
    """Answers of TOFU's authors have 34 tokens on average and at most 77."""
    return EvalOptions(max_new_tokens=8 if args.smoke else 64)


def jobs_of(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Every run as (arm, seed): the references first, then seed by seed."""
    jobs = [(name, 0) for name in REFERENCES]
    jobs += [(arm, seed) for seed in range(args.seeds) for arm in args.arms.split(",")]
    if args.only is None:
        return jobs
    wanted = [(name, int(seed)) for name, _, seed in (item.partition(":") for item in args.only.split(","))]
    return [job for job in wanted if job in jobs or job[0] in ARMS]


def job_path(args: argparse.Namespace, arm: str, seed: int) -> Path:
    """The run's file."""
    return args.work / "runs" / f"{arm}.{seed}.json"


def release_unfinished(args: argparse.Namespace) -> None:
    """Forget runs that an earlier call began and did not end; others may be at work on what `--only` leaves out."""
    for path in (job_path(args, arm, seed) for arm, seed in jobs_of(args)):
        if path.exists() and read_json(path)["status"] != "done":
            path.unlink()
    for path in (scores_path(args, arm_config(arm, args)) for arm in args.arms.split(",")):
        if not path.exists():
            path.with_suffix(".json").unlink(missing_ok=True)


def work_on(args: argparse.Namespace) -> None:
    """Take one run after the other until none is left or the budget ends."""
    data, longest = None, _SHORTEST_RUN_S
    for arm, seed in jobs_of(args):
        path = job_path(args, arm, seed)
        if seconds_left(args) < longest or not claim(path):
            continue
        if data is None:
            data = load_tofu(args.data, args.smoke)
            original, tokenizer = load_prepared("original", args)
        record = Record(args, path, {"arm": arm, "seed": seed, "status": "running", "num_workers": args.workers})
        start = time.monotonic()
        try:
            if arm in REFERENCES:
                model = original if arm == "original" else load_prepared(arm, args)[0]
            else:
                model = unlearn_arm(record, arm, seed, copy.deepcopy(original), tokenizer, data, args)
            measure_model(record, model, tokenizer, data, args)
            record.content["status"] = "done"
        except Exception:
            # One arm that fails (out of memory, no weight changed) must not end the others.
            record.content |= {"status": "failed", "error": traceback.format_exc()}
            say(args, f"{path.stem}: failed\n{traceback.format_exc()}")
        record.write()
        if not args.worker:
            merge(args)
        model = None
        longest = max(longest, time.monotonic() - start)


def unlearn_arm(
    record: Record, arm: str, seed: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: dict[str, Any],
    args: argparse.Namespace,
) -> PreTrainedModel:  # fmt: skip
    """Run one arm to the retrained model's level and note it in the record."""
    sets = UnlearnSets(forget=data["forget"], retain=data["retain"])
    config = arm_config(arm, args)
    scores = None
    if config.needs_attribution:
        with record.stage("attribution"):
            scores = shared_scores(record, model, tokenizer, sets, config, args)
    with record.stage("unlearn"):
        run, result = run_arm(model, tokenizer, sets, Arm(arm, config), seed, compare_options(args), scores=scores)
        record.content["run"] = run
    last = run["trajectory"][-1]
    say(args, f"{record.path.stem}: {run['stop_reason']} at step {last['step']}, matched {run['matched_utility']}")
    return result.model


def shared_scores(
    record: Record, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sets: UnlearnSets,
    config: UnlearnConfig, args: argparse.Namespace,
) -> AttributionScores:  # fmt: skip
    """Step 1, once for all arms and seeds: the first process that needs the scores computes them, others wait."""
    path = scores_path(args, config)
    if claim(path.with_suffix(".json")):
        reset_peak(args.device)
        scores = run_attribution(model, tokenizer, sets, config)
        record.content["attribution"] = {"elapsed_s": scores.elapsed_s, "peak_memory_bytes": peak(args.device)}
        scores.save(path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    while not path.exists():
        time.sleep(0.2)
    return AttributionScores.load(path)


def compare_options(args: argparse.Namespace) -> CompareOptions:
    """Match at the retrained model's forget loss."""
    reference = read_json(args.work / "prepared_retrained.json")["reference"]
    return CompareOptions(seeds=tuple(range(args.seeds)), level=reference["forget"]["mean_nll"])


def measure_model(
    record: Record, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: dict[str, Any],
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """Metrics of a model, and probes of the first seeds."""
    reset_peak(args.device)
    with record.stage("evaluate"):
        report = evaluate(
            model, tokenizer, data["eval"], metrics=METRICS, batch_size=args.eval_batch_size, progress=False,
            retrained_logs=args.work / "retrained_logs.json", options=eval_options(args),
        )  # fmt: skip
        record.content["evaluation"] = {
            "summary": report["summary"],
            "forget_quality": report["metrics"]["forget_quality"],
            "utility_parts": report["metrics"]["model_utility"]["parts"],
            "timings_s": report["timings_s"],
        }
    if args.probes != "none" and record.content["seed"] < args.probe_seeds:
        options = ProbeOptions(
            batch_size=args.eval_batch_size,
            max_examples=2 if args.smoke else 60,
            relearn_steps=(1,) if args.smoke else (5, 20),
        )
        with record.stage("probe"):
            record.content["probes"] = run_probes(
                lambda: copy.deepcopy(model), tokenizer, data["eval"], probes=args.probes.split(","), seed=0,
                progress=False, options=options,
            )  # fmt: skip
    record.content["measuring_peak_memory_bytes"] = peak(args.device)


def time_alone(args: argparse.Namespace) -> None:
    """Train each of `--alone` with seed 0 and nothing beside it, twice: the first warms up."""
    data = load_tofu(args.data, args.smoke)
    original, tokenizer = load_prepared("original", args)
    path = args.work / "alone.json"
    record = Record(args, path, read_json(path) if path.exists() else {})
    for index, arm in enumerate(args.alone.split(",")):
        for name in ([f"{arm} (warm-up)"] if index == 0 else []) + [arm]:
            single = Record(args, args.work / f"alone_{name}.json", {})
            unlearn_arm(single, arm, 0, copy.deepcopy(original), tokenizer, data, args)
        run = single.content["run"]
        keys = ("training_s", "elapsed_s", "peak_memory_bytes")
        record.content[arm] = {key: run[key] for key in keys} | {"num_steps": run["trajectory"][-1]["step"]}
        record.write()


def start(args: argparse.Namespace, *more: str) -> "subprocess.Popen[bytes]":
    """Start this script again with the same arguments and some more."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", "--started", str(args.started), *more]
    return subprocess.Popen(command)


def wait_for(args: argparse.Namespace, processes: list["subprocess.Popen[bytes]"], limit_s: float) -> None:
    """Wait until all have ended, but no longer than `limit_s` after the start; then stop those that are left."""
    while any(process.poll() is None for process in processes) and time.time() - args.started < limit_s:
        time.sleep(_MERGE_EVERY_S)
        merge(args)
    for process in processes:
        if process.poll() is None:
            say(args, f"process {process.pid} stopped at the end of the budget")
            process.terminate()
    for process in processes:
        process.wait()


def run_all(args: argparse.Namespace) -> None:
    """Both fine-tunings, then all runs: in processes side by side, or one after the other in this one."""
    release_unfinished(args)
    limit_s = args.budget_s + _GRACE_S
    if args.workers > 1:
        wait_for(args, [start(args, "--prepare", name) for name in REFERENCES], limit_s)
    else:
        for name in REFERENCES:
            prepare(name, args)
    if not all(is_prepared(name, args) for name in REFERENCES):
        raise SystemExit("fine-tuning failed or ran out of time, see above; the same command goes on from here")
    if args.workers > 1:
        wait_for(args, [start(args) for _ in range(args.workers)], limit_s)
    else:
        work_on(args)


def is_prepared(name: str, args: argparse.Namespace) -> bool:
    """Whether a fine-tuned model and its measurements are there."""
    path = args.work / f"prepared_{name}.json"
    return path.exists() and read_json(path)["status"] == "done"


def merge(args: argparse.Namespace) -> dict[str, Any] | None:
    """Write everything found in WORK as one file; nothing before both models are there."""
    if not all(is_prepared(name, args) for name in REFERENCES):
        return None
    path = args.output / "bench_unlearn.json"
    results = results_of(args.work, compare_options(args), args.arms.split(","))
    results["environment"] = describe_environment()
    # Where no checkout is, whoever copied the tree says which commit it was.
    results["commit"] = os.environ.get("COMMIT", "")
    results["arguments"] = {key: str(value) for key, value in vars(args).items()}
    results["configurations"] = {arm: arm_config(arm, args).to_dict() for arm in args.arms.split(",")}
    results["elapsed_s"] = time.time() - args.started
    if path.exists() and "seven_b" in (earlier := read_json(path)):
        results["seven_b"] = earlier["seven_b"]
    write_json(path, results)
    (args.output / "bench_unlearn.html").write_text(render_comparison(results["comparison"]), encoding="utf-8")
    return results


def main() -> None:
    """Run what the command line asks for; the table comes last."""
    args = parse_arguments()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_float32_matmul_precision("high")
    args.output.mkdir(parents=True, exist_ok=True)
    if args.worker:
        prepare(args.prepare, args) if args.prepare else work_on(args)
        return
    if not args.only_seven_b:
        if not args.merge:
            run_all(args)
        if args.alone:
            time_alone(args)
        results = merge(args)
        if results is None:
            raise SystemExit(f"{args.work} holds no fine-tuned models yet; run without --merge first")
        print(table(results), flush=True)
    if args.seven_b or args.only_seven_b:
        path = args.output / "bench_unlearn.json"
        say(args, "7B shape")
        results = (read_json(path) if path.exists() else {}) | {"seven_b": seven_b(args.device)}
        write_json(path, results)
        say(args, f"7B shape: {results['seven_b']}")


if __name__ == "__main__":
    main()
