# SPDX-License-Identifier: Apache-2.0
"""Serving: one engine, one KV memory, every reuse method on the same requests, cold and warm apart.

    python benchmarks/bench_serving.py --smoke
    python benchmarks/bench_serving.py --shape llama-3.1-8b --device cuda --alpha 0,1,2.1 --budget 0.25,1

A run is a workload, a memory budget (share of the workload's documents that fits) and a method. The first half of the
requests runs cold, from an empty store; the second half, other requests over the same collection, finds it warm. Shapes have random weights: times are real,
answers mean nothing. `--model` takes a real model. Sweeps (comma-separated options) run in every combination.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from random_models import SHAPES, random_model
from serving_combos import Combo, methods_of, shard_of, standard_combos
from workloads import Workload, at_rate, percentile, trace_workload, zipf_workload

from lazyattention import EngineConfig, SamplingParams
from lazyattention.engine.engine import Engine
from lazyattention.engine.outputs import RequestOutput
from lazyattention.errors import LazyAttentionError
from lazyattention.reuse import REUSE_METHODS
from lazyattention.utils.environment import describe_environment

METHODS = ("rotate_query", "copy_rotate", "rotate_key", "prefix", "full_recompute")
# Nothing is ever warm for them.
_STORE_NOTHING = ("full_recompute",)
_WATCH_EVERY_STEPS = 16


class Budget:
    """Takes blocks out of an engine's pool, so that one engine can be measured with less memory."""

    def __init__(self, engine: Engine) -> None:
        """Nothing is taken yet."""
        self._engine = engine
        self._taken: list[int] = []

    def set(self, num_blocks: int) -> int:
        """Leave this many blocks in an empty store; return how many there are."""
        pool = self._engine.cache.pool
        self._engine.cache.clear()
        pool.release(self._taken)
        self._taken = []
        self._taken = pool.allocate(max(0, pool.num_blocks - num_blocks))
        return pool.num_free

    @property
    def num_taken(self) -> int:
        """Blocks taken now."""
        return len(self._taken)


def run_phase(
    engine: Engine, workload: Workload, method: str, *, concurrency: int, num_taken: int = 0
) -> dict[str, Any]:
    """Run all requests of a workload once and measure.

    Args:
        engine: Nothing runs in it.
        workload: With arrival times (open loop) or without (closed loop).
        method: Reuse method.
        concurrency: Requests under way at the same time in a closed loop.
        num_taken: Blocks that are not part of the budget.
    """
    prompts = list(zip(workload.layouts(engine.loaded.vocab_size), workload.requests, strict=True))
    pending = iter(enumerate(prompts))
    following = next(pending, None)
    token_times: dict[str, list[float]] = {}
    finished: list[RequestOutput] = []
    num_used_blocks, copies = 0, []
    start_s = time.monotonic()
    steps = itertools.count()
    while following is not None or engine.has_work:
        while following is not None:
            index, (layout, request) = following
            due_s = request.arrival_s
            if due_s is None and len(engine.live_request_ids) >= concurrency:
                break
            if due_s is not None and start_s + due_s > time.monotonic():
                break
            params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
            arrival_s = None if due_s is None else start_s + due_s
            request_id = f"{method}-{index}"
            engine.add_request(request_id, layout, params, reuse_method=method, arrival_s=arrival_s)
            token_times[request_id] = []
            following = next(pending, None)
        if not engine.has_work:
            assert following is not None
            time.sleep(max(0.0, start_s + (following[1][1].arrival_s or 0.0) - time.monotonic()))
            continue
        outputs = engine.step()
        now = time.monotonic()
        for output in outputs:
            if output.error is not None:
                raise output.error
            token_times[output.request_id] += [now] * len(output.outputs[0].delta_token_ids)
            if output.finished:
                finished.append(output)
        pool = engine.cache.pool
        num_used_blocks = max(num_used_blocks, pool.num_blocks - num_taken - pool.num_free)
        if next(steps) % _WATCH_EVERY_STEPS == 0 and engine.scheduler.running:
            copies.append(copies_of_documents(engine))
    elapsed_s = time.monotonic() - start_s
    return summarize(finished, token_times, elapsed_s) | {
        "peak_used_blocks": num_used_blocks,
        "peak_kv_bytes": num_used_blocks * engine.cache.block_size * engine.documents.bytes_per_token,
        "copies_of_documents": max(copies, default=0.0),
    }


def copies_of_documents(engine: Engine) -> float:
    """Return the KV blocks that hold running requests' documents, over the blocks these documents need once."""
    held: set[int] = set()
    needed: dict[tuple[int, ...], int] = {}
    for sequence in engine.scheduler.running:
        for span, source in zip(sequence.spans, sequence.group.layout.spans, strict=True):
            if source.is_document:
                held.update(span.block_ids, () if span.chunk is None else span.chunk.block_ids)
                needed[source.token_ids] = engine.cache.num_blocks_of(len(source.token_ids))
    return len(held) / max(1, sum(needed.values()))


def summarize(
    finished: Sequence[RequestOutput], token_times: dict[str, list[float]], elapsed_s: float
) -> dict[str, Any]:
    """Turn outputs and token times into figures; times in milliseconds."""
    ttfts = [(output.timings.ttft_s or 0.0) * 1e3 for output in finished]
    gaps = [(b - a) * 1e3 for times in token_times.values() for a, b in itertools.pairwise(times)]
    num_prompt = sum(output.num_prompt_tokens for output in finished)
    num_output = sum(len(times) for times in token_times.values())
    return {
        "num_requests": len(finished),
        "elapsed_s": elapsed_s,
        "requests_per_s": len(finished) / elapsed_s,
        "output_tokens_per_s": num_output / elapsed_s,
        "prompt_tokens_per_s": num_prompt / elapsed_s,
        "ttft_p50_ms": percentile(ttfts, 0.5),
        "ttft_p95_ms": percentile(ttfts, 0.95),
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p95_ms": percentile(gaps, 0.95),
        "hit_rate": sum(output.num_reused_tokens for output in finished) / max(1, num_prompt),
    }


def bench_workload(
    engine: Engine, workload: Workload, methods: Sequence[str], *, budget: float | None, concurrency: int
) -> dict[str, Any]:
    """Run every method cold and warm on one workload at one memory budget.

    Args:
        engine: Idle.
        workload: Its first half runs cold, its second half warm.
        methods: In the order they run.
        budget: Share of the documents' working set that fits besides the running requests' own texts; None = all memory.
        concurrency: Of a closed loop.
    """
    cache = engine.cache
    cold, warm = workload.halves()
    if warm.requests[0].arrival_s is not None:
        start_s = warm.requests[0].arrival_s
        warm = replace(warm, requests=tuple(replace(r, arrival_s=r.arrival_s - start_s) for r in warm.requests))
    budgets = Budget(engine)
    num_blocks = cache.pool.num_blocks
    if budget is not None:
        own = concurrency * (2 + cache.num_blocks_of(max(r.question_len + r.output_len for r in workload.requests)))
        own += concurrency * cache.num_blocks_of(workload.preamble_len)
        blocks = [cache.num_blocks_of(length) for length in workload.document_lens]
        working_set = sum(blocks[i] for i in {i for r in workload.requests for i in r.documents})
        # One request must fit with a private copy of its documents, or copy_rotate cannot run at all.
        floor = 2 * max(sum(blocks[i] for i in r.documents) for r in workload.requests)
        num_blocks = min(num_blocks, own + max(int(budget * working_set), floor))
    results: dict[str, Any] = {"working_set_tokens": workload.working_set_tokens, "methods": {}}
    for method in methods:
        results["num_blocks"] = budgets.set(num_blocks)
        num_preemptions = engine.scheduler.num_preemptions
        results["methods"][method] = {
            name: run_phase(engine, part, method, concurrency=concurrency, num_taken=budgets.num_taken)
            for name, part in (("cold", cold), ("warm", warm))
            if name == "warm" or method not in _STORE_NOTHING
        }
        results["methods"][method]["num_preemptions"] = engine.scheduler.num_preemptions - num_preemptions
    budgets.set(cache.pool.num_blocks)
    return results


def combos_of(arguments: argparse.Namespace) -> list[Combo]:
    """Return the combinations asked for, in the order they run."""
    if arguments.combos == "standard":
        combos = standard_combos()
    else:
        factors = (arguments.alpha, arguments.documents_per_request, arguments.document_len, arguments.budget)
        combos = [Combo(*values, load=arguments.load) for values in itertools.product(*factors)]
    return shard_of(combos, arguments.shard)


def workload_of(combo: Combo, arguments: argparse.Namespace) -> Workload:
    """Draw a combination's requests, without arrival times."""
    return zipf_workload(
        num_documents=max(arguments.documents, combo.documents_per_request),
        documents_per_request=combo.documents_per_request,
        num_requests=2 * arguments.requests,
        alpha=combo.alpha,
        document_len=combo.document_len,
        question_len=arguments.question_len,
        output_len=arguments.output_len,
        popular_first=arguments.popular_first,
        seed=arguments.seed,
    )


class Sweep:
    """Runs combinations until the time is used up, and reports after each."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace, started_s: float) -> None:
        """Nothing has run yet.

        Args:
            engine: Idle.
            arguments: The command line.
            started_s: When the time budget began, by the monotonic clock.
        """
        self._engine = engine
        self._arguments = arguments
        self._deadline_s = started_s + (arguments.time_budget_s or float("inf"))
        self._closed_loops: dict[Combo, float] = {}
        self._s_per_prompt_token = 0.0
        self.runs: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []

    def run(self) -> Iterator[None]:
        """Run all that fits, and stop after each combination for a report."""
        if self._arguments.trace is not None:
            workload = trace_workload(
                self._arguments.trace, num_requests=2 * self._arguments.requests, seed=self._arguments.seed
            )
            for budget in self._arguments.budget:
                settings = {"trace": self._arguments.trace.name, "budget": budget}
                self._measure(settings, at_rate(workload, self._arguments.rate), budget)
                yield
            return
        combos = combos_of(self._arguments)
        # Whatever has not run, also in the report of a sweep that is stopped from outside.
        self.left_out += [combo.settings() for combo in combos]
        for combo in combos:
            workload = workload_of(combo, self._arguments)
            expected_s = self._s_per_prompt_token * _num_prompt_tokens(workload)
            if time.monotonic() + expected_s > self._deadline_s:
                continue
            self.left_out.remove(combo.settings())
            try:
                self._run_combo(combo, workload)
            except LazyAttentionError as error:  # one that fails must not cost the others
                print(f"failed: {combo.settings()}: {error}")
                self.failed.append({"settings": combo.settings(), "error": str(error)})
                self._become_idle()
            yield

    def _run_combo(self, combo: Combo, workload: Workload) -> None:
        rate = self._arguments.rate
        if combo.load:
            rate = combo.load * self._closed_loop_rate(combo, workload)
        result = self._measure(combo.settings(), at_rate(workload, rate, seed=self._arguments.seed), combo.budget)
        result["offered_requests_per_s"] = rate
        # Slower ones may follow, so a fast one lowers what is expected only a little.
        s_per_token = result["elapsed_s"] / _num_prompt_tokens(workload)
        self._s_per_prompt_token = max(s_per_token, 0.7 * self._s_per_prompt_token)
        if rate is None and "rotate_query" in result["methods"]:
            self._closed_loops[combo] = result["methods"]["rotate_query"]["warm"]["requests_per_s"]

    def _measure(self, settings: dict[str, Any], workload: Workload, budget: float) -> dict[str, Any]:
        arguments = self._arguments
        begun_s = time.monotonic()
        result = bench_workload(
            self._engine, workload, arguments.methods, budget=budget, concurrency=arguments.concurrency
        )
        result = {"settings": settings, **result, "elapsed_s": time.monotonic() - begun_s}
        self.runs.append(result)
        print_table(settings, result)
        return result

    def _become_idle(self) -> None:
        for request_id in self._engine.live_request_ids:
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._engine.step()

    def _closed_loop_rate(self, combo: Combo, workload: Workload) -> float:
        """Return the warm requests/s of `rotate_query` in a closed loop, measured now if it has not run before."""
        closed = replace(combo, load=0.0)
        if closed not in self._closed_loops:
            result = bench_workload(
                self._engine, workload, ["rotate_query"], budget=combo.budget, concurrency=self._arguments.concurrency
            )
            self._closed_loops[closed] = result["methods"]["rotate_query"]["warm"]["requests_per_s"]
        return self._closed_loops[closed]


def _num_prompt_tokens(workload: Workload) -> int:
    lens = workload.document_lens
    return sum(sum(lens[i] for i in r.documents) + r.question_len for r in workload.requests)


def make_engine(arguments: argparse.Namespace) -> Engine:
    """Build or load the model and reserve the KV memory."""
    options: dict[str, Any] = {
        "max_num_seqs": max(arguments.concurrency, 64),
        "max_num_batched_tokens": arguments.batched_tokens,
    }
    if arguments.kv_tokens:
        options["num_blocks"] = -(-arguments.kv_tokens // 16)
    config = EngineConfig.of(**options)
    if arguments.model:
        from lazyattention.models.loader import load_model

        return Engine(load_model(arguments.model, device=arguments.device), config)
    dtype = torch.bfloat16 if arguments.device.startswith("cuda") else torch.float32
    return Engine(random_model(arguments.shape, device=arguments.device, dtype=dtype), config)


def warm_up(engine: Engine, methods: Sequence[str], concurrency: int) -> None:
    """Compile and load whatever the methods need, before anything is timed."""
    workload = zipf_workload(
        num_documents=8, documents_per_request=3, num_requests=concurrency, alpha=0.0, document_len="100-500",
        question_len="20-90", output_len="4", seed=99,
    )  # fmt: skip
    for method in methods:
        run_phase(engine, workload, method, concurrency=concurrency)
    engine.cache.clear()


def print_table(settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Print one workload's methods, worst news included."""
    print(f"\n{settings}; {result['num_blocks']} blocks")
    head = ("method", "phase", "TTFT p50", "p95 ms", "ITL p50", "p95 ms", "req/s", "tok/s", "hits", "copies")
    print("{:15} {:5} {:>9} {:>9} {:>8} {:>8} {:>7} {:>8} {:>6} {:>6}".format(*head))
    for method, phases in result["methods"].items():
        for phase in (name for name in ("cold", "warm") if name in phases):
            r = phases[phase]
            print(
                f"{method:15} {phase:5} {r['ttft_p50_ms']:9.1f} {r['ttft_p95_ms']:9.1f} {r['itl_p50_ms']:8.2f}"
                f" {r['itl_p95_ms']:8.2f} {r['requests_per_s']:7.2f} {r['output_tokens_per_s']:8.1f}"
                f" {r['hit_rate']:6.1%} {r['copies_of_documents']:6.2f}"
            )


def print_summary(sweep: Sweep) -> None:
    """Print one line per combination: the first method's warm figures, and what it is worth against the others."""
    print("\nwarm; after each other method: its TTFT p50 over the first's, the first's requests/s over its")
    for run in sweep.runs:
        warm = {method: phases["warm"] for method, phases in run["methods"].items()}
        (first, ours), *others = warm.items()
        name = " ".join(str(value) for value in run["settings"].values())
        line = (
            f"{name:26} {first} {ours['ttft_p50_ms']:7.1f} ms {ours['requests_per_s']:6.2f}/s {ours['hit_rate']:4.0%}"
        )
        for method, other in others:
            ttft = other["ttft_p50_ms"] / ours["ttft_p50_ms"]
            line += f" | {method} {ttft:.2f}x {ours['requests_per_s'] / other['requests_per_s']:.2f}x"
        print(line)
    print(f"settings: {' '.join(sweep.runs[0]['settings']) if sweep.runs else '-'}; left out: {len(sweep.left_out)}")


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw warm requests per second and median TTFT of every run, one column of points per workload."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot, ticker

    methods = methods_of(runs)
    labels = [label_of(run) for run in runs]
    figure, axes = pyplot.subplots(
        2, 1, figsize=(min(max(6.0, 1.6 * len(runs)), 60.0), 7), layout="constrained", squeeze=False
    )
    for axis, (key, title) in zip(
        axes[:, 0], (("requests_per_s", "requests/s, warm"), ("ttft_p50_ms", "median TTFT, warm (ms)")), strict=True
    ):
        for place, method in enumerate(methods):
            # Not every run has every method.
            values = [run["methods"].get(method, {"warm": {key: float("nan")}})["warm"][key] for run in runs]
            # Points, not bars: a logarithmic axis has no zero for them to stand on.
            places = [x + (place - (len(methods) - 1) / 2) / (len(methods) + 3) for x in range(len(runs))]
            axis.plot(places, values, "osD^v"[place % 5], label=method)
        axis.set_title(title)
        axis.set_yscale("log")
        for each in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            each(ticker.LogFormatter(minor_thresholds=(2, 0.5)))
        axis.grid(axis="y", which="both", alpha=0.3)
        axis.set_xticks(range(len(runs)), labels, fontsize=6)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(methods), fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def label_of(run: dict[str, Any]) -> str:
    """Return a run's settings in a few lines, and which commit it is of where runs of several are together."""
    s = run["settings"]
    lines = [f"budget {s['budget']}"]
    if "trace" in s:
        lines = [s["trace"], *lines]
    else:
        popularity = f"Zipf {s['alpha']}" if s["alpha"] else "uniform"
        lines = [popularity, f"{s['documents_per_request']} x {s['document_len']}", *lines]
    rate = run.get("offered_requests_per_s")
    lines.append(f"{rate:.1f} requests/s arrive" if rate else "closed loop")
    return "\n".join([*lines, *run.get("commit", "").split(" with ")])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def several(kind: type) -> Any:  # noqa: ANN401 - argparse's type argument
        return lambda text: [kind(part) for part in text.split(",")]

    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", default="tiny", choices=SHAPES, help="a real shape with random weights")
    model.add_argument("--model", help="folder, GGUF file or hub name of a real model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", type=several(str), default=list(METHODS), help=", ".join(REUSE_METHODS))
    parser.add_argument("--alpha", type=several(float), default=[1.0], help="0 = uniform popularity")
    parser.add_argument("--documents", type=int, default=200, help="size of the collection")
    parser.add_argument("--documents-per-request", type=several(int), default=[10])
    parser.add_argument("--document-len", type=several(str), default=["512"], help="512, 128-1024 or 512~0.6")
    parser.add_argument("--question-len", default="64")
    parser.add_argument("--output-len", default="32")
    parser.add_argument("--popular-first", action="store_true", help="order documents by popularity, not by chance")
    parser.add_argument("--trace", type=Path, help="folder of the RAGPulse trace, in place of drawn documents")
    parser.add_argument("--budget", type=several(float), default=[1.0], help="KV memory over the working set")
    parser.add_argument("--requests", type=int, default=64, help="cold, and as many warm")
    parser.add_argument("--concurrency", type=int, default=16, help="of the closed loop")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--rate", type=float, help="requests/s of an open loop with Poisson arrivals")
    loop.add_argument(
        "--load", type=float, default=0.0, help="likewise, as share of what rotate_query serves in the closed loop"
    )
    parser.add_argument("--combos", choices=("options", "standard"), default="options", help="what a sweep runs")
    parser.add_argument("--shard", default="0/1", help="i/n: only every n-th combination, from the i-th")
    parser.add_argument("--time-budget-s", type=float, help="leave out combinations that would take longer in all")
    parser.add_argument("--kv-tokens", type=int, help="size of the KV pool; default: what the device has free")
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serving.json"))
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few requests, to see that all works")
    arguments = parser.parse_args(argv)
    try:
        shard_of([], arguments.shard)
    except ValueError as error:
        parser.error(str(error))
    for method in arguments.methods:
        REUSE_METHODS[method]  # an unknown one is named with its nearest match
    if arguments.smoke:
        arguments.shape, arguments.model, arguments.requests, arguments.concurrency = "tiny", None, 6, 3
        arguments.documents, arguments.documents_per_request, arguments.document_len = 8, [3], ["24-40"]
        arguments.question_len, arguments.output_len, arguments.kv_tokens = "8", "3", 4096
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sweep, print tables, write JSON and a plot."""
    started_s = time.monotonic()
    arguments = parse(argv)
    engine = make_engine(arguments)
    warm_up(engine, arguments.methods, arguments.concurrency)
    sweep = Sweep(engine, arguments, started_s)
    report: dict[str, Any] = {
        "benchmark": "bench_serving",
        "environment": describe_environment(),
        "commit": os.environ.get("COMMIT", ""),
        "model": engine.loaded.name,
        "random_weights": not arguments.model,
        "dtype": str(engine.loaded.dtype),
        "compiled": engine.model_runner.compiled is not None,
        "cuda_graphs": engine.model_runner.graphs is not None,
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "start_up_s": time.monotonic() - started_s,
        "runs": sweep.runs,
        "left_out": sweep.left_out,
        "failed": sweep.failed,
    }
    print(f"{engine.loaded.name} on {arguments.device}, {engine.loaded.dtype}; ready in {report['start_up_s']:.1f} s")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for _ in sweep.run():
        write_report(report, arguments.out)
    write_report(report, arguments.out)
    print_summary(sweep)
    if sweep.runs:
        plot(sweep.runs, arguments.out.with_suffix(".png"))
    print(f"\nwritten to {arguments.out}")
    if sweep.failed:
        raise SystemExit(f"{len(sweep.failed)} combinations failed")


def write_report(report: dict[str, Any], path: Path) -> None:
    """Replace the report as a whole, so that a run that is cut off leaves a valid one."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(report, indent=1) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    main()
