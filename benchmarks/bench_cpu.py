# SPDX-License-Identifier: Apache-2.0
"""Reuse on the CPU: warm time to first token, memory and engine overhead of every reuse method, side by side.

The same documents are asked about again and again, in a new order each time. All methods run in one process and take
turns, so that both sides of every ratio see the same machine. Peak memory is measured apart, one process per method.

    python benchmarks/bench_cpu.py [--model M] [--documents 10] [--tokens 200] [--rounds 20] [--out FILE]
"""

import argparse
import itertools
import json
import random
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from lazyattention import LLM, Document, SamplingParams
from lazyattention.engine.outputs import RequestOutput
from lazyattention.reuse import REUSE_METHODS
from lazyattention.utils.environment import describe_environment

WORDS = (  # noqa: SIM905 - a sentence reads better as one
    "the river flows past old towns and quiet fields while boats carry grain salt stone and letters to the sea and "
    "people on its banks count floods build mills mend nets and tell each other what their grandparents saw"
).split()


def make_documents(llm: LLM, num_documents: int, num_tokens: int, rng: random.Random) -> list[Document]:
    """Write documents of about `num_tokens` tokens each."""
    documents = []
    for index in range(num_documents):
        words: list[str] = []
        while len(llm.engine.prompts.document_spans(Document(" ".join(words)))[0].token_ids) < num_tokens - 2:
            words.append(rng.choice(WORDS))
        documents.append(Document(" ".join(words), id=f"document-{index}"))
    return documents


_numbers = itertools.count(1000)


def ask(llm: LLM, documents: list[Document], method: str, max_tokens: int = 1) -> RequestOutput:
    """Ask one short question that nobody asked before: no method finds another's question stored."""
    messages = [{"role": "user", "content": f"Question {next(_numbers)}: what do people on the banks of the river do?"}]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    output = llm.chat(messages, params, documents=documents, reuse_method=method, progress=False)[0]
    if output.error is not None:
        raise output.error
    return output


def percentiles(values: list[float]) -> dict[str, float]:
    """Return median, p10 and p90 in milliseconds."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median_ms": statistics.median(values) * 1e3, "p10_ms": deciles[0] * 1e3, "p90_ms": deciles[-1] * 1e3}


def measure_ttft(llm: LLM, documents: list[Document], rounds: int, rng: random.Random) -> dict[str, Any]:
    """Time the first token of every method on reordered documents, after one cold request each."""
    results: dict[str, Any] = {}
    samples: dict[str, list[float]] = {method: [] for method in REUSE_METHODS}
    computed: dict[str, list[int]] = {method: [] for method in REUSE_METHODS}
    num_prompt_tokens = 0
    for method in REUSE_METHODS:
        llm.engine.cache.clear()
        cold = ask(llm, documents, method)
        results[method] = {"cold_ttft_ms": (cold.timings.ttft_s or 0.0) * 1e3}
    for _ in range(rounds):
        order = rng.sample(documents, len(documents))
        for method in REUSE_METHODS:
            output = ask(llm, order, method)
            samples[method].append(output.timings.ttft_s or 0.0)
            computed[method].append(output.num_computed_tokens)
            num_prompt_tokens = output.num_prompt_tokens
    for method, values in samples.items():
        num_computed = int(statistics.median(computed[method]))
        results[method] |= percentiles(values)
        results[method] |= {"computed_tokens": num_computed, "reused_tokens": num_prompt_tokens - num_computed}
    full = results["full_recompute"]["median_ms"]
    for result in results.values():
        result["speedup"] = full / result["median_ms"]
    return results


def measure_kv_bytes(llm: LLM, documents: list[Document], rng: random.Random) -> dict[str, Any]:
    """Compare the KV bytes held while 8 requests use the documents in 8 orders with the documents' own size."""
    engine = llm.engine
    spans = [span for document in documents for span in engine.prompts.document_spans(document)]
    own_blocks = sum(engine.cache.num_blocks_of(len(span.token_ids)) for span in spans)
    results = {}
    for method in REUSE_METHODS:
        engine.cache.clear()
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        for index in range(8):
            order = rng.sample(documents, len(documents))
            messages = [{"role": "user", "content": f"Question {index}?"}]
            engine.add_request(f"kv-{index}", engine.prompts.chat(messages, order), params, reuse_method=method)
        peak_blocks = 0
        while engine.has_work:
            engine.step()
            peak_blocks = max(peak_blocks, len(document_blocks(llm)))
        results[method] = {"peak_document_blocks": peak_blocks, "times_own_size": peak_blocks / own_blocks}
    return results


def document_blocks(llm: LLM) -> set[int]:
    """Return the KV blocks that hold documents for the running requests, stored and private ones."""
    blocks: set[int] = set()
    for sequence in llm.engine.scheduler.running:
        for span, source in zip(sequence.spans, sequence.group.layout.spans, strict=True):
            if source.is_document:
                blocks.update(span.block_ids, span.chunk.block_ids if span.chunk is not None else ())
    return blocks


def measure_overhead(llm: LLM, documents: list[Document], rng: random.Random) -> dict[str, float]:
    """Share of a decode step at batch 8 that is spent outside the model's forward."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for index in range(8):
        order = rng.sample(documents, len(documents))
        layout = engine.prompts.chat([{"role": "user", "content": f"Question {index}?"}], order)
        engine.add_request(f"overhead-{index}", layout, params)
    shares, steps_ms = [], []
    while engine.has_work:
        is_decode = len(engine.scheduler.running) == 8 and all(s.is_decoding for s in engine.scheduler.running)
        before = (engine.stats.step_s, engine.stats.forward_s)
        engine.step()
        step_s, forward_s = engine.stats.step_s - before[0], engine.stats.forward_s - before[1]
        if is_decode:
            shares.append(1 - forward_s / step_s)
            steps_ms.append(step_s * 1e3)
    return {"decode_step_ms": statistics.median(steps_ms), "share_outside_forward": statistics.median(shares)}


def peak_memory_bytes(arguments: argparse.Namespace, method: str) -> int:
    """Run one method alone in a fresh process and return its peak resident memory."""
    command = [sys.executable, __file__, "--memory-of", method, "--documents", str(arguments.documents)]
    command += ["--tokens", str(arguments.tokens)] + (["--model", arguments.model] if arguments.model else [])
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()[-1])


def print_peak_memory(arguments: argparse.Namespace) -> None:
    """The child's part: ask twice in different orders, print peak resident bytes."""
    llm = LLM(arguments.model, progress=False, num_blocks=4096)
    documents = make_documents(llm, arguments.documents, arguments.tokens, random.Random(0))
    for order in (documents, documents[::-1]):
        ask(llm, order, arguments.memory_of, max_tokens=4)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="folder, GGUF file or hub name; default: the small default model")
    parser.add_argument("--documents", type=int, default=10, help="documents per request")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per document")
    parser.add_argument("--rounds", type=int, default=20, help="timed requests per method")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu.json"))
    parser.add_argument("--memory-of", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print_peak_memory(arguments)
        return
    rng = random.Random(0)
    llm = LLM(arguments.model, progress=False, num_blocks=4096)
    documents = make_documents(llm, arguments.documents, arguments.tokens, rng)
    methods = measure_ttft(llm, documents, arguments.rounds, rng)
    for method, kv in measure_kv_bytes(llm, documents, rng).items():
        methods[method] |= kv
    overhead = measure_overhead(llm, documents, rng)
    for method in methods:
        methods[method]["peak_rss_bytes"] = peak_memory_bytes(arguments, method)
    report = {
        "benchmark": "bench_cpu",
        "environment": describe_environment(),
        "model": llm.model_name,
        "num_documents": arguments.documents,
        "tokens_per_document": arguments.tokens,
        "rounds": arguments.rounds,
        "methods": methods,
        "overhead_batch_8": overhead,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    head = ("method", "cold ms", "warm ms (p10-p90)", "x full", "computed", "reused", "KV x own size", "peak RSS MiB")
    print("{:16} {:>9} {:>24} {:>7} {:>9} {:>7} {:>14} {:>13}".format(*head))
    for method, r in methods.items():
        warm = f"{r['median_ms']:.0f} ({r['p10_ms']:.0f}-{r['p90_ms']:.0f})"
        print(
            f"{method:16} {r['cold_ttft_ms']:9.0f} {warm:>24} {r['speedup']:7.1f} {r['computed_tokens']:9} "
            f"{r['reused_tokens']:7} {r['times_own_size']:14.2f} {r['peak_rss_bytes'] / 2**20:13.0f}"
        )
    share = 100 * overhead["share_outside_forward"]
    print(f"decode step at batch 8: {overhead['decode_step_ms']:.0f} ms, {share:.1f} % outside the model's forward")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
