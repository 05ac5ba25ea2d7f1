# SPDX-License-Identifier: Apache-2.0
"""Check the engine on one GPU, then measure it against its targets; a short table comes last, all goes to files.

    PYTHONPATH=src python3 benchmarks/gpu_engine.py --out OUT [--minutes 6] [--parts tests,check,ttft,decode,profile,serving]

The model has the shape of Llama-3.1-8B and random weights: its answers mean nothing, its times are real. Parts that no
longer fit into the time are left out and named.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench_serving import METHODS, bench_workload, print_table, warm_up
from random_models import random_model
from step_profile import profile_step, profile_table
from target_rows import read, rows_of
from targets import table
from torch import nn
from workloads import zipf_workload

from lazyattention import EngineConfig, SamplingParams
from lazyattention.engine.engine import Engine
from lazyattention.reuse import PromptLayout
from lazyattention.utils.environment import describe_environment

# Each runs in a process of its own, at the same time.
TESTS = ("llama and float32", "bfloat16 or left_out", "qwen3", "gemma3", "glm or tight or wait")
DECODE_SIZES = (1, 16, 64)


def start_tests(out: Path) -> list[tuple[str, subprocess.Popen[bytes], Path]]:
    """Start the engine's GPU tests."""
    started = []
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "3", "OMP_NUM_THREADS": "2"}
    for number, chosen in enumerate(TESTS):
        log = out / f"engine_tests_{number}.log"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_engine_gpu.py", "-k", chosen]
        command += ["-p", "no:cacheprovider", "--tb=short", "--maxfail=4", "--show-capture=no", "--durations=3"]
        with log.open("wb") as file:
            started.append(
                (chosen, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment), log)
            )
    return started


def finish_tests(started: Sequence[tuple[str, subprocess.Popen[bytes], Path]], timeout_s: float) -> dict[str, Any]:
    """Wait for the tests, print what failed."""
    results = {}
    deadline = time.monotonic() + timeout_s
    for chosen, process, log in started:
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
        lines = log.read_text(errors="replace").splitlines()
        results[chosen] = {"returncode": process.returncode, "last": lines[-1] if lines else ""}
        print(f"tests [{chosen}]: {process.returncode}, {results[chosen]['last']}")
        if process.returncode:
            print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E  ")))[:3000], flush=True)
    (log.parent / "engine_tests.log").write_text(
        "\n\n".join(path.read_text(errors="replace") for _, _, path in started)
    )
    for _, _, path in started:
        path.unlink()
    return results


def check_shape() -> dict[str, float]:
    """Compare two layers of the 1B shape on the GPU, in float32 and bfloat16, with the same on the CPU in float64."""
    workload = zipf_workload(
        num_documents=4, documents_per_request=3, num_requests=2, alpha=0.0, document_len="70-130", question_len="33-50"
    )
    options = {"num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 300}
    results: dict[str, float] = {}
    wanted: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, device, dtype in (
        ("cpu_float64", "cpu", torch.float64),
        ("gpu_float32", "cuda", torch.float32),
        ("gpu_bfloat16", "cuda", torch.bfloat16),
    ):
        # Built in its dtype, not cast to it, since a cast would round the table of frequencies.
        loaded = random_model("llama-3.2-1b", device=device, dtype=dtype, num_hidden_layers=2)
        weights = weights or loaded.model.state_dict()
        loaded.model.load_state_dict(weights)
        engine = Engine(loaded, EngineConfig.of(**options, compile=False))
        for method in METHODS:
            for index, layout in enumerate(workload.layouts(loaded.vocab_size)):
                logits = first_logits(engine, layout, method).double().cpu()
                key = f"{method}-{index}"
                if device == "cpu":
                    wanted[key] = logits
                else:
                    error = float((logits - wanted[key]).norm() / wanted[key].norm())
                    results[f"{name}/{method}"] = max(results.get(f"{name}/{method}", 0.0), error)
        engine.model_runner.close()
    return results


def first_logits(engine: Engine, layout: PromptLayout, method: str) -> torch.Tensor:
    """Return the logits of a prompt's first output token."""
    rows: list[torch.Tensor] = []
    run = engine.model_runner.run

    def watched(batch: Any) -> torch.Tensor:  # noqa: ANN401 - Batch
        logits = run(batch)
        if len(logits):
            rows.append(logits[-1].clone())
        return logits

    engine.model_runner.run = watched  # type: ignore[method-assign]
    try:
        ask(engine, layout, method)
    finally:
        del engine.model_runner.run
    return rows[-1]


def ask(engine: Engine, layout: PromptLayout, method: str, output_len: int = 1) -> float:
    """Run one request alone; return its time to first token in milliseconds."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    engine.add_request("only", layout, params, reuse_method=method)
    output = None
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
    assert output is not None
    return (output.timings.ttft_s or 0.0) * 1e3


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, p10 and p90."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1], "runs": len(values)}


def measure_ttft(engine: Engine, *, runs: int = 24) -> dict[str, Any]:
    """Time the first token of 10 x 512-token documents in changing order and a new 64-token question; methods take turns."""
    samples: dict[str, list[float]] = {method: [] for method in METHODS}
    workload = zipf_workload(
        num_documents=10, documents_per_request=10, num_requests=runs + 3, alpha=0.0, question_len="64", seed=5
    )
    engine.cache.clear()
    forward_ms, step_ms = [], []
    num_replays = engine.model_runner.graphs.num_replays if engine.model_runner.graphs else 0
    for number, layout in enumerate(workload.layouts(engine.loaded.vocab_size)):
        for method in METHODS:
            slow = method in ("prefix", "full_recompute")
            if slow and number > 10:
                continue
            before = (engine.stats.forward_s, engine.stats.step_s)
            ttft_ms = ask(engine, layout, method)
            if method == "rotate_query" and number >= 3:
                forward_ms.append((engine.stats.forward_s - before[0]) * 1e3)
                step_ms.append((engine.stats.step_s - before[1]) * 1e3)
            if number >= 3:
                samples[method].append(ttft_ms)
    results: dict[str, Any] = {method: spread(values) for method, values in samples.items()}
    median = results["rotate_query"]["median"]
    results["times_faster_than"] = {
        method: results[method]["median"] / median for method in METHODS if method != "rotate_query"
    }
    # Of rotate_query: the one step, of it the time until all is launched, and how many steps were replayed.
    results["step"] = {"all_ms": spread(step_ms), "submit_ms": spread(forward_ms)}
    if engine.model_runner.graphs:
        results["step"]["num_replays"] = engine.model_runner.graphs.num_replays - num_replays
    engine.cache.clear()
    return results


def events_ms(function: Callable[[], object], runs: int = 30) -> float:
    """Return the median device time of a call."""
    for _ in range(5):
        function()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@torch.inference_mode()
def linear_layers_ms(model: nn.Module, num_tokens: int) -> float:
    """Time all the model's linear layers, output layer included, alone under one CUDA graph."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {
        width: torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16)
        for width in {linear.in_features for linear in linears}
    }

    def run() -> None:
        for linear in linears:
            linear(inputs[linear.in_features])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return events_ms(graph.replay)


@contextmanager
def decoding(engine: Engine, num_requests: int, method: str = "rotate_query") -> Iterator[None]:
    """Inside the block, this many requests over ten 512-token documents each (Zipf 1.0 of 200) decode."""
    workload = zipf_workload(
        num_documents=200, documents_per_request=10, num_requests=num_requests, alpha=1.0, output_len="400", seed=7
    )
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    for index, layout in enumerate(workload.layouts(engine.loaded.vocab_size)):
        engine.add_request(f"decoding-{index}", layout, params, reuse_method=method)
    while engine.scheduler.waiting or not all(s.is_decoding for s in engine.scheduler.running):
        engine.step()
    for _ in range(8):
        engine.step()
    yield
    for request_id in engine.live_request_ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()


@torch.inference_mode()
def measure_decode(engine: Engine, num_requests: int) -> dict[str, Any]:
    """Split a decode step: linear layers alone, everything but attention, everything, and as the engine runs it."""
    runner = engine.model_runner
    graphs, planner = runner.graphs, runner._planner
    assert graphs is not None
    assert planner is not None
    size = next(s for s in graphs.sizes if s >= num_requests)
    with decoding(engine, num_requests):
        steps = []
        for _ in range(40):
            before = (engine.stats.step_s, engine.stats.forward_s)
            engine.step()
            steps.append((engine.stats.step_s - before[0], engine.stats.forward_s - before[1]))
        graph = graphs._graphs[size, False, False]
        # The same step again and again: it writes the same keys to the same slots.
        result: dict[str, Any] = {"graph_ms": events_ms(graph.replay)}
        result["engine_step_ms"] = statistics.median(step for step, _ in steps) * 1e3
        result["submit_ms"] = statistics.median(forward for _, forward in steps) * 1e3
        capacity = graph.capacity
        result["capacity"] = [capacity.max_rows, capacity.max_few_tasks, capacity.max_parts]
    empty = planner.empty_step(size)
    graphs.run(empty, torch.zeros(size, dtype=torch.int64).numpy(), [0], planner.blocks)
    result["outside_attention_ms"] = events_ms(graphs._graphs[size, False, False].replay)
    result["linear_layers_ms"] = linear_layers_ms(runner.model, size)
    result["outside_over_linear"] = result["outside_attention_ms"] / result["linear_layers_ms"]
    kind = next(kind for kind in graphs._graphs if kind.size == size and not kind.has_prefill)
    with attention_left_out():
        stub = graphs._record(kind, planner.blocks, capacity)
    result["without_attention_ms"] = events_ms(stub.replay)
    result["without_over_linear"] = result["without_attention_ms"] / result["linear_layers_ms"]
    graphs._record(kind, planner.blocks, capacity)
    return result


@contextmanager
def attention_left_out() -> Iterator[None]:
    """Inside the block layers neither store nor attend."""

    def nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return q.new_empty((*q.shape[:2], v.shape[2]))

    with mock.patch("lazyattention.ops.run", nothing):
        yield


def profiles(engine: Engine, out: Path) -> dict[str, Any]:
    """Profile one decode step of 64 requests and one warm prefill; write tables."""
    with decoding(engine, 64):
        decode = profile_step(engine)
    workload = zipf_workload(
        num_documents=10, documents_per_request=10, num_requests=4, alpha=0.0, question_len="64", seed=5
    )
    layouts = list(workload.layouts(engine.loaded.vocab_size))
    for layout in layouts[:3]:
        ask(engine, layout, "rotate_query")
    engine.add_request(
        "profiled", layouts[3], SamplingParams(temperature=0.0, max_tokens=1), reuse_method="rotate_query"
    )
    prefill = profile_step(engine)
    text = profile_table("One decode step, 64 requests x 10 documents x 512 tokens", decode)
    text += profile_table("One warm prefill, 64-token question over 10 documents x 512 tokens", prefill)
    (out / "engine_profile.md").write_text(text)
    return {"decode": decode, "warm_prefill": prefill}


def serving(engine: Engine, time_left: Callable[[], float]) -> list[dict[str, Any]]:
    """Sweep popularity, memory, documents per request and their length, most telling combinations first."""
    base = {"alpha": 1.0, "per_request": 10, "document_len": "512", "budget": 1.0}
    combinations = [
        {},
        {"alpha": 0.0},
        {"alpha": 2.1},
        {"per_request": 1, "document_len": "128", "alpha": 0.0},
        {"budget": 0.25},
        {"budget": 2.5},
        {"alpha": 0.0, "budget": 0.25},
        {"document_len": "128"},
        {"per_request": 20},
        {"document_len": "512~0.8", "alpha": 1.4},
    ]
    runs = []
    for number, changed in enumerate(combinations):
        # Full recompute is as slow as identical prefixes everywhere, so it need not be measured everywhere.
        methods = METHODS if number == 0 else ("rotate_query", "copy_rotate", "prefix")
        if time_left() < (30.0 if number == 0 else 12.0):
            print(f"no time for {changed}")
            continue
        settings = {**base, **changed}
        workload = zipf_workload(
            num_documents=200, documents_per_request=settings["per_request"], num_requests=96, alpha=settings["alpha"],
            document_len=settings["document_len"], question_len="32-96", output_len="32", seed=11,
        )  # fmt: skip
        result = bench_workload(engine, workload, methods, budget=settings["budget"], concurrency=16)
        runs.append({"settings": settings, **result})
        print_table(settings, result)
    return runs


def start_engine(shape: str, results: dict[str, Any], mark: Callable[[str], None]) -> Engine:
    """Build the model and the engine, compile what the methods need; note how long it took."""
    begun = time.monotonic()
    loaded = random_model(shape, device="cuda", dtype=torch.bfloat16)
    results["model"], results["random_weights"] = loaded.name, True
    mark(f"{loaded.name} built in {time.monotonic() - begun:.1f} s")
    begun = time.monotonic()
    engine = Engine(loaded, EngineConfig.of(max_num_seqs=64, max_num_batched_tokens=8192, num_blocks=16384))
    results["start_up_s"] = time.monotonic() - begun
    graphs = engine.model_runner.graphs
    results["compiled"] = engine.model_runner.compiled is not None
    results["num_graphs"] = graphs.num_graphs if graphs else 0
    mark(f"engine started: compiled {results['compiled']}, {results['num_graphs']} graphs")
    warm_up(engine, METHODS, 8)
    mark("warmed up")
    return engine


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="tests,check,ttft,decode,profile,serving")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--force", action="store_true", help="measure even when a check is red")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    deadline = started + arguments.minutes * 60
    results: dict[str, Any] = {"environment": describe_environment(), "commit": os.environ.get("COMMIT", "")}

    def mark(what: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {what}", flush=True)
        (out / "engine.json").write_text(json.dumps(results, indent=1, default=str) + "\n")

    def part(name: str, function: Callable[[], Any]) -> None:
        if name in parts and time.monotonic() < deadline:
            try:
                results[name] = function()
            except Exception:  # one broken part must not cost the others
                import traceback

                traceback.print_exc()
                results[name] = None
            mark(name)

    tests = start_tests(out) if "tests" in parts else []
    part("check", check_shape)
    print({key: f"{value:.1e}" for key, value in (results.get("check") or {}).items()})
    try:
        engine = start_engine(arguments.shape, results, mark)
    finally:
        if tests:
            results["tests"] = finish_tests(
                tests, max(10.0, started + 0.45 * arguments.minutes * 60 - time.monotonic())
            )
            mark("tests")
    if tests and any(test["returncode"] for test in results["tests"].values()) and not arguments.force:
        print("checks are red: nothing is measured")
        return
    part("ttft", lambda: measure_ttft(engine))
    part("decode", lambda: {size: measure_decode(engine, size) for size in DECODE_SIZES})
    part("profile", lambda: profiles(engine, out))
    part("serving", lambda: serving(engine, lambda: deadline - time.monotonic()))
    if results.get("serving"):
        from bench_serving import plot

        plot(results["serving"], out / "engine_serving.png")
    results["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    mark("done")
    print(table([row for row in rows_of(read(out)) if row.value is not None]))


if __name__ == "__main__":
    main()
