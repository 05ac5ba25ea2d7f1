# SPDX-License-Identifier: Apache-2.0
"""The example scripts and the demo run as printed, on a tiny model, and say what they promise."""

import functools
import importlib.util
import json
from pathlib import Path

import pytest

import lazyattention
from fixtures.tiny_models import save_tiny, tiny_model
from lazyattention.documents.readers import read_documents
from lazyattention.engine.llm import LLM

ROOT = Path(__file__).resolve().parent.parent
# By default the engine reserves a quarter of the memory.
SmallLLM = functools.partial(LLM, num_blocks=1024, progress=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model"), tiny_model(max_position_embeddings=16384)))


@pytest.fixture
def load(monkeypatch):
    def load(path):
        monkeypatch.setattr(lazyattention, "LLM", SmallLLM, raising=False)
        monkeypatch.setattr("lazyattention.engine.llm.LLM", SmallLLM)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_there_are_four_examples_of_at_most_60_lines():
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert [path.name[:3] for path in scripts] == ["01_", "02_", "03_", "04_"]
    assert max(len(path.read_text().splitlines()) for path in scripts) <= 60


def test_01_second_order_computes_only_the_question(load, model, capsys):
    load(ROOT / "examples/01_ask_documents.py").main(model)
    first, second = capsys.readouterr().out.split("tokens computed")[:2]
    lines = capsys.readouterr().out
    assert int(second.split()[-1]) < int(first.split()[-1]) / 20, lines


def test_02_streams_and_reports_both_documents(load, model, capsys):
    load(ROOT / "examples/02_stream_and_place.py").main(model)
    printed = capsys.readouterr().out
    assert "contract: " in printed
    assert "letter: " in printed
    assert printed.count("miss (new)") == 2


def test_03_deleted_document_is_computed_anew(load, model, capsys):
    load(ROOT / "examples/03_keep_documents.py").main(model)
    printed = capsys.readouterr().out
    assert "{'menu': 'hit', 'handbook': 'hit'}" in printed
    assert "'menu': 'miss: deleted'" in printed
    assert "'handbook': 'hit: reused'" in printed


def test_04_reads_the_same_kv_at_two_positions(load, model, capsys):
    load(ROOT / "examples/04_attention_without_engine.py").main(model)
    difference = float(capsys.readouterr().out.rsplit(":", 1)[1])
    assert 0 < difference < 1e-3  # not 0: both were really computed, at different positions


def test_every_example_question_names_a_document_that_holds_its_answer():
    documents = {Path(d.document_id).stem: d.text for d in read_documents([ROOT / "examples/documents"]).documents}
    questions = json.loads((ROOT / "examples/questions.json").read_text())
    assert {question["document"] for question in questions} == documents.keys()
    for question in questions:
        assert question["answer"] in documents[question["document"]]


def test_demo_compares_methods_and_checks_answers(load, model, tmp_path, capsys):
    demo = load(ROOT / "benchmarks/demo.py")
    (tmp_path / "documents").mkdir()
    for path in (ROOT / "examples/documents").glob("*.md"):
        (tmp_path / "documents" / path.name).write_text(path.read_text()[:500])
    options = ["--documents", str(tmp_path / "documents"), "--num-documents", "4", "--max-tokens", "4"]
    demo.main(["--model", model, "--output", str(tmp_path), *options])
    printed = capsys.readouterr().out
    assert "5 of 5 answers of rotate_query equal chunk_recompute's" in printed
    content = json.loads((tmp_path / "demo.json").read_text())
    assert content["different"] == []
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    computed = {
        (item["reuse_method"], item["change"]): item["num_computed_tokens"] / item["num_prompt_tokens"]
        for item in content["results"]
    }
    assert len(computed) == 4 * 5
    changes = ("first seen", "shuffled", "one replaced", "reversed", "same order again")
    assert all(computed["full_recompute", change] == computed["chunk_recompute", change] == 1 for change in changes)
    assert computed["rotate_query", "shuffled"] < 0.1
    assert 0.1 < computed["rotate_query", "one replaced"] < 0.4
    assert computed["rotate_query", "reversed"] < 0.1
    assert computed["prefix", "reversed"] > 0.5
    assert computed["prefix", "same order again"] < 0.1


def test_demo_fails_when_an_answer_differs(load, model, tmp_path, capsys, monkeypatch):
    demo = load(ROOT / "benchmarks/demo.py")
    results = iter(range(1000))

    def measure(llm, reuse_method, prompt, max_tokens):
        return demo.Measured(reuse_method, prompt.question, prompt.change, "", [next(results)], False, 1, 1, 9, 9, 0)

    monkeypatch.setattr(demo, "measure", measure)
    with pytest.raises(SystemExit) as end:
        demo.main(["--model", model, "--output", str(tmp_path), "--num-documents", "3"])
    assert end.value.code == 1
    assert "0 of 5 answers" in capsys.readouterr().out
