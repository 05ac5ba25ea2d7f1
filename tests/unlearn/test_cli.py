# SPDX-License-Identifier: Apache-2.0
"""`lazyattention unlearn` as a user types it, on a small saved model and JSONL files."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from memorizing_model import new_model, people, train, word_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.cli import unlearn_app
from lazyattention.unlearn.guards import CollapseError
from lazyattention.unlearn.ledger import read_ledger

QUICK = "-s train.num_epochs=3 -s attribution.num_steps=2 -s optimizer.lr=1e-3 -s guards.max_utility_drop=99"
NOWHERE = "--store-url http://127.0.0.1:9"
METRICS = "--metrics extraction_strength,exact_memorization"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a model that half knows some people, and their data as JSON lines."""
    folder = tmp_path_factory.mktemp("unlearn")
    splits = people(num_people=8, num_facts=2, forget_fraction=0.25)
    tokenizer = word_tokenizer(splits)
    model = new_model(tokenizer, hidden_size=48, intermediate_size=96, num_hidden_layers=2)
    train(model, tokenizer, [*splits["forget"], *splits["retain"]], num_epochs=25)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, examples in splits.items():
        rows = [{k: v for k, v in dataclasses.asdict(e).items() if k in ("question", "answer")} for e in examples]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def typed(workplace, monkeypatch):
    """Run one command line in the workplace; errors are raised."""
    monkeypatch.chdir(workplace)

    def invoke(line):
        result = CliRunner().invoke(unlearn_app, line.split(), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return invoke


def sets(*, holdout=True):
    return "--forget forget.jsonl --retain retain.jsonl" + (" --holdout holdout.jsonl" if holdout else "")


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_one_command_from_jsonl_to_report_and_back(typed, workplace):
    """run, then rollback gives the original bits; the ledger verifies; the report says what it must."""
    typed(
        f"run -m model {sets()} -o first {QUICK} {METRICS} --controls random --store doc-7 {NOWHERE} --request-id req-1"
    )
    record = json.loads((workplace / "first/results.json").read_text())
    assert record["decision"]["status"] == "written"
    assert record["model"]["digest_before"] != record["model"]["digest_after"]
    assert record["training"]["num_changed"] > 0
    assert record["comparison"]["arms"][1]["arm"] == "random"
    page = (workplace / "first/report.html").read_text()
    assert "not proof of erasure" in page
    assert page.count("<svg") == 4
    # It loads nothing from anywhere.
    assert not re.search(r"<(script|link|img|iframe)|(src|href)=[\"']?(?![\"'#])|url\((?!#)|@import", page)
    entry = read_ledger(workplace / "ledger.jsonl")[-1]
    assert entry["request_id"] == "req-1"
    assert entry["hash"] == record["ledger"]["hash"]
    ledger_text = (workplace / "ledger.jsonl").read_text()
    forgotten = json.loads((workplace / "forget.jsonl").read_text().splitlines()[0])
    assert forgotten["answer"] not in ledger_text
    assert forgotten["question"] in page
    assert json.loads((workplace / "purge.jsonl").read_text())["document_ids"] == ["doc-7"]

    original, unlearned = weights(workplace / "model"), weights(workplace / "first/model")
    assert any(not torch.equal(original[name], unlearned[name]) for name in original)
    typed("rollback -m first/model --delta first/delta.safetensors -o restored --ledger ledger.jsonl")
    restored = weights(workplace / "restored")
    assert all(torch.equal(original[name], restored[name]) for name in original)
    assert read_ledger(workplace / "ledger.jsonl")[-1]["weights_digest"] == record["model"]["digest_before"]
    assert "2 entries" in typed("ledger ledger.jsonl")

    typed("report first --no-answers")
    assert forgotten["answer"] not in (workplace / "first/report.html").read_text()
    with pytest.raises(RequestError, match="is not the one after the run"):
        typed("rollback -m model --delta first/delta.safetensors -o nowhere")
    with pytest.raises(ConfigError, match="result of another run"):
        typed(f"run -m model {sets()} -o first {QUICK}")


def test_an_adapter_comes_out_and_loads(typed, workplace):
    typed(f"run -m model {sets()} -o lora --method simu-lora --format adapter {QUICK} --metrics none --answers 0")
    record = json.loads((workplace / "lora/results.json").read_text())
    assert record["outputs"]["adapter"] == "adapter"
    assert record["answers"] == {}
    typed(f"eval -m model --adapter lora/adapter --split forget=forget.jsonl -o lora.json {METRICS}")
    before = typed(f"eval -m model --split forget=forget.jsonl -o plain.json {METRICS}")
    assert "extraction_strength/forget" in before
    strengths = [
        json.loads((workplace / name).read_text())["summary"]["exact_memorization/forget"]
        for name in ("plain.json", "lora.json")
    ]
    assert strengths[0] != strengths[1]
    with pytest.raises(ConfigError, match="no exact low-rank form"):
        typed(f"run -m model {sets()} -o other --format adapter")


def test_a_collapsed_model_is_not_written_unless_forced(typed, workplace):
    wild = "-s optimizer.lr=0.3 -s train.num_epochs=3 -s guards.max_utility_drop=1000 -s attribution.num_steps=1"
    line = f"run -m model {sets(holdout=False)} {wild} --metrics none --answers 0 -s guards.eval_every=0"
    with pytest.raises(CollapseError, match="retain loss rose"):
        typed(f"{line} -o wild")
    assert not (workplace / "wild/model").exists()
    assert json.loads((workplace / "wild/results.json").read_text())["decision"]["status"] == "refused"
    assert read_ledger(workplace / "ledger.jsonl")[-1]["decision"]["status"] == "refused"
    typed(f"{line} -o forced --force")
    assert (workplace / "forced/model/model.safetensors").exists()
    assert "forced" in json.loads((workplace / "forced/results.json").read_text())["decision"]["status"]


@pytest.mark.slow
def test_an_interrupted_run_resumes(typed, workplace, monkeypatch):
    """Stopped after six steps, resumed: the same weights as without the interruption."""
    from lazyattention.unlearn import simu

    line = f"run -m model {sets(holdout=False)} {QUICK} --metrics none --answers 0 -s train.save_steps=1 -s guards.eval_every=0"
    typed(f"{line} -o whole")
    with monkeypatch.context() as patch:
        real = simu.UnlearnTrainer.update_curvature
        calls = []

        def breaks(self):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            real(self)

        patch.setattr(simu.UnlearnTrainer, "update_curvature", breaks)
        with pytest.raises((KeyboardInterrupt, SystemExit, AssertionError)):
            typed(f"{line} -o broken -s optimizer.hessian_interval=2")
    shutil.copytree(workplace / "broken", workplace / "again")
    assert "starting over" in typed(f"{line} -o again -s optimizer.hessian_interval=2")
    typed(f"{line} -o broken -s optimizer.hessian_interval=2 --resume")
    typed(f"{line} -o straight -s optimizer.hessian_interval=2")
    straight = weights(workplace / "straight/model")
    for other in ("broken", "again"):
        found = weights(workplace / other / "model")
        assert all(torch.equal(found[name], straight[name]) for name in straight)


def test_attribute_writes_scores_and_mask(typed, workplace):
    output = typed("attribute -m model -f forget.jsonl -o scores -s attribution.num_steps=2")
    assert "of the neurons" in output
    assert {p.name for p in (workplace / "scores").iterdir()} == {"attribution.safetensors", "neuron_mask.safetensors"}
    with pytest.raises(ConfigError, match="needs no attribution"):
        typed("attribute -m model -f forget.jsonl -o scores --method simu+none")


@pytest.mark.slow
def test_compare_says_whether_the_choice_of_neurons_matters(typed, workplace):
    output = typed(
        f"compare -m model {sets()} -o compared --methods simu,simu+none,graddiff --seeds 2 --level 1.0 "
        "-s train.num_epochs=6 -s attribution.num_steps=1 -s optimizer.lr=2e-3 -s guards.eval_every=1"
    )
    assert "reference" in output
    comparison = json.loads((workplace / "compared/comparison.json").read_text())
    assert [arm["arm"] for arm in comparison["arms"]] == ["simu", "simu+none", "graddiff"]
    assert len(comparison["runs"]) == 6
    assert {arm["num_runs"] for arm in comparison["arms"]} == {2}
    assert "<svg" in (workplace / "compared/comparison.html").read_text()


def test_probe_attacks_a_saved_model(typed, workplace):
    output = typed(
        "probe -m model --split forget=forget.jsonl --split retain=retain.jsonl -o probes.json --probes quantize"
    )
    assert "quantize" in output
    assert "quantize" in json.loads((workplace / "probes.json").read_text())["probes"]


def test_wrong_options_are_named_before_anything_is_loaded(typed):
    for line, error, message in (
        (f"run -m model {sets()} -o x -s optimizer.learn=1", ConfigError, "unknown option"),
        (f"run -m model {sets()} -o x -s optimizer.lr", ConfigError, "has no '='"),
        (f"run -m model {sets()} -o x --method simuu", ConfigError, "did you mean"),
        (f"run -m model {sets()} -o x --controls rnd", ConfigError, "unknown control"),
        (f"run -m model {sets()} -o x --format gguf", ConfigError, "format must be one of"),
        ("eval -m model --split forget -o x.json", ConfigError, "has no '='"),
    ):
        with pytest.raises(error, match=message):
            typed(line)


def test_options_of_an_earlier_run_can_be_used_again(typed, workplace):
    (workplace / "options.json").write_text(json.dumps({"optimizer": {"lr": 0.5}, "train": {"seed": 9}}))
    from lazyattention.unlearn.cli import build_config

    config = build_config("simu", workplace / "options.json", ["optimizer.rho=0.1"], 3, "cpu")
    assert (config.optimizer.lr, config.train.seed, config.optimizer.rho) == (0.5, 9, 0.1)
    assert config.optimizer.clip_target == 0.7


def test_a_written_model_is_an_ordinary_transformers_folder(typed, workplace):
    typed(f"run -m model {sets(holdout=False)} -o plain {QUICK} --metrics none --answers 0")
    model = AutoModelForCausalLM.from_pretrained(workplace / "plain/model")
    assert torch.isfinite(model(input_ids=torch.tensor([[1, 2, 3]])).logits).all()


def test_what_would_fail_at_the_end_fails_at_the_start(typed, workplace):
    (workplace / "file").write_text("")
    (workplace / "broken").mkdir()
    (workplace / "broken" / "ledger.jsonl").write_text("no entry\n")
    for line, error, message in [
        ("-o file", ConfigError, "cannot write to 'file': File exists; give another folder"),
        ("-o file/out", ConfigError, "cannot write to 'file/out': Not a directory"),
        ("-o early --probes relearning", ConfigError, "unknown probe 'relearning'; did you mean 'relearn'"),
        ("-o early --metrics rouge", ConfigError, "unknown metric 'rouge'"),
        ("-o early --ledger broken/ledger.jsonl", RequestError, "line 1: not a ledger entry"),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            typed(f"run -m model {sets()} {QUICK} {line}")
    with pytest.raises(RequestError, match="objective 'graddiff' needs a retain set"):
        typed(f"run -m model --forget forget.jsonl -o early {QUICK}")
    assert not list(workplace.glob("early/*"))


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
def test_a_model_that_was_written_is_on_record_whatever_ends_its_measuring(typed, workplace, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    output = f"unmeasured_{type(error).__name__}"
    monkeypatch.setattr("lazyattention.unlearn.workflow.run_probes", fail)
    line = f"run -m model {sets()} -o {output} {QUICK} {METRICS} --probes quantize --answers 0".split()
    result = CliRunner().invoke(unlearn_app, line)
    assert result.exit_code != 0
    assert (workplace / output / "model" / "model.safetensors").exists()
    said = f"{type(error).__name__}: {error}"
    assert read_ledger(workplace / "ledger.jsonl")[-1]["measuring_failed"] == said
    assert f"not measured to the end</b> – {said}" in (workplace / output / "report.html").read_text()
    assert json.loads((workplace / output / "results.json").read_text())["metrics"]["after"]["summary"]


def test_a_model_that_never_knew_is_called_out(typed, workplace, caplog):
    typed(f"run -m model {sets()} -o knew {QUICK} --metrics none --answers 0 -s guards.target=0.001")
    assert "the original model is at the target already (loss 0.001)" in caplog.text
    decision = json.loads((workplace / "knew/results.json").read_text())["decision"]
    assert decision["was_at_target"]
    assert "THE ORIGINAL MODEL WAS THERE ALREADY" in decision["reason"]
    assert "<div class='decision open'>" in (workplace / "knew/report.html").read_text()
