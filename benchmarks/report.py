# SPDX-License-Identifier: Apache-2.0
"""Builds docs/benchmarks.md and its figures from the JSON files in benchmarks/results/.

python benchmarks/report.py
"""

import json
import textwrap
from pathlib import Path
from typing import Any

from serving_combos import methods_of
from target_rows import read, rows_of
from targets import table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"

INTRODUCTION = """# Benchmarks

How fast every reuse method is and what memory it takes, on a CPU and on a GPU. Written by `benchmarks/report.py` from the files
in `benchmarks/results/`. Medians; both sides of every ratio ran in one process. What a reuse method is:
[reuse_methods.md](reuse_methods.md). What reuse costs in answers: [quality.md](quality.md).
"""


def targets_section() -> str:
    """Put every figure to reach beside what was measured."""
    return f"""## Targets

Every figure to reach beside what was measured last: on one NVIDIA H200, with the shape of Llama-3.1-8B and random weights in bfloat16, unless a line says otherwise. `python benchmarks/targets.py` prints this table, `--run --out OUT` measures what one GPU can tell anew. In brackets: what the target does not name, such as other models. Of "other runs" the worst is shown; they are below and in [gpu.md](gpu.md#serving). What bounds the missed ones: [gpu.md](gpu.md#measured), [kernels.md](kernels.md#what-they-reach).

{table(rows_of(read(RESULTS)))}"""


def cpu_section(report: dict[str, Any]) -> str:
    """Describe `bench_cpu.py`'s results."""
    environment = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        "## On the CPU",
        "",
        f"`make bench`: {report['model']}, float32, {report['num_documents']} documents of about "
        f"{report['tokens_per_document']} tokens in a new order for each of {report['rounds']} requests per method.",
        f"{environment['processor']}, {environment['num_cores']} cores; {versions}; commit {environment['commit']}.",
        "",
        "| method | TTFT cold | TTFT warm (p10-p90) | against full recompute | tokens computed / reused "
        "| KV of the documents, 8 requests | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, r in report["methods"].items():
        lines.append(
            f"| `{method}` | {r['cold_ttft_ms']:.0f} ms | {r['median_ms']:.0f} ms ({r['p10_ms']:.0f}-{r['p90_ms']:.0f}) "
            f"| {r['speedup']:.1f} x | {r['computed_tokens']} / {r['reused_tokens']} "
            f"| {r['times_own_size']:.2f} x their size | {r['peak_rss_bytes'] / 2**20:.0f} MiB |"
        )
    overhead = report["overhead_batch_8"]
    lines += [
        "",
        "Cold: nothing is stored. Warm: every document is stored, the order is new. KV of the documents: blocks that hold "
        "documents while 8 requests use the same ones in 8 orders, divided by the documents' own size.",
        "",
        f"A decode step at batch 8 takes {overhead['decode_step_ms']:.0f} ms, "
        f"{100 * overhead['share_outside_forward']:.1f} % of it outside the model's forward (scheduling, planning, "
        "sampling, detokenising).",
    ]
    return "\n".join(lines) + "\n"


def provenance_of(report: dict[str, Any]) -> str:
    """Return what a report was measured on, and what else ran there."""
    environment = report["environment"]
    machine = environment["gpu"][0] if environment.get("gpu") else environment["processor"]
    beside = f" ({report['beside']})" if report.get("beside") else ""
    return f"{machine}, torch {environment['versions']['torch']}{beside}"


def engine_section(report: dict[str, Any]) -> str:
    """Describe what `gpu_engine.py` measured first; the rest is on the GPU pages."""
    lines = [
        "## On a GPU",
        "",
        f"{report['model']}, {provenance_of(report)}, commit {report['commit']}. Time to first token of a 64-token question over ten stored 512-token documents in a "
        "new order, one request alone:",
        "",
        "| method | median | p10-p90 | over `rotate_query` |",
        "|---|---|---|---|",
    ]
    for method, t in report["ttft"].items():
        if "median" in t:
            times = report["ttft"]["times_faster_than"].get(method, 1.0)
            lines.append(f"| `{method}` | {t['median']:.2f} ms | {t['p10']:.1f}-{t['p90']:.1f} | {times:.2f} x |")
    lines += [
        "",
        "Decode, serving at equal memory, and what was missed: [gpu.md](gpu.md). Kernels against their floors: "
        "[kernels.md](kernels.md). The server under load: [operations.md](operations.md).",
    ]
    return "\n".join(lines) + "\n"


def serving_section(reports: list[dict[str, Any]]) -> str:
    """Describe `bench_serving.py --combos standard`: one table per model, what was gained and what was not."""
    lines = [
        "## Serving on a GPU",
        "",
        "`bench_serving.py --combos standard`: all reuse methods on the same requests in the same engine with the same KV "
        "memory. Budget: share of the documents in use that fits. Length: tokens, "
        "512~0.8 is log-normal with median 512 and sigma 0.8. Load: closed loop, or Poisson arrivals at this share of "
        "what `rotate_query` serves in the closed loop. Warm phase of 32 requests; one run each, so that ten per cent "
        "mean little. "
        "After each method: its median TTFT over that of `rotate_query`, and the requests/s of `rotate_query` over its own; "
        "below 1 `rotate_query` is the slower one.",
    ]
    for report in reports:
        others = [method for method in methods_of(report["runs"]) if method != "rotate_query"]
        lines += [
            "",
            f"**{report['model']}**, {provenance_of(report)}; {len(report['left_out'])} combinations "
            f"left out for lack of time. {losses_of(report['runs'])}" + repeats_of(report["runs"]),
            "",
            "| alpha | documents | length | budget | load | TTFT p50, p95 ms | requests/s | tokens found | "
            + " | ".join(f"`{method}`" for method in others)
            + " | commit |",
            "|" + "---|" * (9 + len(others)),
        ]
        for run in report["runs"]:
            s, warm = run["settings"], {method: phases["warm"] for method, phases in run["methods"].items()}
            ours = warm["rotate_query"]
            gains = [
                f"{warm[method]['ttft_p50_ms'] / ours['ttft_p50_ms']:.2f} x, "
                f"{ours['requests_per_s'] / warm[method]['requests_per_s']:.2f} x"
                if method in warm
                else "-"
                for method in others
            ]
            lines.append(
                f"| {s['alpha']} | {s['documents_per_request']} | {s['document_len']} | {s['budget']} "
                f"| {s['load'] or 'closed'} | {ours['ttft_p50_ms']:.0f}, {ours['ttft_p95_ms']:.0f} "
                f"| {ours['requests_per_s']:.1f} | {ours['hit_rate']:.0%} | {' | '.join(gains)} "
                f"| {run.get('commit', report['commit'])} |"
            )
        figure = figure_of(report)
        if figure.exists():
            lines += ["", f"![Requests per second and median TTFT of {report['model']}](images/{figure.name})"]
    return "\n".join(lines) + "\n"


def losses_of(runs: list[dict[str, Any]]) -> str:
    """Say in how many comparisons `rotate_query` is the slower one, and how much at most."""
    pairs = [
        (run["methods"]["rotate_query"]["warm"], phases["warm"])
        for run in runs
        for method, phases in run["methods"].items()
        if method != "rotate_query"
    ]
    rates = [ours["requests_per_s"] / other["requests_per_s"] for ours, other in pairs]
    ttfts = [other["ttft_p50_ms"] / ours["ttft_p50_ms"] for ours, other in pairs]
    said = [
        f"{sum(ratio < 1 for ratio in ratios)} times {what} (at worst {min(ratios):.2f} x)"
        for what, ratios in (("fewer requests/s", rates), ("the longer median TTFT", ttfts))
    ]
    return f"In {len(pairs)} comparisons `rotate_query` has {' and '.join(said)}."


def repeats_of(runs: list[dict[str, Any]]) -> str:
    """Say how far `rotate_query` was from itself where a combination was measured more than once."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        rate = run["methods"]["rotate_query"]["warm"]["requests_per_s"]
        rates.setdefault(json.dumps(run["settings"]), []).append(rate)
    spreads = [max(x) / min(x) - 1 for x in rates.values() if len(x) > 1]
    shown = ", ".join(f"{spread:.0%}" for spread in spreads)
    return f" Measured twice, its requests/s differ by {shown}." if spreads else ""


def figure_of(report: dict[str, Any]) -> Path:
    """Return where the figure of a serving report is."""
    return IMAGES / f"serving_{report['model'].split()[0]}.png"


def build_page() -> str:
    """Return the page's text."""
    sections = [INTRODUCTION, targets_section(), cpu_section(json.loads((RESULTS / "cpu.json").read_text()))]
    sections.append(engine_section(json.loads((RESULTS / "engine_h200.json").read_text())))
    serving = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("serving_*.json"))]
    if serving:
        sections.append(serving_section(serving))
    return within_house_width("\n".join(sections))


def within_house_width(text: str) -> str:
    """Wrap what is no table."""
    lines = text.split("\n")
    return "\n".join(
        line if line.startswith("|") else textwrap.fill(line, 130, break_on_hyphens=False) for line in lines
    )


if __name__ == "__main__":
    from bench_serving import plot

    for path in RESULTS.glob("serving_*.json"):
        report = json.loads(path.read_text())
        plot(report["runs"], figure_of(report))
    PAGE.write_text(build_page())
    print(f"written to {PAGE.relative_to(ROOT)}")
