# SPDX-License-Identifier: Apache-2.0
"""Measure a model, adapt it, measure it again: what reuse costs in answers and what `adapt` gives back.

    PYTHONPATH=src python3 evaluation/gpu_adapt.py --model model.gguf --data-folder DATA --out OUT

DATA holds nq-open-oracle.jsonl.gz and hotpotqa_100.json. Training sees Natural Questions only, other questions and other
articles than are tested. Everything runs in the real engine. OUT receives NAME-adapt.json (after every stage, so that a
run cut short leaves what it has) and the records of both runs; it goes on where it stopped.

Variants of one study (other seeds, ranks, amounts of data) share what does not depend on them; `study.py` runs them all:

    ... --out study/base --stage unadapted      # the model as dense weights, and its records
    ... --out study/seed-1 --base study/base --seed 1
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from combine import PLAIN_NAME
from safetensors.torch import save_file
from tasks import TASKS

from lazyattention.adapt.config import TEACHER_DOCUMENTS, AdaptConfig
from lazyattention.adapt.request import DEFAULT_DISTRACTORS, AdaptRequest
from lazyattention.adapt.workflow import run_adapt
from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.engine.calibration import find_calibration, remember_calibration
from lazyattention.engine.engine import Engine
from lazyattention.engine.scoring import score
from lazyattention.models.adapter import REPORT_NAME
from lazyattention.models.loaded_model import LoadedModel
from lazyattention.models.loader import load_model
from lazyattention.quality.calibrate import calibrate
from lazyattention.quality.datasets import build_dataset
from lazyattention.quality.measure import MeasureConfig, measure, read_records
from lazyattention.quality.options import FULL_ATTENTION, reuse_option
from lazyattention.quality.questions import DISTRACTORS
from lazyattention.quality.report import loss_of, summarize, summarize_against
from lazyattention.quality.statistics import paired_difference
from lazyattention.utils.environment import describe_environment

# Plain text, as a prompt of 96 tokens and its next 64: does the adapter leave ordinary use alone?
_PLAIN_PROMPT_LEN, _PLAIN_TARGET_LEN = 96, 64


def main(argv: Sequence[str] | None = None) -> None:
    """Run all stages that are not done yet."""
    started_s = time.perf_counter()
    arguments = parse(argv)
    out: Path = arguments.out
    base: Path = arguments.base or out
    out.mkdir(parents=True, exist_ok=True)
    dense = base / "model"
    if arguments.base is None and not (dense / "config.json").exists():
        save_dense(load_model(arguments.model, dtype=arguments.dtype, progress=False), dense)
    name = arguments.name or Path(arguments.model).stem
    result_path = out / f"{name}-adapt.json"
    result: dict[str, Any] = {
        "model": name,
        "environment": environment(),
        "arguments": {
            key: value if isinstance(value, int | float | list) else str(value)
            for key, value in vars(arguments).items()
            if not isinstance(value, Path) and key != "model"
        },
        "seconds": {},
        "tasks": {},
        "plain_text_nll": {},
        "against_unadapted_full": {},
        "retained_share": {},
    }

    def save(stage: str) -> None:
        result["seconds"][stage] = round(time.perf_counter() - started_s, 1)
        result_path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{out.name}: {stage}: {result['seconds'][stage]} s", flush=True)

    if arguments.base is None or arguments.stage == "unadapted":
        loaded = load(arguments, dense, adapter=None)
        save("load")
        measure_stage(arguments, loaded, "unadapted", result)
        save("measure unadapted")
        if arguments.stage == "unadapted":
            return
        del loaded
    adapter = arguments.adapter or out / "adapter"
    if not (adapter / REPORT_NAME).exists():  # written last
        run_adapt(load(arguments, dense, adapter=None), adapt_request(arguments, adapter), engine_config(arguments))
        save("adapt")
    if arguments.stage == "train":
        return
    if arguments.base is not None:
        result["plain_text_nll"]["unadapted"] = json.loads((base / "unadapted" / PLAIN_NAME).read_text())
        for task in arguments.tasks:
            result["tasks"][task] = {"unadapted": summarize(read_records(base / "unadapted" / task))}
    result["training"] = json.loads((adapter / REPORT_NAME).read_text())
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    measure_stage(arguments, load(arguments, dense, adapter=str(adapter)), "adapted", result)
    compare(arguments, result)
    save("measure adapted")
    print_table(result)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    defaults = AdaptConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or GGUF file")
    parser.add_argument("--name", help="of the result file; default: the model's")
    parser.add_argument("--data-folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="folder of the run whose model and records are shared")
    parser.add_argument(
        "--stage", choices=["all", "unadapted", "train"], default="all", help="what to do; default: all that is missing"
    )
    parser.add_argument("--adapter", type=Path, help="measure this adapter in place of training one")
    parser.add_argument("--tasks", nargs="+", default=["nq-10", "nq-20", "hotpotqa-10"])
    parser.add_argument("--num-questions", type=int, nargs="+", default=[200, 100, 100], help="per task")
    parser.add_argument(
        "--options", nargs="+", default=["after_preamble", "isolated"], help="reuse options; composed: a+b"
    )
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=50)
    parser.add_argument("--num-timed", type=int, default=20, help="questions whose costs are measured, per task")
    parser.add_argument("--num-plain", type=int, default=50, help="plain texts")
    parser.add_argument(
        "--train",
        nargs="+",
        default=["nq-train:nq-open-oracle.jsonl.gz"],
        help="data sets, and their files in the data folder; or a folder of documents there, about which the model writes the "
        "questions (`passages.py` makes one)",
    )
    parser.add_argument("--train-questions", type=int, nargs="+", default=[1200], help="of each; or one number per set")
    parser.add_argument("--train-documents", type=int, nargs=2, default=(10, 10))
    parser.add_argument(
        "--distractors", choices=DISTRACTORS, default=DEFAULT_DISTRACTORS, help="of questions the model writes"
    )
    parser.add_argument(
        "--calibration-questions", type=int, default=24, help="of the training set, per calibrated option"
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="of training")
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument("--eval-steps", type=int, default=15)
    parser.add_argument("--rank", type=int, default=defaults.rank)
    parser.add_argument("--objective", default=defaults.objective)
    parser.add_argument("--teacher-documents", choices=TEACHER_DOCUMENTS, default=defaults.teacher_documents)
    parser.add_argument("--keep-full", action="store_true", help="as `lazyattention adapt` has it")
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations: faster, more memory")
    parser.add_argument("--train-option", default="after_preamble", help="reuse option that is trained; composed: a+b")
    parser.add_argument("--full-share", type=float, default=defaults.full_share)
    parser.add_argument("--plain-share", type=float, default=defaults.plain_share)
    parser.add_argument("--question-weight", type=float, default=defaults.question_weight)
    parser.add_argument("--micro-batch-tokens", type=int, default=defaults.micro_batch_tokens)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-blocks", type=int, help="KV blocks of the engine")
    parser.add_argument("--compile", action="store_true", help="compile layers and record graphs; slower to start")
    arguments = parser.parse_args(argv)
    if len(arguments.num_questions) == 1:
        arguments.num_questions *= len(arguments.tasks)
    if len(arguments.num_questions) != len(arguments.tasks):
        parser.error("--num-questions: give one number, or one per task")
    if len(arguments.train_questions) == 1:
        arguments.train_questions *= len(arguments.train)
    if len(arguments.train_questions) != len(arguments.train):
        parser.error("--train-questions: give one number, or one per training set")
    return arguments


def environment() -> dict[str, object]:
    """Hardware, versions, commit; outside a checkout the commit is taken from the variable COMMIT."""
    found = describe_environment()
    return found | {"commit": found["commit"] or os.environ.get("COMMIT", "")}


def save_dense(loaded: LoadedModel, folder: Path) -> None:
    """Write weights, config and tokenizer in the usual form: packed files take long to unpack, and many processes read."""
    folder.mkdir(parents=True, exist_ok=True)
    config = loaded.model.config.to_dict()
    config.pop("quantization_config", None)
    tied = loaded.model.config.tie_word_embeddings
    state = {
        name: value.contiguous()
        for name, value in loaded.model.state_dict().items()
        if not (tied and "lm_head" in name)
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    loaded.tokenizer.save_pretrained(folder)
    if loaded.model.generation_config is not None:
        loaded.model.generation_config.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))


def load(arguments: argparse.Namespace, folder: Path, adapter: str | None) -> LoadedModel:
    """Load the dense model, with or without an adapter."""
    return load_model(str(folder), dtype=arguments.dtype, adapter=adapter, progress=False)


def engine_config(arguments: argparse.Namespace, **more: object) -> EngineConfig:
    """Options of every engine here: memory is shared with training, so not all of it is taken."""
    is_compiled = None if arguments.compile else False
    on_gpu = torch.cuda.is_available()
    memory = {"kv_memory_bytes": 24 << 30} if on_gpu and arguments.num_blocks is None else {}
    return EngineConfig.of(
        num_blocks=arguments.num_blocks,
        max_num_batched_tokens=16384 if on_gpu else 2048,
        compile=is_compiled,
        cuda_graphs=is_compiled,
        max_num_seqs=256,
        **memory,
        **more,
    )


def measure_stage(arguments: argparse.Namespace, loaded: LoadedModel, stage: str, result: dict[str, Any]) -> None:
    """Ask all tasks' questions; records go to OUT/STAGE/TASK."""
    config = MeasureConfig(
        options=tuple(arguments.options),
        max_tokens=arguments.max_tokens,
        group_size=arguments.group_size,
        num_timed=arguments.num_timed,
    )
    plain = arguments.out / stage / PLAIN_NAME
    numbers = dict(zip(arguments.tasks, arguments.num_questions, strict=True))
    for max_chunk_len in sorted({TASKS[name].max_chunk_len for name in arguments.tasks}, reverse=True):
        engine = Engine(loaded, engine_config(arguments, max_chunk_len=max_chunk_len))
        if stage not in result["plain_text_nll"]:
            result["plain_text_nll"][stage] = plain_text_nlls(arguments, engine)
            plain.parent.mkdir(parents=True, exist_ok=True)
            plain.write_text(json.dumps(result["plain_text_nll"][stage]))
        calibrate_options(arguments, engine, result.setdefault("calibrations", {}).setdefault(stage, {}))
        for name, num_questions in numbers.items():
            if TASKS[name].max_chunk_len != max_chunk_len:
                continue
            examples = TASKS[name].examples(arguments.data_folder, num_questions)
            started_s = time.perf_counter()
            records = measure(engine, examples, config, arguments.out / stage / name)
            entry = summarize(records)
            entry["seconds"] = round(time.perf_counter() - started_s, 1)
            entry["loss"] = {option: asdict(loss_of(records, option, name)) for option in arguments.options}
            result["tasks"].setdefault(name, {})[stage] = entry
            print(f"  {arguments.out.name} {stage} {name}: {len(records)}, {entry['seconds']} s", flush=True)
        engine.model_runner.kv_pool.layers.clear()
        del engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def calibrate_options(arguments: argparse.Namespace, engine: Engine, found: dict[str, Any]) -> None:
    """Find temperature and bias for the options that ask for them, on questions of the training set."""
    for name in arguments.options:
        options = reuse_option(name).chunk_options(engine.config.chunk)
        if not options.calibrated:
            continue
        config = engine.config.of(engine.config, chunk=replace(options, calibrated=False))
        calibration = find_calibration(engine.loaded.weights_id, config, options)
        if calibration is None:
            examples = build_dataset(
                train_data(arguments)[0],
                num_documents=arguments.train_documents[1],
                num_questions=arguments.calibration_questions,
            )
            measure_config = MeasureConfig(max_tokens=arguments.max_tokens)
            calibration = calibrate(engine, examples, config.chunk, measure_config, data=arguments.train[0])
            remember_calibration(engine.loaded.weights_id, config, calibration)
        found[f"{name}, chunks of {engine.config.cache.max_chunk_len}"] = asdict(calibration)


def train_data(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the training sets with their paths: a built-in set's file, or a folder of documents in the data folder."""
    found = []
    for source in arguments.train:
        name, _, file = source.partition(":")
        folder = arguments.data_folder / name
        found.append(f"{name}:{arguments.data_folder / file}" if file else str(folder) if folder.is_dir() else name)
    return tuple(found)


def plain_text_nlls(arguments: argparse.Namespace, engine: Engine) -> list[float]:
    """NLL per token of ordinary text behind ordinary text, no documents: one value per text."""
    texts = []
    # The same texts whatever is asked: before and after are compared text by text.
    for example in TASKS[next(iter(TASKS))].examples(arguments.data_folder):
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


def adapt_request(arguments: argparse.Namespace, output: Path) -> AdaptRequest:
    """What to adapt to and how; the folder keeps samples, log and checkpoint."""
    return AdaptRequest(
        data=train_data(arguments),
        output=output,
        num_questions=tuple(arguments.train_questions),
        num_documents=tuple(arguments.train_documents),
        distractors=arguments.distractors,
        max_tokens=arguments.max_tokens,
        config=AdaptConfig(
            objective=arguments.objective,
            teacher_documents=arguments.teacher_documents,
            keep_full=arguments.keep_full,
            chunk=reuse_option(arguments.train_option).chunk_options(ChunkOptions()),
            rank=arguments.rank,
            alpha=2 * arguments.rank,
            full_share=arguments.full_share,
            plain_share=arguments.plain_share,
            question_weight=arguments.question_weight,
            micro_batch_tokens=arguments.micro_batch_tokens,
            max_minutes=arguments.minutes,
            max_steps=arguments.max_steps,
            eval_steps=arguments.eval_steps,
            held_out=min(arguments.held_out, sum(arguments.train_questions) // 4),
            gradient_checkpointing=False if arguments.no_checkpointing else None,
            seed=arguments.seed,
        ),
    )


def compare(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Compare the adapted model under each mask with the unadapted one under full attention, question by question."""
    for name in arguments.tasks:
        before = read_records((arguments.base or arguments.out) / "unadapted" / name)
        after = read_records(arguments.out / "adapted" / name)
        against = summarize_against(after, before)
        result["against_unadapted_full"][name] = against
        trained = against["options"].get(arguments.train_option, {})
        result["retained_share"][name] = trained.get("containment", {}).get("retained_share")
    plain = result["plain_text_nll"]
    difference = paired_difference(plain["adapted"], plain["unadapted"])
    result["plain_text_nll_difference"] = difference.to_dict()


def print_table(result: dict[str, Any]) -> None:
    """Print one row per task and option: gold answer greedy-exact (NLL), containment."""
    print(f"\n{'task':12} {'option':16} {'gold greedy':>24} {'gold NLL':>18} {'contains gold':>24}")
    for name, stages in result["tasks"].items():
        for option in stages["adapted"]["options"]:
            if option not in stages["unadapted"]["options"]:
                continue
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
            label = f"adapted {option} - unadapted {FULL_ATTENTION}"
            print(f"{'':12} {label}: {difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]")
    print(f"retained share (containment): {result['retained_share']}")
    difference = result["plain_text_nll_difference"]
    print(f"plain text NLL: {difference['mean']:+.4f} [{difference['low']:+.4f}, {difference['high']:+.4f}]")


if __name__ == "__main__":
    main()
