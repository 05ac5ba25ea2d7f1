# SPDX-License-Identifier: Apache-2.0
"""The evaluation script runs from end to end, small, and its table is made of what it measured."""

import gzip
import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures.tiny_engine import loaded_tiny, make_engine
from fixtures.tiny_models import save_tiny, tiny_model
from lazyattention import envs
from lazyattention.documents.readers import read_documents
from lazyattention.quality.datasets import build_dataset


@pytest.fixture
def script(monkeypatch):
    folder = Path(__file__).parents[2] / "evaluation"
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("gpu_adapt")
    for name in ("gpu_adapt", "combine", "passages", "study", "tasks"):
        sys.modules.pop(name, None)


def test_the_whole_evaluation_runs_small(script, tmp_path, monkeypatch, capsys):
    model = tiny_model(num_hidden_layers=2, hidden_size=32, intermediate_size=48, max_position_embeddings=8192)
    folder = save_tiny(tmp_path / "model", model)
    small = script.TASKS["needle-10"]
    tasks = {"needle-2": script.TASKS["needle-10"].__class__(small.dataset, None, 2, 3)}
    monkeypatch.setattr(script, "TASKS", tasks)
    monkeypatch.setattr(script, "_PLAIN_PROMPT_LEN", 12)
    monkeypatch.setattr(script, "_PLAIN_TARGET_LEN", 4)
    arguments = f"--model {folder} --data-folder {tmp_path} --out {tmp_path / 'out'} --tasks needle-2 --num-questions 3"
    arguments += " --train needle --train-questions 6 --train-documents 2 2 --max-steps 2 --eval-steps 1 --rank 4"
    arguments += " --max-tokens 3 --group-size 3 --num-plain 2 --num-blocks 1200"
    arguments += " --options after_preamble isolated parallel+calibrated --calibration-questions 4"
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path / "cache")
    monkeypatch.setattr(sys, "argv", ["gpu_adapt.py", *arguments.split()])
    script.main()
    result = json.loads((tmp_path / "out" / "model-adapt.json").read_text())
    assert result["training"]["num_steps"] == 2
    stages = result["tasks"]["needle-2"]
    assert set(stages) == {"unadapted", "adapted"}
    before = stages["unadapted"]["options"]["full"]["gold_nll"]["value"]["mean"]
    after = stages["adapted"]["options"]["isolated"]["gold_nll"]["value"]["mean"]
    against = result["against_unadapted_full"]["needle-2"]["options"]["isolated"]["gold_nll"]["difference"]
    assert against["mean"] == pytest.approx(after - before)
    assert len(result["plain_text_nll"]["adapted"]) == 2
    # An adapter is other weights: calibrated anew.
    for stage in ("unadapted", "adapted"):
        (calibration,) = result["calibrations"][stage].values()
        assert calibration["kl"] <= calibration["kl_before"]
    assert len(list((tmp_path / "cache" / "quality").iterdir())) == 2
    assert "needle-2" in capsys.readouterr().out
    # Started again, it measures and trains nothing anew.
    run_adapt = script.run_adapt
    monkeypatch.setattr(script, "run_adapt", lambda *_: pytest.fail("trained again"))
    script.main()
    # A variant shares the base's model and records; both go into one file.
    variant = f"{arguments} --base {tmp_path / 'out'} --seed 1".replace(
        f"--out {tmp_path / 'out'}", f"--out {tmp_path / 'v'}"
    )
    monkeypatch.setattr(script, "run_adapt", run_adapt)
    monkeypatch.setattr(sys, "argv", ["gpu_adapt.py", *variant.split()])
    script.main()
    combine = importlib.import_module("combine")
    report = tmp_path / "out" / "adapter" / "adapt.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"data": ["needle", "nq-train:/somewhere/nq.gz"]}))
    combined = combine.combine(tmp_path, "out", "out")
    assert combined["training"]["data"] == ["needle", "nq-train:nq.gz"]  # not where it lay
    assert set(combined["variants"]) == {"out", "v"}
    assert combined["variants"]["v"]["config"]["seed"] == 1
    assert combined["variants"]["v"]["commit"] == result["environment"]["commit"]
    assert combined["retained_share"] == result["retained_share"]
    assert combined["variants"]["v"]["tasks"]["needle-2"]["num_questions"] == 3
    assert combined["plain_text_nll_difference"] == result["plain_text_nll_difference"]
    # A run cut short counts with the questions it has.
    records = tmp_path / "v" / "adapted" / "needle-2" / "records.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:2]))
    cut = combine.combine(tmp_path, "out", "out")["variants"]["v"]["tasks"]["needle-2"]
    assert cut["num_questions"] == cut["against_unadapted_full"]["isolated"]["gold_nll"]["num_questions"] == 2
    combine.print_table(combined)
    assert "stock isolated" in capsys.readouterr().out


def test_a_plan_is_run_variant_by_variant_and_goes_on(script, tmp_path, monkeypatch, capsys):
    model = tiny_model(num_hidden_layers=2, hidden_size=32, intermediate_size=48, max_position_embeddings=8192)
    folder = save_tiny(tmp_path / "model", model)
    needle = script.TASKS["needle-10"]
    monkeypatch.setattr(script, "TASKS", {"needle-2": needle.__class__(needle.dataset, None, 2, 3)})
    monkeypatch.setattr(script, "_PLAIN_PROMPT_LEN", 12)
    monkeypatch.setattr(script, "_PLAIN_TARGET_LEN", 4)
    plan = {
        "name": "tiny",
        "main": "first",
        "common": "--train needle --train-questions 6 --train-documents 2 2 --rank 4 --max-tokens 3 --num-plain 2 "
        "--num-blocks 1200 --max-steps 2 --eval-steps 1 --tasks needle-2 --num-questions 3 --options after_preamble",
        "base": "",
        "variants": {"first": "", "broken": "--train nowhere", "second": "--seed 1", "third": "--rank 2"},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    study = importlib.import_module("study")
    arguments = ["study.py", str(tmp_path / "plan.json"), "--model", str(folder), "--data-folder", str(tmp_path)]
    arguments += ["--study", str(tmp_path / "study"), "--output", str(tmp_path / "result.json")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--only", "fist"])
    with pytest.raises(SystemExit):
        study.main()
    assert "no variants fist; there are first, broken, second, third" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*arguments, "--minutes", "0"])
    study.main()  # the base alone
    assert "no time left for first" in capsys.readouterr().out
    assert not (tmp_path / "result.json").exists()
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="failed: broken"):
        study.main()
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["variants"]) == {"first", "second", "third"}
    assert result["variants"]["third"]["config"]["rank"] == 2
    # Only the third learns from what another one learns from.
    assert re.findall("  prompts of .*|== .*", capsys.readouterr().out)[-2:] == ["== third", "  prompts of first"]
    assert result["variants"]["second"]["config"]["seed"] == 1
    assert set(result["retained_share"]) == {"needle-2"}
    # Again: only what failed.
    ran = []
    monkeypatch.setattr(script, "main", lambda argv: ran.append(argv[argv.index("--out") + 1]))
    study.main()
    assert [Path(folder).name for folder in ran] == ["broken"]


def test_plain_texts_are_the_same_whatever_is_asked(script, monkeypatch):
    needle = script.TASKS["needle-10"]
    tasks = {f"needle-{count}": needle.__class__(needle.dataset, None, count, 3) for count in (2, 3)}
    monkeypatch.setattr(script, "TASKS", tasks)
    monkeypatch.setattr(script, "_PLAIN_PROMPT_LEN", 12)
    monkeypatch.setattr(script, "_PLAIN_TARGET_LEN", 4)
    asked = []

    def score(engine, layouts, targets):
        asked.append([(layout.token_ids, list(target)) for layout, target in zip(layouts, targets, strict=True)])
        return [SimpleNamespace(nll=1.0) for _ in layouts]

    monkeypatch.setattr(script, "score", score)
    engine = make_engine(loaded_tiny())
    for name in tasks:
        argv = ["--model", "m", "--data-folder", "d", "--out", "o", "--tasks", name, "--num-questions", "3"]
        assert script.plain_text_nlls(script.parse(argv), engine) == [1.0] * len(asked[0])
    assert asked[0] == asked[1] != []


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "evaluation" / "plans").glob("*.json")), ids=str)
def test_plans_are_of_arguments_and_tasks_that_exist(script, path):
    plan = json.loads(path.read_text())
    for line in (plan["base"], *plan["variants"].values()):
        argv = shlex.split(f"--model m --data-folder d --out o {plan['common']} {line}")
        arguments = script.parse(argv)
        assert set(arguments.tasks) <= set(script.TASKS)
        assert all(script.reuse_option(name) for name in [*arguments.options, arguments.train_option])
    assert plan["main"] in plan["variants"]


def test_passages_of_training_questions_become_documents_as_they_were(script, tmp_path, monkeypatch, capsys):
    texts = {f"A & <b> {n}": f"The cape of {n} is < 3 & north." for n in range(1010)}
    rows = [
        {"question": f"which cape is {n}?", "answers": ["north"], "ctxs": [{"title": title, "text": text}]}
        for n, (title, text) in enumerate(texts.items())
    ]
    rows += rows[:20]  # two questions about one passage
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "nq-open-oracle.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    monkeypatch.setattr(sys, "argv", ["passages.py", str(tmp_path)])
    importlib.import_module("passages").main()
    found = {d.title: d.text for d in read_documents((tmp_path / "passages",)).documents}
    assert f"{len(found)} passages" in capsys.readouterr().out
    nq = f"{tmp_path / 'nq-open-oracle.jsonl.gz'}"
    tested = {d.title for e in build_dataset(f"nq:{nq}", num_documents=1, num_questions=1000) for d in e.documents}
    assert found == {title: text for title, text in texts.items() if title not in tested}
    assert found
    arguments = script.parse(
        shlex.split(f"--model m --data-folder {tmp_path} --out o --train passages needle nq-train:x.gz")
    )
    assert script.train_data(arguments) == (str(tmp_path / "passages"), "needle", f"nq-train:{tmp_path / 'x.gz'}")


def test_what_is_trained_is_what_the_arguments_say(script, tmp_path):
    line = (
        "--train passages needle --distractors random --teacher-documents all --plain-share 0.5 --train-questions 80 20 "
        "--train-documents 5 20"
    )
    request = script.adapt_request(script.parse(shlex.split(f"--model m --data-folder d --out o {line}")), tmp_path)
    config = request.config
    assert (request.distractors, request.num_questions, request.num_documents) == ("random", (80, 20), (5, 20))
    assert (config.teacher_documents, config.plain_share, config.held_out) == ("all", 0.5, 25)
    kept = script.adapt_request(script.parse(shlex.split("--model m --data-folder d --out o --keep-full")), tmp_path)
    assert (kept.config.keep_full, config.keep_full) == (True, False)
