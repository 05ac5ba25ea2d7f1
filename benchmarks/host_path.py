# SPDX-License-Identifier: Apache-2.0
"""What a warm request costs on the host before its step is launched, and the next step, on a machine without a GPU.

    PYTHONPATH=src OMP_NUM_THREADS=1 python3 benchmarks/host_path.py [--runs 300] [--documents 10]
    PYTHONPATH=src OMP_NUM_THREADS=1 python3 benchmarks/host_path.py --plan benchmarks/results/plan_cpu.json

Everything but the device is as on an H200 with the heads of Llama-3.1-8B: tile shapes, static plans, graphs. Forward passes
compute nothing, and replays do nothing, so that answers mean nothing; copies to the device are copies in memory.

`--plan` instead times a new plan of 256 requests x 20 documents, as `bench_ops.py` does on a GPU's host, and writes it.
"""

import argparse
import functools
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench_ops import bench_plan
from random_models import random_model

from lazyattention import EngineConfig, SamplingParams
from lazyattention.engine import engine as engine_module
from lazyattention.engine.admission import Admission
from lazyattention.engine.cuda_graphs import GraphRunner
from lazyattention.engine.engine import Engine
from lazyattention.engine.model_runner import ModelRunner
from lazyattention.engine.scheduler import Scheduler
from lazyattention.engine.step_planner import StepPlanner
from lazyattention.ops import attention, static_plan
from lazyattention.ops._tiles import _TILES
from lazyattention.ops.plan_builder import PlanBuilder
from lazyattention.reuse import PromptLayout, Span
from lazyattention.utils.environment import describe_environment

MULTIPROCESSORS = 132
PIECES: tuple[tuple[str, object, str], ...] = (
    ("add_request", Engine, "add_request"),
    ("schedule", Scheduler, "schedule"),
    ("  of it: admission", Admission, "admit"),
    ("build batch", StepPlanner, "build"),
    ("  of it: block tables and rows", PlanBuilder, "step"),
    ("plan and inputs of the graph", GraphRunner, "run"),
    ("  of it: layout", static_plan, "lay_out"),
)


@contextmanager
def stand_in_engine() -> Iterator[Engine]:
    """Yield an engine on the GPU's path whose device does nothing."""

    def capture(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        return function(), lambda: None

    runner = functools.partial(ModelRunner, use_kernels=True, capture=capture)
    with ExitStack() as stack:
        for owner, name, value in (
            (attention, "tiles_for", lambda *_: _TILES[128]),
            (attention, "num_multiprocessors", lambda *_: MULTIPROCESSORS),
            (attention, "has_unmasked_prefill", lambda *_: True),
            (engine_module, "ModelRunner", runner),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        loaded = random_model("tiny", num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8, head_dim=16)
        engine = Engine(loaded, EngineConfig.of(num_blocks=4096, cuda_graphs=True))
        stack.callback(engine.model_runner.close)
        logits = torch.zeros(64, loaded.vocab_size)
        stack.enter_context(
            mock.patch.object(
                engine.model_runner, "_forward", lambda _, __, sample_rows, *___: logits[: len(sample_rows)]
            )
        )
        yield engine


def measure(*, runs: int, num_documents: int, document_len: int = 512, question_len: int = 64) -> dict[str, float]:
    """Return ms by piece, the mean of the fastest tenth of each."""
    torch.set_num_threads(1)
    rng = random.Random(0)
    samples: dict[str, list[float]] = defaultdict(list)
    with stand_in_engine() as engine, ExitStack() as stack:
        tokens = functools.partial(rng.choices, range(engine.loaded.vocab_size))
        documents = [Span(tuple(tokens(k=document_len)), document_id=f"document-{i}") for i in range(num_documents)]
        preamble = Span(tuple(tokens(k=32)), is_preamble=True)

        def ask() -> None:
            rng.shuffle(documents)
            layout = PromptLayout((preamble, *documents, Span(tuple(tokens(k=question_len)))))
            started_s = time.perf_counter()
            engine.add_request("only", layout, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
            while engine.has_work:
                engine.step()
            samples["until the step's end"].append(time.perf_counter() - started_s)
            samples["until launch"].append(launched_s[-1] - started_s)

        launched_s = [0.0]
        run = engine.model_runner.run

        def run_and_note(*args: Any) -> torch.Tensor:  # noqa: ANN401 - whatever it takes
            logits = run(*args)
            launched_s.append(time.perf_counter())
            return logits

        stack.enter_context(mock.patch.object(engine.model_runner, "run", run_and_note))
        for _ in range(20):
            ask()
        assert engine.model_runner.graphs is not None
        samples.clear()
        num_replays = engine.model_runner.graphs.num_replays
        for _ in range(runs):
            ask()
        assert engine.model_runner.graphs.num_replays == num_replays + runs, "a question was not replayed"
        totals = dict(samples)
        for label, owner, name in PIECES:
            stack.enter_context(mock.patch.object(owner, name, _timed(getattr(owner, name), samples[label])))
        for _ in range(runs):
            ask()
    return {label: _fastest_ms(samples[label] if label not in totals else totals[label]) for label in samples}


def measure_joins(
    *, runs: int, num_running: int = 63, num_documents: int = 10, document_len: int = 512
) -> dict[str, float]:
    """Return ms until the launch of the step after a request joined those that decode, planned ahead and not."""
    torch.set_num_threads(1)
    rng = random.Random(0)
    found = {}
    with stand_in_engine() as engine:
        tokens = functools.partial(rng.choices, range(engine.loaded.vocab_size))
        documents = [Span(tuple(tokens(k=document_len)), document_id=f"document-{i}") for i in range(2 * num_documents)]
        preamble = Span(tuple(tokens(k=32)), is_preamble=True)

        def ask(name: str, max_tokens: int) -> None:
            layout = PromptLayout((preamble, *rng.sample(documents, num_documents), Span(tuple(tokens(k=64)))))
            engine.add_request(name, layout, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))

        run, launched_s = engine.model_runner.run, 0.0

        def run_and_note(*args: Any) -> torch.Tensor:  # noqa: ANN401 - whatever it takes
            nonlocal launched_s
            logits = run(*args)
            launched_s = time.perf_counter()
            return logits

        with mock.patch.object(engine.model_runner, "run", run_and_note):
            for number in range(num_running):
                ask(f"long-{number}", 3 * runs + 100)
            while (
                any(not sequence.output_token_ids for sequence in engine.scheduler.running) or engine.scheduler.waiting
            ):
                engine.step()
            for label, is_ahead in (("planned ahead", True), ("not planned ahead", False)):
                off = mock.patch.object(engine.model_runner, "plan_ahead", return_value=None)
                with nullcontext() if is_ahead else off:
                    seconds = []
                    for number in range(runs):
                        ask(f"{label}-{number}", 2)
                        engine.step()  # its prompt, beside the others
                        started_s = time.perf_counter()
                        engine.step()
                        seconds.append(launched_s - started_s)
                    found[f"step after a request joined, {label}"] = _fastest_ms(seconds)
    return found


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever it takes
        started_s = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - started_s)

    return timed


def _fastest_ms(seconds: list[float]) -> float:
    fastest = sorted(seconds)[: max(1, len(seconds) // 10)]
    return sum(fastest) / len(fastest) * 1e3


def write_plan(path: Path) -> None:
    """Time a new plan and write what came out, with what it came out on."""
    environment = describe_environment()
    plan = bench_plan()
    report = {"benchmark": "bench_ops.bench_plan", "commit": environment["commit"], "environment": environment}
    report |= {"num_threads": torch.get_num_threads(), "plan": plan}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for label, value in plan.items():
        print(f"{label:45} {value:.3f}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--plan", type=Path, help="time plans alone, into this file")
    args = parser.parse_args(argv)
    if args.plan is not None:
        write_plan(args.plan)
        return
    for label, ms in measure(runs=args.runs, num_documents=args.documents).items():
        print(f"{label:50} {ms:.3f} ms")
    print("64 requests:")
    for label, ms in measure_joins(runs=max(3, args.runs // 4), num_documents=args.documents).items():
        print(f"{label:50} {ms:.3f} ms")


if __name__ == "__main__":
    main()
