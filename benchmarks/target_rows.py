# SPDX-License-Identifier: Apache-2.0
"""The figures the project wants to reach, and what reports of the other scripts say about each: the rows of `targets.py`."""

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serving_combos import Combo

# Figures are of this shape unless a row says otherwise.
MODEL = "llama-3.1-8b"


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be reached; `at_most`: by being small."""

    what: str
    bound: float
    unit: str
    at_most: bool = False

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Row:
    """One case of a target.

    Attributes:
        target: What it is a case of.
        case: What was measured.
        source: Which report it comes from.
        value: In the target's unit; None = not measured.
        commit: Of the measurement.
        decides: Whether the target names this case.
    """

    target: Target
    case: str
    source: str
    value: float | None
    commit: str = ""
    decides: bool = True

    @property
    def missed_by(self) -> float:
        """How far the value is from the bound, in the target's unit; not above 0 = reached."""
        assert self.value is not None
        return (self.value - self.target.bound) * (1 if self.target.at_most else -1)

    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        unit = self.target.unit.replace("%", "points")
        said = f"missed by {self.missed_by:.2g} {unit}" if self.missed_by > 0 else "reached"
        return said if self.decides else f"({said})"


TURN = Target("turning q in the kernel, of the kernel's time", 1, "%", at_most=True)
DECODE = Target("shared decode with its merge, of read bandwidth on unique bytes", 85, "%")
PREFILL = Target("`chunk_prefill`, of cuDNN attention on contiguous KV", 90, "%")
OUTSIDE = Target("decode step recorded without attention, over its linear layers", 1.12, "x", at_most=True)
TTFT = Target("warm TTFT, 10 documents of 512 tokens, question of 64", 10, "ms", at_most=True)
FULL = Target("the same, faster than full recompute", 12, "x")
COPY = Target("TTFT and requests/s against `copy_rotate`, Zipf 1.0 to 2.1", 1.5, "x")
UNIFORM = Target("the same, all documents equally popular", 1, "x")
PREFIX = Target("requests/s against `prefix`, Zipf 1.0", 3, "x")
RESIDENT = Target("KV resident per distinct document, of its size", 1, "x", at_most=True)
CPU = Target("CPU, 135M model, 10 documents of 200 tokens: warm TTFT, faster than full recompute", 5, "x")
PLAN = Target("a new plan, 256 requests x 20 documents", 0.3, "ms", at_most=True)

DECODES = (
    "64 requests, uniform",
    "256 requests, uniform",
    "64 requests, Zipf 1.0",
    "256 requests, Zipf 1.0",
    "256 requests, Zipf 1.2",
)
TURNED_PREFILLS = ("512 x 32768", "2048 x 8192", "2048 x 32768")
# Few rows against cuDNN one after the other (`gpu_all.py`), the others by turns (`tune_ops.py`).
FEW_ROWS = ("128 x 8192", "128 x 65536")
PREFILLS = ("512 x 8192", "512 x 32768", "2048 x 8192", "2048 x 32768", "2048 x 65536")
# The workload that the targets of serving name, but for the popularity: closed loop, memory for all documents in use.
SERVED = Combo(0.0, 10, "512", 1.0)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return a folder's reports by name, without the name of the GPU."""
    names = ("ops", "engine", "tune", "serving", "cpu", "plan_cpu")
    reports = {}
    for path in (path for name in names for path in sorted(folder.glob(f"{name}*.json"))):
        try:
            reports[path.stem.removesuffix("_h200")] = json.loads(path.read_text())
        except json.JSONDecodeError:  # its script was stopped while it wrote
            print(f"{path} is cut off: taken as absent", file=sys.stderr)
    return reports


def look(report: object, *keys: object, times: float = 1.0) -> float | None:
    """Return a number in a report, or None where it is absent."""
    for key in keys:
        report = report.get(key) if isinstance(report, dict) else None
    return report * times if isinstance(report, float | int) else None


def over(a: float | None, b: float | None, times: float = 1.0) -> float | None:
    """Return a / b, or None where one of them is absent."""
    return times * a / b if a is not None and b else None


def commit_of(report: dict[str, Any]) -> str:
    """Return what a report is a measurement of, hashes short."""
    places = (report, report.get("provenance") or {}, report.get("environment") or {})
    commit = next((place["commit"] for place in places if place.get("commit")), "")
    return re.sub(r"\b([0-9a-f]{7})[0-9a-f]+", r"\1", commit)


def rows_of(reports: dict[str, dict[str, Any]]) -> list[Row]:
    """Return every case of every target."""
    rows: list[Row] = []
    tune, ops, engine = (reports.get(name) or {} for name in ("tune", "ops", "engine"))
    if not engine.get("model", "").startswith(MODEL):
        engine = {}

    def add(target: Target, case: str, source: str, value: float | None) -> None:
        rows.append(Row(target, case, source, value, commit_of(reports.get(source) or {})))

    for name in DECODES:
        add(TURN, f"decode, {name}", "tune", look(tune, "decode", "final", short(name), "best, turn", times=100))
    for name in TURNED_PREFILLS:
        add(TURN, f"prefill, {name}", "tune", look(tune, "prefill", "turn", name, times=100))
    for name in DECODES:
        # With the best tiles: those of ops/_tiles.py, which a tuning's winners become; `--as-is` tries no others.
        ms = look(tune, "decode", "final", short(name), "best")
        add(DECODE, name, "tune", over(look(tune, "decode", "floor_ms", short(name)), ms, 100))
    timed = ops.get("prefill")
    by_size = {f"{r['rows']} x {r['keys']}": r for r in timed} if isinstance(timed, list) else {}
    for name in FEW_ROWS:
        share = over(look(by_size.get(name), "stock_ms", "CUDNN_ATTENTION"), look(by_size.get(name), "ms"), 100)
        add(PREFILL, f"{name} keys, one after the other", "ops", share)
    prefill = tune.get("prefill") or {}
    for name in PREFILLS:
        ours, cudnn = (look(prefill, "times", name, key) for key in (prefill.get("best", "ours"), "cuDNN"))
        add(PREFILL, f"{name} keys, by turns", "tune", over(cudnn, ours, 100))
    for size in ("1", "16", "64"):
        add(OUTSIDE, f"requests: {size}", "engine", look(engine, "decode", size, "without_over_linear"))
    add(TTFT, "", "engine", look(engine, "ttft", "rotate_query", "median"))
    add(FULL, "", "engine", look(engine, "ttft", "times_faster_than", "full_recompute"))
    rows += serving_rows(list(served(reports)))
    add(CPU, "", "cpu", look(reports.get("cpu"), "methods", "rotate_query", "speedup"))
    for case, source in (("on a GPU's host", "ops"), ("on the machine of the CPU tests", "plan_cpu")):
        add(PLAN, case, source, look(reports.get(source), "plan", "another batch, ms"))
    return rows


def short(name: str) -> str:
    """Return "64 requests, Zipf 1.0" as `tune_ops.py` has it."""
    return name.replace("uniform", "Zipf 0.0").replace(" requests, Zipf ", " a=")


@dataclass(frozen=True, slots=True)
class Served:
    """One workload that several methods served."""

    model: str
    combo: Combo
    commit: str
    methods: dict[str, Any]

    def gain(self, method: str, figure: str) -> float | None:
        """Return what `rotate_query` is worth against another method, warm; more than 1 = better."""
        ours, other = self.methods.get("rotate_query"), self.methods.get(method)
        if figure == "requests/s":
            return over(look(ours, "warm", "requests_per_s"), look(other, "warm", "requests_per_s"))
        return over(look(other, "warm", "ttft_p50_ms"), look(ours, "warm", "ttft_p50_ms"))


def served(reports: dict[str, dict[str, Any]]) -> Iterator[Served]:
    """Yield all that was served: sweeps of all models, then what `gpu_engine.py` served, newest first."""
    engine = reports.get("engine") or {}
    sweeps = [(r["model"], r, r["runs"]) for name, r in reports.items() if name.startswith("serving")]
    engines = (engine, *(engine.get("earlier") or {}).values())
    sweeps += [(engine["model"], report, report["serving"]) for report in engines if report.get("serving")]
    for model, report, runs in sweeps:
        for run in runs:
            s = run["settings"]
            if "alpha" in s:  # else a trace
                num_documents = s.get("documents_per_request", s.get("per_request"))
                combo = Combo(s["alpha"], num_documents, s["document_len"], s["budget"], s.get("load", 0.0))
                yield Served(model, combo, run.get("commit") or commit_of(report), run["methods"])


def serving_rows(runs: list[Served]) -> list[Row]:
    """Return the named workload, then the worst of all others, which decides only where "never" is the target."""
    rows = []
    named = [run for run in runs if run.model.startswith(MODEL) and replace(run.combo, alpha=0.0) == SERVED]
    for target, method, alphas, figures in (
        (COPY, "copy_rotate", (1.0, 2.1), ("TTFT", "requests/s")),
        (UNIFORM, "copy_rotate", (0.0,), ("TTFT", "requests/s")),
        (PREFIX, "prefix", (1.0,), ("requests/s",)),
    ):
        for alpha, figure in itertools.product(alphas, figures):
            run = next((run for run in named if run.combo.alpha == alpha), Served("", SERVED, "", {}))
            case = f"10 x 512, {f'Zipf {alpha}' if alpha else 'uniform'}: {figure}"
            rows.append(Row(target, case, "serving", run.gain(method, figure), run.commit))
        others = [run for run in runs if run not in named and alphas[0] <= run.combo.alpha <= alphas[-1]]
        for model, figure in itertools.product(sorted({run.model for run in others}), figures):
            gains = [(run.gain(method, figure), run.commit) for run in others if run.model == model]
            value, commits = extreme(gains, min)
            case = f"{model.split()[0]}, least of {len(gains)} other runs: {figure}"
            rows.append(Row(target, case, "kept", value, commits, target is UNIFORM and model.startswith(MODEL)))
    phases = [(phase, run.commit) for run in runs for phase in (run.methods.get("rotate_query") or {}).values()]
    value, commits = extreme([(look(phase, "copies_of_documents"), commit) for phase, commit in phases], max)
    return [*rows, Row(RESIDENT, "most of all serving runs", "serving", value, commits)]


def extreme(values: list[tuple[float | None, str]], choose: Callable[[list[float]], float]) -> tuple[float | None, str]:
    """Return the chosen of the values, and the commits it was measured at."""
    measured = [value for value, _ in values if value is not None]
    if not measured:
        return None, ""
    chosen = choose(measured)
    return chosen, ", ".join(sorted({commit for value, commit in values if value == chosen}))
