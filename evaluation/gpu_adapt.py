# SPDX-License-Identifier: Apache-2.0
"""Measure a model, adapt it, measure it again, in one go: what reuse costs in answers and what `adapt` gives back.

    PYTHONPATH=src python3 evaluation/gpu_adapt.py --model model.gguf --data-folder DATA --out OUT

DATA holds nq-open-oracle.jsonl.gz and hotpotqa_100.json. Training sees Natural Questions only, other questions and other
articles than are tested. Everything runs in the real engine. OUT receives NAME-adapt.json (after every stage, so that a
run cut short leaves what it has) and the records of both runs; it goes on where it stopped. About 4 minutes on one H200
for 0.5B parameters with the defaults.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tasks import TASKS

from lazyattention.adapt.config import AdaptConfig
from lazyattention.adapt.workflow import REPORT_NAME, AdaptRequest, run_adapt
from lazyattention.config import EngineConfig
from lazyattention.engine.engine import Engine
from lazyattention.engine.scoring import score
from lazyattention.models.loaded_model import LoadedModel
from lazyattention.models.loader import load_model
from lazyattention.quality.measure import MeasureConfig, measure, read_records
from lazyattention.quality.options import FULL_ATTENTION
from lazyattention.quality.report import loss_of, summarize, summarize_against
from lazyattention.quality.statistics import paired_difference
from lazyattention.utils.environment import describe_environment

# Plain text, as a prompt of 96 tokens and its next 64: does the adapter leave ordinary use alone?
_PLAIN_PROMPT_LEN, _PLAIN_TARGET_LEN = 96, 64
_STARTED_S = time.perf_counter()


def main() -> None:
    """Run all stages that are not done yet."""
    arguments = parse()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    loaded = load(arguments, adapter=None)
    result_path = out / f"{arguments.name or loaded.name}-adapt.json"
    result: dict[str, Any] = {
        "model": loaded.name,
        "environment": describe_environment(),
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "seconds": {},
        "tasks": {},
        "against_unadapted_full": {},
        "retained_share": {},
    }

    def save(stage: str) -> None:
        result["seconds"][stage] = round(time.perf_counter() - _STARTED_S, 1)
        result_path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"{stage}: {result['seconds'][stage]} s", flush=True)

    save("load")
    measure_stage(arguments, loaded, "unadapted", result)
    save("measure unadapted")
    adapter = out / "adapter"
    if not (adapter / "adapter_model.safetensors").exists():
        adapt_stage(arguments, loaded, adapter)
        save("adapt")
    result["training"] = json.loads((adapter / REPORT_NAME).read_text())
    del loaded
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    loaded = load(arguments, adapter=str(adapter))
    measure_stage(arguments, loaded, "adapted", result)
    compare(arguments, result)
    save("measure adapted")
    print_table(result)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or GGUF file")
    parser.add_argument("--name", help="of the result file; default: the model's")
    parser.add_argument("--data-folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["nq-10", "nq-20", "hotpotqa-10"])
    parser.add_argument("--num-questions", type=int, nargs="+", default=[200, 100, 100], help="per task")
    parser.add_argument("--options", nargs="+", default=["after_preamble", "isolated"])
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=50)
    parser.add_argument("--num-plain", type=int, default=50, help="plain texts")
    parser.add_argument("--train", default="nq-train:nq-open-oracle.jsonl.gz", help="data set and file in the folder")
    parser.add_argument("--train-questions", type=int, default=1200)
    parser.add_argument("--train-documents", type=int, nargs=2, default=(10, 10))
    parser.add_argument("--minutes", type=float, default=2.0, help="of training")
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--eval-steps", type=int, default=40)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--encoding", default="after_preamble")
    parser.add_argument("--full-share", type=float, default=0.2)
    parser.add_argument("--question-weight", type=float, default=0.1)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-blocks", type=int, help="KV blocks of the engine")
    parser.add_argument("--compile", action="store_true", help="compile layers and record graphs; slower to start")
    arguments = parser.parse_args()
    if len(arguments.num_questions) == 1:
        arguments.num_questions *= len(arguments.tasks)
    if len(arguments.num_questions) != len(arguments.tasks):
        parser.error("--num-questions: give one number, or one per task")
    return arguments


def load(arguments: argparse.Namespace, adapter: str | None) -> LoadedModel:
    """Load the model, with or without the adapter."""
    return load_model(arguments.model, dtype=arguments.dtype, adapter=adapter, progress=False)


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Options of every engine here: memory is shared with training, so not all of it is taken."""
    is_compiled = None if arguments.compile else False
    on_gpu = torch.cuda.is_available()
    memory = {"kv_memory_bytes": 24 << 30} if on_gpu and arguments.num_blocks is None else {}
    return EngineConfig.of(
        num_blocks=arguments.num_blocks,
        max_num_batched_tokens=16384 if on_gpu else 2048,
        compile=is_compiled,
        cuda_graphs=is_compiled,
        **memory,
    )


def measure_stage(arguments: argparse.Namespace, loaded: LoadedModel, stage: str, result: dict[str, Any]) -> None:
    """Ask all tasks' questions; records go to OUT/STAGE/TASK."""
    engine = Engine(loaded, engine_config(arguments))
    config = MeasureConfig(
        options=tuple(arguments.options), max_tokens=arguments.max_tokens, group_size=arguments.group_size
    )
    for name, num_questions in zip(arguments.tasks, arguments.num_questions, strict=True):
        examples = TASKS[name].examples(arguments.data_folder, num_questions)
        started_s = time.perf_counter()
        records = measure(engine, examples, config, arguments.out / stage / name)
        entry = summarize(records)
        entry["seconds"] = round(time.perf_counter() - started_s, 1)
        entry["loss"] = {option: asdict(loss_of(records, option, name)) for option in arguments.options}
        result["tasks"].setdefault(name, {})[stage] = entry
        print(f"  {stage} {name}: {len(records)} questions, {entry['seconds']} s", flush=True)
    result.setdefault("plain_text_nll", {})[stage] = plain_text_nlls(arguments, engine)
    engine.model_runner.kv_pool.layers.clear()


def plain_text_nlls(arguments: argparse.Namespace, engine: Engine) -> list[float]:
    """NLL per token of ordinary text behind ordinary text, no documents: one value per text."""
    texts = []
    for example in TASKS[arguments.tasks[0]].examples(arguments.data_folder):
        text = " ".join(document.text for document in example.documents[:2])
        token_ids = list(engine.loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(token_ids) >= _PLAIN_PROMPT_LEN + _PLAIN_TARGET_LEN:
            texts.append(token_ids)
        if len(texts) == arguments.num_plain:
            break
    nlls: list[float] = []
    for start in range(0, len(texts), 10):  # distributions over the vocabulary are kept for each target token
        part = texts[start : start + 10]
        layouts = [engine.prompts.text(token_ids[:_PLAIN_PROMPT_LEN]) for token_ids in part]
        targets = [ids[_PLAIN_PROMPT_LEN : _PLAIN_PROMPT_LEN + _PLAIN_TARGET_LEN] for ids in part]
        nlls += [one.nll for one in score(engine, layouts, targets)]
    return nlls


def adapt_stage(arguments: argparse.Namespace, loaded: LoadedModel, adapter: Path) -> None:
    """Train the adapter; its folder keeps samples, log and checkpoint."""
    name, _, file = arguments.train.partition(":")
    request = AdaptRequest(
        data=(f"{name}:{arguments.data_folder / file}" if file else name,),
        output=adapter,
        num_questions=arguments.train_questions,
        num_documents=tuple(arguments.train_documents),
        max_tokens=arguments.max_tokens,
        config=AdaptConfig(
            encoding=arguments.encoding,
            rank=arguments.rank,
            alpha=2 * arguments.rank,
            full_share=arguments.full_share,
            question_weight=arguments.question_weight,
            micro_batch_tokens=arguments.micro_batch_tokens,
            max_minutes=arguments.minutes,
            max_steps=arguments.max_steps,
            eval_steps=arguments.eval_steps,
            held_out=min(64, arguments.train_questions // 4),
            seed=arguments.seed,
        ),
    )
    run_adapt(loaded, request, engine_config(arguments))


def compare(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Compare the adapted model under each mask with the unadapted one under full attention, question by question."""
    for name in arguments.tasks:
        before = read_records(arguments.out / "unadapted" / name)
        after = read_records(arguments.out / "adapted" / name)
        against = summarize_against(after, before)
        result["against_unadapted_full"][name] = against
        trained = against["options"][arguments.encoding]
        result["retained_share"][name] = trained.get("containment", {}).get("retained_share")
    plain = result["plain_text_nll"]
    difference = paired_difference(plain["adapted"], plain["unadapted"])
    result["plain_text_nll_difference"] = difference.to_dict()


def print_table(result: dict[str, Any]) -> None:
    """Print one row per task and option: gold answer greedy-exact (NLL), containment."""
    print(f"\n{'task':12} {'option':16} {'gold greedy':>24} {'gold NLL':>18} {'contains gold':>24}")
    for name, stages in result["tasks"].items():
        for option in stages["unadapted"]["options"]:
            cells = []
            for metric, width in (("gold_greedy", 24), ("gold_nll", 18), ("containment", 24)):
                values = [
                    stages[stage]["options"][option][metric]["value"]["mean"] for stage in ("unadapted", "adapted")
                ]
                cells.append(f"{values[0]:.3f} -> {values[1]:.3f}".rjust(width))
            print(f"{name:12} {option:16} {' '.join(cells)}")
        against = result["against_unadapted_full"][name]["options"]
        for option, metrics in against.items():
            difference = metrics["containment"]["difference"]
            label = f"adapted {option} - unadapted {FULL_ATTENTION.name}"
            print(f"{'':12} {label}: {difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]")
    print(f"retained share (containment): {result['retained_share']}")
    difference = result["plain_text_nll_difference"]
    print(f"plain text NLL: {difference['mean']:+.4f} [{difference['low']:+.4f}, {difference['high']:+.4f}]")


if __name__ == "__main__":
    main()
