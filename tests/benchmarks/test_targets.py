# SPDX-License-Identifier: Apache-2.0
"""Every target stands in one table, judged by what was measured, and a measurement that was cut short goes on."""

import copy
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_serving
import target_rows
import targets
from target_rows import Row, Target, read, rows_of

WANTED = [
    "turning q in the kernel, of the kernel's time",
    "shared decode with its merge, of read bandwidth on unique bytes",
    "`chunk_prefill`, of cuDNN attention on contiguous KV",
    "decode step recorded without attention, over its linear layers",
    "warm TTFT, 10 documents of 512 tokens, question of 64",
    "the same, faster than full recompute",
    "TTFT and requests/s against `copy_rotate`, Zipf 1.0 to 2.1",
    "the same, all documents equally popular",
    "requests/s against `prefix`, Zipf 1.0",
    "KV resident per distinct document, of its size",
    "CPU, 135M model, 10 documents of 200 tokens: warm TTFT, faster than full recompute",
    "a new plan, 256 requests x 20 documents",
]
BOUNDS = ["<= 1 %", ">= 85 %", ">= 90 %", "<= 1.12 x", "<= 10 ms", ">= 12 x", ">= 1.5 x", ">= 1 x", ">= 3 x", "<= 1 x"]


@pytest.fixture(scope="module")
def kept():
    return read(targets.KEPT)


def cells_of(text, column):
    return [line.split("|")[column].strip() for line in text.splitlines() if line.startswith("|")][2:]


def find(rows, target, case):
    (row,) = (row for row in rows if row.target is target and case in row.case)
    return row


def test_every_target_stands_once_in_the_table_of_the_kept_results_and_all_of_it_is_measured(kept):
    text = targets.table(rows_of(kept))
    assert [what for what in cells_of(text, 1) if what] == WANTED
    assert [bound for bound in cells_of(text, 2) if bound] == [*BOUNDS, ">= 5 x", "<= 0.3 ms"]
    assert "not measured" not in cells_of(text, 5)
    assert all(re.match(r"[0-9a-f]{7}\b", commit) for commit in cells_of(text, 6))
    cases = [(row.target, row.case) for row in rows_of(kept)]
    assert len(cases) == len(set(cases))


def test_values_are_those_of_the_files(kept):
    rows = rows_of(kept)
    final = kept["tune"]["decode"]["final"]["64 a=1.0"]
    share = 100 * kept["tune"]["decode"]["floor_ms"]["64 a=1.0"] / final["best"]
    assert find(rows, target_rows.DECODE, "64 requests, Zipf 1.0").value == pytest.approx(share)
    assert find(rows, target_rows.TTFT, "").value == kept["engine"]["ttft"]["rotate_query"]["median"]
    newest = kept["serving_8b"]["runs"][0]  # an earlier run served the same, and does not count
    run = newest["methods"]
    ratio = run["rotate_query"]["warm"]["requests_per_s"] / run["copy_rotate"]["warm"]["requests_per_s"]
    row = find(rows, target_rows.COPY, "10 x 512, Zipf 1.0: requests/s")
    assert (row.value, row.commit) == (pytest.approx(ratio), newest["commit"])


@pytest.mark.parametrize(
    ("target", "case", "keys", "good", "bad"),
    [
        (target_rows.TURN, "prefill, 2048 x 8192", ("tune", "prefill", "turn", "2048 x 8192"), 0.01, 0.012),
        (target_rows.DECODE, "256 requests, Zipf 1.2", ("tune", "decode", "floor_ms", "256 a=1.2"), 9.0, 0.001),
        (target_rows.PREFILL, "2048 x 8192", ("tune", "prefill", "times", "2048 x 8192", "cuDNN"), 9.0, 0.001),
        (target_rows.OUTSIDE, ": 16", ("engine", "decode", "16", "without_over_linear"), 1.12, 1.121),
        (target_rows.TTFT, "", ("engine", "ttft", "rotate_query", "median"), 10.0, 10.01),
        (target_rows.FULL, "", ("engine", "ttft", "times_faster_than", "full_recompute"), 12.0, 11.9),
        (target_rows.CPU, "", ("cpu", "methods", "rotate_query", "speedup"), 5.0, 4.9),
        (target_rows.PLAN, "host", ("ops", "plan", "another batch, ms"), 0.3, 0.31),
        (target_rows.PLAN, "CPU tests", ("plan_cpu", "plan", "another batch, ms"), 0.3, 0.31),
    ],
)
def test_one_value_flips_one_verdict(kept, target, case, keys, good, bad):
    said = {}
    for value in (good, bad):
        reports = copy.deepcopy(kept)
        place = reports
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        rows = rows_of(reports)
        said[value] = [row.verdict() for row in rows]
        row = find(rows, target, case)
        assert row.verdict().startswith("reached" if value == good else "missed by")
    assert sum(a != b for a, b in zip(*said.values(), strict=True)) == 1


def test_a_verdict_says_by_how_much():
    assert Row(Target("", 90, "%"), "", "", 88.6).verdict() == "missed by 1.4 points"
    assert Row(Target("", 0.3, "ms", at_most=True), "", "", 0.6).verdict() == "missed by 0.3 ms"
    assert Row(Target("", 3, "x"), "", "", 2.0, decides=False).verdict() == "(missed by 1 x)"
    assert Row(Target("", 3, "x"), "", "", 3.0).verdict() == "reached"


def serve(ttft_ms, rates, *, copies=1.0, **changed):
    """A run in which `rotate_query` has 100 ms and 30 requests/s."""
    settings = {"alpha": 1.0, "documents_per_request": 10, "document_len": "512", "budget": 1.0, "load": 0.0} | changed
    ours = {"ttft_p50_ms": 100.0, "requests_per_s": 30.0, "copies_of_documents": copies}
    others = {
        method: {"warm": {"ttft_p50_ms": ttft_ms, "requests_per_s": rate}}
        for method, rate in zip(("copy_rotate", "prefix"), rates, strict=True)
    }
    return {"settings": settings, "methods": {"rotate_query": {"warm": ours}, **others}}


def serving(model, *runs):
    return {"model": f"{model} (random weights)", "commit": "0123456789", "runs": list(runs)}


def test_only_the_named_workload_decides_but_never_means_every_run():
    other = {"documents_per_request": 5}
    reports = {
        "serving_8b": serving(
            "llama-3.1-8b",
            serve(150.0, (20.0, 10.0)),
            serve(140.0, (25.0, 29.0), **other),
            serve(145.0, (10.0, 10.0), **other),
            serve(160.0, (40.0, 10.0), alpha=0.0, **other),
        ),
        "serving_4b": serving("qwen3-4b", serve(90.0, (31.0, 31.0), copies=1.5), serve(90.0, (31.0, 31.0), alpha=0.0)),
    }
    said = {(row.target, row.case): row.verdict() for row in rows_of(reports) if row.value is not None}
    our = "llama-3.1-8b, least of {} other runs: {}"
    assert said[target_rows.COPY, "10 x 512, Zipf 1.0: TTFT"] == "reached"
    assert said[target_rows.COPY, "10 x 512, Zipf 1.0: requests/s"] == "reached"
    assert said[target_rows.COPY, our.format(2, "TTFT")] == "(missed by 0.1 x)"
    assert said[target_rows.UNIFORM, our.format(1, "TTFT")] == "reached"
    assert said[target_rows.UNIFORM, our.format(1, "requests/s")] == "missed by 0.25 x"
    assert said[target_rows.UNIFORM, "qwen3-4b, least of 1 other runs: TTFT"] == "(missed by 0.1 x)"
    assert said[target_rows.PREFIX, "10 x 512, Zipf 1.0: requests/s"] == "reached"
    assert said[target_rows.RESIDENT, "most of all serving runs"] == "missed by 0.5 x"
    assert (target_rows.COPY, "10 x 512, Zipf 2.1: TTFT") not in said


def test_absent_files_parts_and_runs_are_not_measured(kept, tmp_path):
    rows = rows_of(read(tmp_path))
    assert {row.verdict() for row in rows} == {"not measured"}
    text = targets.table(rows)
    assert [what for what in cells_of(text, 1) if what] == WANTED
    assert set(cells_of(text, 4)) == {"-"}
    assert ": 0 reached, 0 missed, " in text
    # Parts that failed, as their scripts write it; a file that its script was stopped in; another model.
    (tmp_path / "ops.json").write_text(json.dumps({"prefill": {"error": "x"}, "plan": {"error": "x"}}))
    (tmp_path / "engine.json").write_text(json.dumps({"model": "llama-3.1-8b", "ttft": None, "serving": None}))
    (tmp_path / "tune.json").write_text('{"decode": {')
    assert {row.verdict() for row in rows_of(read(tmp_path))} == {"not measured"}
    small = rows_of({"engine": kept["engine"] | {"model": "llama-3.2-1b (random weights)"}})
    assert find(small, target_rows.TTFT, "").verdict() == "not measured"


def test_a_run_goes_on_with_what_is_missing(kept, tmp_path):
    """A fake runner writes what each script would; the second fails in the middle."""
    names = {"gpu_all.py": "ops", "tune_ops.py": "tune", "gpu_engine.py": "engine", "bench_serving.py": "serving"}
    runs = [serve(150.0, (20.0, 10.0), alpha=alpha) for alpha in (1.0, 2.1, 0.0)]
    reports = kept | {"serving": serving("llama-3.1-8b", *runs), "engine": kept["engine"] | {"earlier": {}}}
    called, fails = [], {"tune_ops.py"}

    def run(command, limit_s):
        called.append(command[0])
        assert 0 < limit_s <= 600
        out = Path(command[command.index("--out") + 1])
        report = reports[names[command[0]]]
        if command[0] in fails:
            report = report | {"decode": None}
        path = out if out.suffix == ".json" else out / f"{names[command[0]]}.json"
        path.write_text(json.dumps(report))
        return "stopped after 1 s" if command[0] in fails else ""

    targets.measure(tmp_path, run)
    assert called == list(names)
    fails.clear()
    targets.measure(tmp_path, run)
    assert called[4:] == ["tune_ops.py"]
    targets.measure(tmp_path, run)
    assert len(called) == 5
    missing = [row.target for row in rows_of(read(tmp_path)) if row.value is None]
    assert missing == [target_rows.CPU, target_rows.PLAN]  # those of another machine


def test_every_step_calls_a_script_with_options_that_it_has(tmp_path):
    steps = targets.steps_of(tmp_path)
    for command, _ in steps.values():
        text = (targets.ROOT / "benchmarks" / command[0]).read_text()
        assert all(f'"{word}"' in text for word in command if word.startswith("--")), command
    combos = bench_serving.combos_of(bench_serving.parse(steps["serving"][0][1:]))
    assert combos == [replace(target_rows.SERVED, alpha=alpha) for alpha in (1.0, 2.1, 0.0)]


def test_a_script_that_takes_too_long_is_stopped_with_what_it_started(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    pid_path = tmp_path / "pid"
    (tmp_path / "benchmarks" / "slow.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid_path)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "benchmarks" / "red.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setattr(targets, "ROOT", tmp_path)
    assert targets.run_script(["slow.py"], 1.0) == "stopped after 1 s"
    state = ""
    for _ in range(50):  # gone, or dead and not yet collected
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid_path.read_text()], capture_output=True, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            break
        time.sleep(0.1)
    assert not state.strip() or state.startswith("Z")
    assert targets.run_script(["red.py"], 10.0) == "ended with 3"


def test_run_needs_a_folder(capsys):
    with pytest.raises(SystemExit):
        targets.main(["--run"])
    assert "--run needs --out" in capsys.readouterr().err
