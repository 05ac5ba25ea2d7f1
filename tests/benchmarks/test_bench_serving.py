# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark measures what it says, and its workloads are what they say."""

import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_serving
from random_models import random_model
from serving_combos import Combo, shard_of, standard_combos
from workloads import Lengths, at_rate, trace_workload, zipf_workload

from lazyattention import EngineConfig
from lazyattention.engine.engine import Engine
from lazyattention.errors import LazyAttentionError

SMALL = {
    "num_documents": 12,
    "documents_per_request": 3,
    "num_requests": 8,
    "document_len": "20-40",
    "question_len": "6",
}


@pytest.fixture(scope="module")
def engine():
    return Engine(random_model("tiny"), EngineConfig.of(num_blocks=400, max_num_seqs=8))


@pytest.fixture
def workload():
    return zipf_workload(**SMALL, alpha=1.0, output_len="3", preamble_len=8)


def test_smoke_run_writes_report_and_plot(tmp_path, capsys):
    bench_serving.main(["--smoke", "--out", str(tmp_path / "serving.json")])
    report = json.loads((tmp_path / "serving.json").read_text())
    assert report["random_weights"] is True
    assert "random weights" in report["model"]
    (run,) = report["runs"]
    assert list(run["methods"]) == list(bench_serving.METHODS)
    assert run["methods"]["full_recompute"]["warm"]["hit_rate"] == 0
    assert run["methods"]["rotate_query"]["warm"]["hit_rate"] > run["methods"]["rotate_query"]["cold"]["hit_rate"] > 0
    assert all(phases["warm"]["num_requests"] == 6 for phases in run["methods"].values())
    assert [method for method, phases in run["methods"].items() if "cold" not in phases] == ["full_recompute"]
    assert (tmp_path / "serving.png").stat().st_size > 10_000
    assert "random weights" in capsys.readouterr().out


@pytest.fixture
def few_combos(monkeypatch):
    combos = [
        Combo(1.0, 2, "24", 1.0, load=0.5),
        Combo(1.0, 2, "24", 1.0),
        Combo(0.0, 5, "9~0.8", 0.25),
        Combo(2.1, 20, "9", 2.5, load=0.6),
    ]
    monkeypatch.setattr(bench_serving, "standard_combos", lambda: list(combos))
    return combos


def run_standard(tmp_path, *options):
    path = tmp_path / "serving.json"
    arguments = ["--combos", "standard", "--requests", "6", "--concurrency", "3", "--documents", "20"]
    arguments += ["--question-len", "5", "--output-len", "2", "--kv-tokens", "4096", "--methods", "rotate_query,prefix"]
    bench_serving.main([*arguments, "--out", str(path), *options])
    return json.loads(path.read_text())


def test_standard_sweep_runs_open_loops_at_a_share_of_the_closed_one(tmp_path, few_combos, capsys):
    report = run_standard(tmp_path)
    assert [run["settings"] for run in report["runs"]] == [combo.settings() for combo in few_combos]
    opened, closed, _, crowded = report["runs"]
    assert closed["offered_requests_per_s"] is None
    assert 0 < opened["offered_requests_per_s"] < closed["methods"]["rotate_query"]["warm"]["requests_per_s"]
    assert crowded["num_blocks"] > 2 * crowded["working_set_tokens"] / 16
    assert report["left_out"] == []
    assert not (tmp_path / "serving.part").exists()
    summary = capsys.readouterr().out.split("\nwarm;")[1]
    assert summary.count("| prefix ") == 4


def test_shards_and_time_budget_leave_out_by_name(tmp_path, few_combos, monkeypatch):
    report = run_standard(tmp_path, "--shard", "1/2")
    assert [run["settings"] for run in report["runs"]] == [combo.settings() for combo in few_combos[1::2]]
    measure = bench_serving.Sweep._measure

    def took_an_hour(sweep, *arguments):
        result = measure(sweep, *arguments)
        result["elapsed_s"] = 3600.0
        return result

    monkeypatch.setattr(bench_serving.Sweep, "_measure", took_an_hour)
    report = run_standard(tmp_path, "--time-budget-s", "60", "--shard", "1/2")
    assert [run["settings"] for run in report["runs"]] == [few_combos[1].settings()]
    assert report["left_out"] == [few_combos[3].settings()]


def test_a_sweep_stopped_from_outside_says_what_did_not_run(tmp_path, few_combos, monkeypatch):
    measure, calls = bench_serving.Sweep._measure, []

    def stopped(sweep, *arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(sweep, *arguments)

    monkeypatch.setattr(bench_serving.Sweep, "_measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_standard(tmp_path)
    report = json.loads((tmp_path / "serving.json").read_text())
    assert [run["settings"] for run in report["runs"]] == [combo.settings() for combo in few_combos[:2]]
    assert report["left_out"] == [combo.settings() for combo in few_combos[2:]]


def test_a_combination_that_fails_costs_no_other(tmp_path, few_combos, monkeypatch):
    few_combos.insert(1, Combo(1.0, 5, "900", 1.0))  # never fits into the pool
    monkeypatch.setattr(bench_serving, "standard_combos", lambda: list(few_combos))
    with pytest.raises(SystemExit, match="1 combinations failed"):
        run_standard(tmp_path)
    report = json.loads((tmp_path / "serving.json").read_text())
    assert len(report["runs"]) == 4
    (failed,) = report["failed"]
    assert failed["settings"]["document_len"] == "900"
    assert "can never fit" in failed["error"]


def test_a_budget_leaves_room_for_one_private_copy_of_many_odd_documents(engine):
    """Blocks that documents fill only in part count, too."""
    workload = zipf_workload(
        num_documents=20, documents_per_request=20, num_requests=4, alpha=0.0, document_len="1-20", question_len="6",
        output_len="2",
    )  # fmt: skip
    result = bench_serving.bench_workload(engine, workload, ["copy_rotate"], budget=0.01, concurrency=2)
    assert result["methods"]["copy_rotate"]["warm"]["num_requests"] == 2


def test_standard_combinations_see_every_pair_of_settings_early():
    combos = standard_combos()
    assert len(set(combos)) == len(combos) == 3 * 2 * 3 * 4 * 2 + 1
    first = combos[:30]
    pairs = {pair for combo in combos for pair in itertools.combinations(combo.settings().items(), 2)}
    early = {pair for combo in first for pair in itertools.combinations(combo.settings().items(), 2)}
    assert pairs == early
    assert Combo(0.0, 1, "128", 1.0) in combos[:8]
    shards = [shard_of(combos, f"{i}/3") for i in range(3)]
    assert sorted(map(str, itertools.chain(*shards))) == sorted(map(str, combos))
    for wrong in ("2/2", "a/2", "1", "-1/2"):
        with pytest.raises(ValueError, match="i/n"):
            shard_of(combos, wrong)


def test_every_method_gets_the_same_memory_and_an_empty_store(engine, workload):
    result = bench_serving.bench_workload(
        engine, workload, ["rotate_query", "copy_rotate", "rotate_query"], budget=1.0, concurrency=2
    )
    assert result["num_blocks"] < 400
    assert engine.cache.pool.num_free == 400
    for phases in result["methods"].values():
        assert phases["cold"]["peak_used_blocks"] <= result["num_blocks"]
    assert result["methods"]["rotate_query"]["warm"]["copies_of_documents"] == 1.0
    assert result["methods"]["copy_rotate"]["warm"]["copies_of_documents"] > 1.0


def test_warm_requests_are_others_over_the_same_documents(engine):
    workload = zipf_workload(**{**SMALL, "num_requests": 60}, alpha=0.0, output_len="2")
    cold, warm = workload.halves()
    questions = [layout.spans[-1].token_ids for layout in workload.layouts(512)]
    assert len(set(questions)) == 60
    assert questions == [layout.spans[-1].token_ids for half in (cold, warm) for layout in half.layouts(512)]
    assert [r.documents for r in cold.requests] != [r.documents for r in warm.requests]
    result = bench_serving.bench_workload(engine, workload, ["rotate_query", "prefix"], budget=None, concurrency=2)
    ours, prefix = (result["methods"][method]["warm"]["hit_rate"] for method in ("rotate_query", "prefix"))
    layouts = list(warm.layouts(512))
    num_questions = sum(len(layout.spans[-1].token_ids) for layout in layouts)
    assert ours == pytest.approx(1 - num_questions / sum(layout.num_tokens for layout in layouts))
    assert prefix < 0.7 * ours


def test_open_loop_counts_waiting_from_the_arrival(engine, workload):
    timed = at_rate(workload, 20.0, seed=1)
    phase = bench_serving.run_phase(engine, timed, "full_recompute", concurrency=1)
    assert phase["elapsed_s"] >= timed.requests[-1].arrival_s > 0.05
    assert phase["num_requests"] == len(timed.requests)
    burst = at_rate(workload, 1e6)
    waited = bench_serving.run_phase(engine, burst, "full_recompute", concurrency=1)
    assert waited["ttft_p95_ms"] > waited["ttft_p50_ms"] > 0


def test_unknown_methods_are_named():
    with pytest.raises(LazyAttentionError, match="rotate_query"):
        bench_serving.parse(["--methods", "rotate_qery"])


def test_popularity_follows_zipf_and_nothing_is_drawn_twice():
    workload = zipf_workload(num_documents=50, documents_per_request=5, num_requests=2000, alpha=1.0)
    assert all(len(set(request.documents)) == 5 for request in workload.requests)
    singles = zipf_workload(num_documents=50, documents_per_request=1, num_requests=20000, alpha=1.0)
    counts = sorted(Counter(r.documents[0] for r in singles.requests).values(), reverse=True)
    harmonic = sum(1 / i for i in range(1, 51))
    assert counts[0] / 20000 == pytest.approx(1 / harmonic, rel=0.05)
    assert counts[3] / 20000 == pytest.approx(1 / 4 / harmonic, rel=0.15)
    uniform = zipf_workload(num_documents=50, documents_per_request=5, num_requests=2000, alpha=0.0)
    shares = Counter(i for r in uniform.requests for i in r.documents)
    assert max(shares.values()) < 1.4 * min(shares.values())


def test_seeds_decide_everything():
    first, again, other = (zipf_workload(**SMALL, alpha=1.0, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert [*first.layouts(100)] == [*again.layouts(100)]


def test_documents_by_popularity_stand_in_one_order():
    workload = zipf_workload(**SMALL, alpha=1.0, popular_first=True)
    orders = [request.documents for request in workload.requests]
    before = {(a, b) for order in orders for i, a in enumerate(order) for b in order[i + 1 :]}
    assert not any((b, a) in before for a, b in before)


def test_too_few_documents_are_refused():
    with pytest.raises(ValueError, match="documents_per_request is 5, but there are 4"):
        zipf_workload(num_documents=4, documents_per_request=5, num_requests=1, alpha=0.0)


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("3-9", 3, 9), ("100~0.5", 1, 2000)])
def test_lengths(text, low, high):
    drawn = Lengths(text).draw(np.random.default_rng(0), 4000)
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert len(set(drawn)) > 1 or low == high
    if "~" in text:
        assert np.median(drawn) == pytest.approx(100, rel=0.05)


def test_lengths_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="invalid literal"):
        Lengths("many")


def test_trace(tmp_path):
    def write(name, rows):
        (tmp_path / f"ragpulse_{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")

    write("1_sys_prompt", [{"sys_prompt_id": 5, "token_length": 40}])
    write("2_passages", [{"passage_id": i, "token_length": 10 * i} for i in range(1, 5)])
    write("3_history", [{"history_id": 7, "token_length": 3}])
    write("4_user_input", [{"user_input_id": 8, "token_length": 6}])

    def row(at, passages, output):
        ids = {"sys_prompt": [5], "passages_ids": passages, "history": [7], "web_search": [], "user_input": [8]}
        return {"timestamp": str(at), "input_length": 1, "output_length": output, "hash_ids": ids, "session_id": "x"}

    write("0_trace", [row(82, [2, 4], 500), row(90, [4, 3, 4], 5)])
    workload = trace_workload(tmp_path, num_requests=2, max_output_len=64)
    assert workload.preamble_len == 40
    assert workload.document_lens == (20, 30, 40)
    assert [r.documents for r in workload.requests] == [(0, 2), (2, 1)]
    assert [(r.question_len, r.output_len, r.arrival_s) for r in workload.requests] == [(9, 64, 0.0), (9, 5, 8.0)]
    assert workload.working_set_tokens == 90
    assert at_rate(workload, None).requests[1].arrival_s is None
