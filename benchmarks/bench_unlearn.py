# SPDX-License-Identifier: Apache-2.0
"""Unlearning TOFU forget10 from a small model on one GPU: SIMU, its controls and baselines at matched forgetting.

Fine-tunes the model on forget10 + retain90 (original model) and on retain90 alone (retrained model, the gold standard),
then runs every arm with every seed until the forget answers are as unlikely as under the retrained model, and measures
utility, forget quality and probes there. `--seven-b` measures step 1 and step 2 on random weights of a 7B shape.

    python benchmarks/bench_unlearn.py --model MODEL --data TOFU_FOLDER --output RESULTS [--seven-b] [--smoke]

MODEL is a folder in transformers' format or a .gguf file (which needs the package gguf).
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lazyattention.unlearn.architectures import architecture_of
from lazyattention.unlearn.attribution import attribute, estimate_cost
from lazyattention.unlearn.audit import environment
from lazyattention.unlearn.batch import TokenBatch, logits_of, mean_nll, pad_right
from lazyattention.unlearn.compare import Arm, CompareOptions, compare
from lazyattention.unlearn.config import AttributionConfig, OptimizerConfig, UnlearnConfig
from lazyattention.unlearn.curvature import gauss_newton_bartlett
from lazyattention.unlearn.data import QAExample, encode_examples, load_examples, pad_id_of
from lazyattention.unlearn.masked_step import clip_gradients
from lazyattention.unlearn.metrics import EvalOptions, evaluate
from lazyattention.unlearn.metrics.quick import measure
from lazyattention.unlearn.neuron_mask import NeuronMask, freeze_all_but, random_mask, trainable_parameters
from lazyattention.unlearn.presets import preset
from lazyattention.unlearn.probes import ProbeOptions, run_probes
from lazyattention.unlearn.report import render_comparison
from lazyattention.unlearn.simu import UnlearnResult, UnlearnSets
from lazyattention.unlearn.sophia import MaskedSophia

ARMS = (
    "simu", "simu+random", "simu+none", "simu+all", "simu+contrast", "simu+adamw",
    "simu-mlp", "simu-mlp+random", "soul", "graddiff", "npo",
)  # fmt: skip
# Full-model first order needs a higher rate than the methods' defaults for 7B; every arm gets its own, stated here.
LEARNING_RATES = {"simu": 2e-5, "simu+adamw": 2e-5, "simu-mlp": 2e-4, "soul": 1e-5, "graddiff": 1e-5, "npo": 1e-5}
LIKELIHOOD_METRICS = ("probability", "extraction_strength", "exact_memorization", "truth_ratio", "forget_quality")
ALL_METRICS = (*LIKELIHOOD_METRICS, "rouge_l", "model_utility")
console = Console(width=160)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or .gguf file")
    parser.add_argument(
        "--data", type=Path, help="folder with tofu_forget10.json, tofu_retain90.json, *_perturbed.json"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for JSON and HTML")
    parser.add_argument("--work", type=Path, help="keeps fine-tuned weights between calls; default: nowhere")
    parser.add_argument("--arms", default=",".join(ARMS), help="with commas; the first is the reference")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5, help="of fine-tuning")
    parser.add_argument("--lr", type=float, default=1e-4, help="of fine-tuning")
    parser.add_argument("--unlearn-epochs", type=int, default=10)
    parser.add_argument("--num-steps", type=int, default=10, help="points of the integrated gradients")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no run is started that would end later")
    parser.add_argument("--probes", default="quantize,relearn,paraphrase,prefix", help="of seed 0; none = none")
    parser.add_argument("--set", action="append", default=[], help="section.option=value for every arm")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--smoke", action="store_true", help="a few examples and steps: proves the script, not the method"
    )
    parser.add_argument("--seven-b", action="store_true", help="also measure a 7B shape with random weights")
    parser.add_argument("--only-seven-b", action="store_true")
    return parser.parse_args()


def load_base(path: str, device: str) -> tuple[Any, Any]:
    """Load weights in float32; a GGUF file is dequantised into a clean model."""
    if not path.endswith(".gguf"):
        tokenizer = AutoTokenizer.from_pretrained(path)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device), tokenizer
    file = Path(path)
    options = {"gguf_file": file.name, "dtype": torch.float32}
    try:
        from transformers.utils.quantization_config import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass  # this transformers dequantises by itself
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    config = AutoConfig.for_model(
        loaded.config.model_type,
        **{k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "model_type")},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    return model.to(device), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def load_tofu(folder: Path, smoke: bool) -> dict[str, Any]:
    """Forget, retain and the perturbed sets for truth ratio and utility."""
    limit = {"forget": 4, "retain": 8} if smoke else {"forget": None, "retain": None}
    num = 3 if smoke else 100
    return {
        "forget": load_examples(folder / "tofu_forget10.json", split="forget", limit=limit["forget"]),
        "retain": load_examples(folder / "tofu_retain90.json", split="retain", limit=limit["retain"]),
        "eval": {
            "forget": load_examples(folder / "tofu_forget10_perturbed.json", split="forget")[: num * 4 : 4],
            "retain": load_examples(folder / "tofu_retain_perturbed.json", split="retain")[: num * 4 : 4],
            "real_authors": load_examples(folder / "tofu_real_authors_perturbed.json", split="real_authors", limit=num),
            "world_facts": load_examples(folder / "tofu_world_facts_perturbed.json", split="world_facts", limit=num),
        },
    }


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[QAExample],
    *,
    num_epochs: int,
    lr: float,
    batch_size: int = 32,
    seed: int = 0,
) -> PreTrainedModel:
    """Plain AdamW with warm-up and linear decay; bf16 autocast on a GPU."""
    torch.manual_seed(seed)
    rows = [(e.input_ids, e.labels) for e in encode_examples(tokenizer, examples)]
    num_steps = num_epochs * -(-len(rows) // batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=model.device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(num_steps // 20, 1), 1 - step / (num_steps + 1))
    )
    rng = random.Random(seed)
    model.train()
    for _ in range(num_epochs):
        rng.shuffle(rows)
        for start in range(0, len(rows), batch_size):
            batch = pad_right(rows[start : start + batch_size], pad_id_of(tokenizer)).to(model.device)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                loss = mean_nll(logits_of(model, batch), batch.labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()


def prepared(
    name: str,
    args: argparse.Namespace,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[QAExample],
) -> PreTrainedModel:
    """The fine-tuned model called `name`, from `--work` if it is there."""
    path = args.work / f"{name}.pt" if args.work else None
    model = copy.deepcopy(base)
    if path and path.exists():
        model.load_state_dict(torch.load(path, map_location=args.device, weights_only=True))
        return model
    start = time.monotonic()
    fine_tune(
        model,
        tokenizer,
        examples,
        num_epochs=1 if args.smoke else args.epochs,
        lr=args.lr,
        batch_size=4 if args.smoke else 32,
    )
    console.print(f"{name}: fine-tuned on {len(examples)} examples in {time.monotonic() - start:.0f} s")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    return model


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
        "attribution.batch_size": 4 if args.smoke else 64,
        "attribution.max_examples": 2 if args.smoke else 400,
        "guards.eval_every": 1 if args.smoke else 5,
        "guards.num_examples": 4 if args.smoke else 100,
    }
    overrides |= dict(option.split("=", 1) for option in args.set)
    return preset(name, overrides=overrides)


def evaluator(
    args: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    data: dict[str, Any],
    retrained_logs: dict[str, Any] | None,
    start: float,
) -> Callable[[Any, int], tuple[dict[str, Any], dict[str, Any]]]:
    """Measure a model: everything and the probes for seed 0, likelihoods for the others."""
    options = EvalOptions(max_new_tokens=8 if args.smoke else 48)

    def measured(model: PreTrainedModel, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            metrics = ALL_METRICS if seed == 0 else LIKELIHOOD_METRICS
            metrics = [m for m in metrics if m != "forget_quality" or retrained_logs is not None]
            report = evaluate(
                model, tokenizer, data["eval"], metrics=metrics, batch_size=4 if args.smoke else 100, retrained_logs=retrained_logs,
                progress=False, options=options,
            )  # fmt: skip
            found = {"summary": report["summary"], "forget_quality": report["metrics"].get("forget_quality")}
            if seed == 0 and args.probes != "none" and time.monotonic() - start < args.budget_s:
                probe_options = ProbeOptions(
                    batch_size=4 if args.smoke else 64,
                    max_examples=2 if args.smoke else 60,
                    relearn_steps=(1,) if args.smoke else (5, 20),
                )
                found["probes"] = run_probes(
                    lambda: copy.deepcopy(model), tokenizer, data["eval"], probes=args.probes.split(","), seed=0,
                    progress=False, options=probe_options,
                )  # fmt: skip
        return found, report

    return measured


def run_tofu(args: argparse.Namespace, start: float) -> dict[str, Any]:
    """Fine-tune, run all arms, measure."""
    torch.set_float32_matmul_precision("high")
    base, tokenizer = load_base(args.model, args.device)
    data = load_tofu(args.data, args.smoke)
    original = prepared("original", args, base, tokenizer, [*data["forget"], *data["retain"]])
    retrained = prepared("retrained", args, base, tokenizer, data["retain"])
    del base
    reference = {
        name: {split: measure(model, tokenizer, data[split][:200], batch_size=4 if args.smoke else 64, with_rouge=False)
               for split in ("forget", "retain")}
        for name, model in (("original", original), ("retrained", retrained))
    }  # fmt: skip
    level = reference["retrained"]["forget"]["mean_nll"]
    console.print(f"forget loss: original {reference['original']['forget']['mean_nll']:.3f}, retrained {level:.3f}")
    measured = evaluator(args, tokenizer, data, None, start)
    found_retrained, retrained_logs = measured(retrained, 0)
    measured = evaluator(args, tokenizer, data, retrained_logs, start)
    models = {"original": measured(original, 0)[0], "retrained": found_retrained}
    del retrained
    longest = [0.0]
    last = [time.monotonic()]

    def may_start() -> bool:
        longest[0] = max(longest[0], time.monotonic() - last[0])
        last[0] = time.monotonic()
        return time.monotonic() - start + longest[0] < args.budget_s

    def on_result(arm: Arm, seed: int, result: UnlearnResult) -> dict[str, Any]:
        found, _ = measured(result.model, seed)
        console.print(f"{time.monotonic() - start:5.0f} s  {arm.name} seed {seed}: {result.guard.stop_reason}")
        return {"evaluation": found, "stop_reason": result.guard.stop_reason}

    comparison = compare(
        lambda: copy.deepcopy(original),
        tokenizer,
        UnlearnSets(forget=data["forget"], retain=data["retain"]),
        [Arm(name, arm_config(name, args)) for name in args.arms.split(",")],
        CompareOptions(seeds=tuple(range(1 if args.smoke else args.seeds)), level=level),
        on_result=on_result,
        may_start=may_start,
    )
    return {"reference": reference, "models": models, "comparison": comparison}


def seven_b(args: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of both steps on random weights of a Llama-2-7B shape; extrapolations are named so."""
    tiny = args.device == "cpu"
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 4} if tiny else {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}  # fmt: skip
    dtype = torch.float32 if tiny else torch.bfloat16
    torch.set_default_dtype(dtype)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=32000, **shape))
    torch.set_default_dtype(torch.float32)
    model.eval()
    size, seq_len, m = (2, 16, 2) if tiny else (8, 128, 4)
    input_ids = torch.randint(0, 32000, (size, seq_len), device=args.device)
    labels = input_ids.clone()
    labels[:, : seq_len // 2] = -100
    batch = TokenBatch(input_ids, torch.ones_like(input_ids), labels)
    result = {"num_params": sum(p.numel() for p in model.parameters()), "batch": [size, seq_len], "num_steps": m}
    for path in ("layerwise", "fast"):
        config = AttributionConfig(path=path, num_steps=m)
        attribute(model, [batch], None, AttributionConfig(path="fast"))  # warm-up
        reset_peak(args.device)
        scores = attribute(model, [batch], None, config)
        cost = estimate_cost(model, [batch], config)
        result[f"attribution_{path}"] = {
            "measured_s_per_batch": scores.elapsed_s, "flops_estimated": cost.flops,
            "flops_per_s": cost.flops / scores.elapsed_s, "peak_memory_bytes": peak(args.device),
        }  # fmt: skip
    whole = estimate_cost(model, [batch] * 50, AttributionConfig(num_steps=20))
    rate = result["attribution_layerwise"]["flops_per_s"]
    result["attribution_400_examples_20_points_extrapolated_s"] = whole.flops / rate
    result |= seven_b_steps(model, batch, args)
    return result


def seven_b_steps(model: PreTrainedModel, batch: TokenBatch, args: argparse.Namespace) -> dict[str, Any]:
    """Three SIMU updates: attention in full, 5 % of the neurons, compact optimizer.state with float32 copies."""
    architecture = architecture_of(model)
    num = architecture.down[0].num_neurons("in")
    layers = tuple(torch.arange(num) < max(num // 20, 1) for _ in architecture.layers)
    mask = random_mask(NeuronMask("in", layers), 0)
    params, selections = trainable_parameters(model, architecture, mask, "full")
    freeze_all_but(model, params.values())
    optimizer = MaskedSophia(list(params.values()), OptimizerConfig(), selections)
    generator, times = torch.Generator().manual_seed(0), []
    reset_peak(args.device)
    for step in range(3):
        synchronize(args.device)
        start = time.monotonic()
        if step == 0:
            num_predictions = gauss_newton_bartlett(lambda b: logits_of(model, b), batch, generator)
            optimizer.update_curvature(num_predictions)
            optimizer.zero_grad()
        mean_nll(logits_of(model, batch), batch.labels).backward()
        clip_gradients(params.values(), selections, 1.0, "trainable")
        optimizer.step()
        optimizer.zero_grad()
        synchronize(args.device)
        times.append(time.monotonic() - start)
    state = sum(
        t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)
    )
    dense = sum(p.numel() for p in model.parameters()) * 2 * 4
    return {
        "step_s": times, "optimizer_state_bytes": state, "dense_sophia_state_bytes_computed": dense,
        "training_peak_memory_bytes": peak(args.device),
    }  # fmt: skip


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    """Start measuring peak memory."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> int | None:
    """Peak memory in bytes; None on a CPU."""
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else None


def print_table(results: dict[str, Any]) -> None:
    """One line per arm: means over seeds; probes and utility of seed 0."""
    comparison = results["comparison"]
    table = Table(
        title=f"at forget loss {comparison['level']:.3f} (retrained model); utility = retain exact memorization"
    )
    head = ("arm", "matched", "utility", "difference", "KS", "KS p", "forget ES", "model utility", "relearn ES",
            "4-bit ES", "s/run", "GiB")  # fmt: skip
    for name in head:
        table.add_column(name)
    for name, found in results["models"].items():
        table.add_row(name, "", *("" for _ in range(2)), *evaluation_cells([found]), "", "")
    for arm in comparison["arms"]:
        runs = [run for run in comparison["runs"] if run["arm"] == arm["arm"]]
        if not runs:
            continue
        memory = [run["peak_memory_bytes"] for run in runs if run["peak_memory_bytes"]]
        table.add_row(
            arm["arm"], f"{arm['num_matched']}/{arm['num_runs']}", with_interval(arm["utility"]),
            with_interval(arm["difference"]), *evaluation_cells([run["evaluation"] for run in runs]),
            f"{sum(run['training_s'] for run in runs) / len(runs):.1f}",
            f"{max(memory) / 2**30:.1f}" if memory else "",
        )  # fmt: skip
    console.print(table)


def evaluation_cells(found: list[dict[str, Any]]) -> tuple[str, ...]:
    """Means over seeds; utility and probes of the first."""
    quality = [f["forget_quality"] for f in found if f.get("forget_quality")]
    strength = [f["summary"]["extraction_strength/forget"] for f in found]
    probes = found[0].get("probes", {}).get("probes", {})

    def probe(name: str) -> str:
        value = probes.get(name, {}).get("after", {}).get("forget", {}).get("extraction_strength")
        return "" if value is None else f"{value:.3f}"

    def mean(values: list[float | None]) -> str:
        given = [v for v in values if v is not None]
        return f"{sum(given) / len(given):.3g}" if given else ""

    return (
        mean([q["statistic"] for q in quality]), mean([q.get("value") for q in quality]),
        mean(strength), mean([found[0]["summary"].get("model_utility")]), probe("relearn"), probe("quantize"),
    )  # fmt: skip


def with_interval(part: dict[str, Any] | None) -> str:
    """Mean and bounds in one cell."""
    if not part or part["mean"] is None:
        return ""
    return f"{part['mean']:.3f}" + ("" if part["low"] is None else f" [{part['low']:.3f}, {part['high']:.3f}]")


def main() -> None:
    """Run what the command line asks for; the table comes last."""
    args, start = parse_arguments(), time.monotonic()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    args.output.mkdir(parents=True, exist_ok=True)
    results = {"environment": environment(), "arguments": {k: str(v) for k, v in vars(args).items()}}
    if not args.only_seven_b:
        results |= run_tofu(args, start)
        results["elapsed_s"] = time.monotonic() - start
        (args.output / "bench_unlearn.html").write_text(render_comparison(results["comparison"]), encoding="utf-8")
        write(results, args.output)
    if args.seven_b or args.only_seven_b:
        results["seven_b"] = seven_b(args)
        write(results, args.output)
        console.print(results["seven_b"])
    if "comparison" in results:
        print_table(results)


def write(results: dict[str, Any], folder: Path) -> None:
    """Write all results so far."""
    results["configurations"] = {
        name: arm_config(name, argparse.Namespace(smoke=False, unlearn_epochs=5, num_steps=10, set=[])).to_dict()
        for name in ARMS
    }
    (folder / "bench_unlearn.json").write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
