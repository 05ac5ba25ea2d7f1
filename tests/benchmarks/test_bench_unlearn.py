# SPDX-License-Identifier: Apache-2.0
"""The unlearning benchmark from files to table with a tiny model: stages, going on after an end, failures, its page."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unlearn"))

import bench_unlearn
import unlearn_models
import unlearn_records
from qa_fixtures import qa_model, qa_tokenizer
from unlearn_table import section, table

from lazyattention.unlearn.batch import logits_of, mean_nll, pad_right
from lazyattention.unlearn.data import encode_examples, generate_people

ROOT = Path(__file__).resolve().parents[2]
ARMS = "simu,simu+random"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny model's folder and generated people in TOFU's files."""
    folder = tmp_path_factory.mktemp("bench_unlearn")
    qa_model(tie_word_embeddings=True).save_pretrained(folder / "model")
    qa_tokenizer(chat=True).save_pretrained(folder / "model")
    people = generate_people(20, 0, num_facts=4, forget_fraction=0.3)
    rows = {
        name: [
            {
                "question": e.question,
                "answer": e.answer,
                "paraphrased_question": e.paraphrased_question,
                "paraphrased_answer": e.paraphrased_answer,
                "perturbed_answer": list(e.perturbed_answers),
            }
            for e in people[name]
        ]
        for name in ("forget", "retain", "holdout")
    }
    files = {
        "tofu_forget10": rows["forget"],
        "tofu_retain90": rows["retain"],
        "tofu_forget10_perturbed": rows["forget"],
        "tofu_retain_perturbed": rows["retain"],
        "tofu_real_authors_perturbed": rows["holdout"],
        "tofu_world_facts_perturbed": rows["holdout"][::-1],
    }
    for name, lines in files.items():
        (folder / f"{name}.json").write_text("\n".join(json.dumps(line) for line in lines))
    return folder


def call(inputs, output, *more, monkeypatch):
    command = ["bench_unlearn.py", "--model", str(inputs / "model"), "--data", str(inputs), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [*command, "--smoke", "--device", "cpu", "--arms", ARMS, "--seeds", "2", *more])
    bench_unlearn.main()
    return unlearn_records.read_json(output / "bench_unlearn.json")


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    """What one call leaves: results, and the folder they lie in."""
    output = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return call(inputs, output, "--alone", "simu", monkeypatch=monkeypatch), output


def test_one_call_makes_every_run_and_measures_it(finished):
    results, output = finished
    runs = results["comparison"]["runs"]
    assert [(run["arm"], run["seed"]) for run in runs] == [(a, s) for a in ARMS.split(",") for s in (0, 1)]
    assert results["unfinished"] == []
    level = results["reference"]["retrained"]["forget"]["mean_nll"]
    assert all(run["level"] == level == results["comparison"]["level"] for run in runs)
    for run in runs:
        assert {"unlearn", "evaluate"} <= set(run["stages_s"])
        assert ("probe" in run["stages_s"]) == ("probes" in run) == (run["seed"] == 0)
        assert 0 <= run["evaluation"]["forget_quality"]["statistic"] <= 1
    # Step 1 once for both arms and seeds; the random control has as many neurons in each layer.
    assert sum("attribution" in run for run in runs) == 1
    assert len({run["neuron_share"] for run in runs}) == 1
    assert runs[0]["final"] != runs[1]["final"]  # another seed, another run
    assert results["models"]["retrained"]["evaluation"]["forget_quality"]["statistic"] == 0.0
    assert results["alone"]["simu"]["training_s"] > 0
    assert "<html" in (output / "bench_unlearn.html").read_text()


def test_the_same_command_goes_on_where_the_last_ended(finished, inputs, monkeypatch):
    results, output = finished
    path = output / "work" / "runs" / "simu+random.1.json"
    before = {p.name: p.read_text() for p in path.parent.glob("*.json")}
    path.write_text(json.dumps({"arm": None, "status": "running"}))  # as if the process had been killed
    again = call(inputs, output, monkeypatch=monkeypatch)
    assert again["comparison"]["arms"] == results["comparison"]["arms"]
    assert {p.name for p in path.parent.glob("*.json")} == before.keys()
    assert all(p.read_text() == before[p.name] for p in path.parent.glob("*.json") if p != path)
    assert again["comparison"]["runs"][3]["trajectory"] == results["comparison"]["runs"][3]["trajectory"]


def test_a_run_that_fails_is_named_and_ends_no_other(finished, inputs, monkeypatch, tmp_path, capsys):
    _, output = finished
    original = bench_unlearn.unlearn_arm

    def failing(record, arm, seed, *rest):
        if arm == "simu+random":
            raise MemoryError("no room")
        return original(record, arm, seed, *rest)

    monkeypatch.setattr(bench_unlearn, "unlearn_arm", failing)
    for path in (output / "work" / "runs").glob("simu*.1.json"):
        path.unlink()
    results = call(inputs, output, "--only", "simu+random:1,simu:1", monkeypatch=monkeypatch)
    assert results["unfinished"] == ["simu+random:1 failed"]
    assert "no room" in capsys.readouterr().out
    assert len(results["comparison"]["runs"]) == 3
    assert "of 2 |" not in table(results).split("`simu+random`")[1]


def test_nothing_is_started_after_the_budget(inputs, monkeypatch, tmp_path, finished):
    _, output = finished
    for path in (output / "work" / "runs").glob("simu.0.json"):
        path.unlink()
    results = call(inputs, output, "--budget-s", "0", "--only", "simu:0", monkeypatch=monkeypatch)
    assert ("simu", 0) not in [(run["arm"], run["seed"]) for run in results["comparison"]["runs"]]


def test_a_work_folder_of_other_models_is_refused(finished, inputs, monkeypatch):
    _, output = finished
    with pytest.raises(SystemExit, match="holds models made with"):
        call(inputs, output, "--lr", "1e-3", monkeypatch=monkeypatch)


def test_only_one_process_gets_a_run(tmp_path):
    path = tmp_path / "runs" / "simu.0.json"
    assert [unlearn_records.claim(path) for _ in range(3)] == [True, False, False]
    assert unlearn_records.read_json(path)["status"] == "running"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=300), st.integers(1, 40), st.integers(0, 3))
def test_batches_hold_every_example_once(lengths, batch_size, seed):
    batches = unlearn_models.batches_by_length(lengths, batch_size, random.Random(seed))
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    assert all(0 < len(batch) <= batch_size for batch in batches)


def test_fine_tuning_minimises_the_answers_loss():
    tokenizer, examples = qa_tokenizer(chat=True), generate_people(6, 0, num_facts=3)["retain"]
    model = qa_model(scale=1.0)
    batch = pad_right([(e.input_ids, e.labels) for e in encode_examples(tokenizer, examples)], 0)
    before = float(mean_nll(logits_of(model, batch), batch.labels).detach())
    # One batch, no change: the first loss is the mean over all answer tokens.
    first = unlearn_models.fine_tune(model, tokenizer, examples, num_epochs=1, lr=0.0, batch_size=100)
    assert first["last_loss"] == pytest.approx(before, rel=1e-4)
    found = unlearn_models.fine_tune(model, tokenizer, examples, num_epochs=30, lr=1e-2, batch_size=8)
    after = float(mean_nll(logits_of(model, batch), batch.labels).detach())
    assert after < 0.3 * before
    assert found["num_steps"] == 30 * -(-len(examples) // 8)


@pytest.mark.slow
def test_processes_side_by_side_make_the_same_runs(finished, inputs, tmp_path):
    results, _ = finished
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_unlearn.py"), "--model", str(inputs / "model")]
    command += ["--data", str(inputs), "--output", str(tmp_path), "--smoke", "--device", "cpu", "--arms", ARMS]
    command += ["--seeds", "2", "--workers", "3", "--probes", "none"]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    shared = unlearn_records.read_json(tmp_path / "bench_unlearn.json")
    assert shared["unfinished"] == []
    for one, other in zip(shared["comparison"]["runs"], results["comparison"]["runs"], strict=True):
        assert (one["arm"], one["seed"], one["num_workers"]) == (other["arm"], other["seed"], 3)
        assert one["final"]["forget"] == pytest.approx(other["final"]["forget"], rel=1e-3)
    assert sum("attribution" in run for run in shared["comparison"]["runs"]) == 1


def test_the_page_says_what_was_measured(finished):
    results, _ = finished
    seven_b = bench_unlearn.seven_b("cpu")
    text = section({**results, "seven_b": seven_b})
    losses = [results["reference"][name]["forget"]["mean_nll"] for name in ("original", "retrained")]
    assert f"original {losses[0]:.3f}, retrained {losses[1]:.3f}" in text
    assert f"| {results['alone']['simu']['training_s']:.1f} s |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {12, 9}
    assert "| `simu` | sophia | 4e-05 | 2 |" in text
    assert f"{seven_b['step_s'][-1]:.2f} s per step" in text
