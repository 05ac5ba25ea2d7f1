# SPDX-License-Identifier: Apache-2.0
"""What an adapter is made from: checked before anything slow happens, made once, never mixed up with another run's."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from fixtures.tiny_models import save_tiny, tiny_model
from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention.adapt import sources
from lazyattention.adapt.config import AdaptConfig
from lazyattention.adapt.request import AdaptRequest
from lazyattention.adapt.sources import check_data
from lazyattention.adapt.workflow import prepare_samples, run_adapt
from lazyattention.cli import app
from lazyattention.config import EngineConfig
from lazyattention.engine.engine import Engine
from lazyattention.errors import ConfigError
from lazyattention.models.loaded_model import wrap_model
from lazyattention.quality.datasets import build_dataset
from lazyattention.quality.examples import parse_example
from lazyattention.quality.output import hold_output

SMALL = AdaptConfig(rank=4, alpha=8, batch_size=4, max_steps=2, eval_steps=1, held_out=2)


def load_tiny(seed=0):
    return wrap_model(tiny_model(num_hidden_layers=2, seed=seed), tiny_tokenizer(), name="tiny")


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def questions(count=8, **more):
    return [{"question": f"who is {n}?", "documents": [f"{n} is the keeper", "a lamp"], **more} for n in range(count)]


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "q.jsonl", *questions())


def labels(**more):
    return replace(SMALL, objective="labels", **more)


def request_of(tmp_path, *data, **more):
    options = {"output": tmp_path / "out", "num_questions": 8, "max_tokens": 3, "progress": False, "config": SMALL}
    return AdaptRequest(data=tuple(map(str, data)), **{**options, **more})


def test_wrong_data_is_named_before_a_model_is_there(tmp_path, data):
    for given, more, message in [
        ((), {}, "no data was given"),
        (("absent",), {}, "'absent' is neither a path"),
        (("nq-train",), {}, "nq-train takes a file"),
        ((data, data), {}, "given twice"),
        ((data,), {"num_documents": (3, 2)}, "num_documents must be a range"),
        ((data,), {"distractors": "hard"}, "distractors must be 'random' or 'similar', got 'hard'"),
        ((data, "needle"), {"distractors": "random"}, "random.* has no effect on questions that are given"),
        ((data,), {"config": labels(teacher_documents="all")}, "teacher_documents has no effect .* 'labels'"),
        ((data,), {"config": labels(keep_full=True)}, "keep_full has no effect .* 'labels'"),
        (
            (data,),
            {"config": labels(plain_share=0.0, question_weight=0.0)},
            "question_weight, plain_share has no effect",
        ),
        ((write(tmp_path / "bare.jsonl", {"question": "who?"}),), {}, "line 1 has no 'documents'"),
        ((write(tmp_path / "empty.jsonl"),), {}, "holds no questions"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_data(request_of(tmp_path, *given, **more))
    check_data(request_of(tmp_path, data, tmp_path, "needle"))
    check_data(request_of(tmp_path, data, tmp_path, distractors="random", config=labels()))


def test_the_command_names_them_before_it_loads_a_model(tmp_path, data):
    def run(*arguments):
        given = ["adapt", "--model", str(tmp_path / "no model"), *map(str, arguments)]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 2
        return " ".join(result.output.split())

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("the cape is north")
    model = save_tiny(tmp_path / "model", tiny_model(num_hidden_layers=2))
    notes = ["--model", model, "--data", tmp_path / "notes", "--output", tmp_path / "own", "--num-questions", 4]
    assert "usable question" in run(*notes, "--distractors", "random")  # of a random model
    assert json.loads((tmp_path / "own" / "samples_made.json").read_text())["distractors"] == "random"
    assert "given twice" in run("--data", data, "--data", data, "--output", tmp_path / "out")
    ignored = run("--data", data, "--output", tmp_path / "out", "--max-loss", "1", "--no-compile")
    assert "--max-loss, --compile has no effect here" in ignored
    (tmp_path / "file").write_text("")
    assert "cannot be written" in run("--data", data, "--output", tmp_path / "file" / "out")
    with hold_output(tmp_path / "held"):
        assert "in use by another run" in run("--data", data, "--output", tmp_path / "held")


def test_samples_are_those_of_the_data_and_options_given(tmp_path, data):
    log = run_adapt(load_tiny(), request_of(tmp_path, data))
    again = run_adapt(load_tiny(), request_of(tmp_path, data, config=replace(SMALL, max_steps=3)))
    assert (log.num_steps, again.num_steps) == (2, 3)
    other = write(tmp_path / "other.jsonl", *questions(9))
    engine = Engine(load_tiny())
    assert len(sources.collect_examples(engine, request_of(tmp_path, other, num_questions=5))) == 5
    for given, more, message in [
        (other, {}, "differs in data"),
        (data, {"num_questions": 7}, "differs in num_questions"),
        (data, {"max_tokens": 4, "system": "Be brief."}, "differs in max_tokens, system"),
        (data, {"config": replace(SMALL, seed=1)}, "differs in seed"),
        (data, {"config": replace(SMALL, objective="labels")}, "differs in use_gold"),
    ]:
        with pytest.raises(ConfigError, match=message):
            prepare_samples(engine, request_of(tmp_path, given, **more))
    with pytest.raises(ConfigError, match="differs in documents_place"):
        prepare_samples(Engine(load_tiny(), EngineConfig.of(documents_place="system")), request_of(tmp_path, data))
    with pytest.raises(ConfigError, match="differs in weights_id"):
        prepare_samples(Engine(load_tiny(seed=1)), request_of(tmp_path, data))


def test_each_source_gives_so_many_prompts(tmp_path, data):
    engine = Engine(load_tiny())
    other = write(tmp_path / "other.jsonl", *({**line, "id": f"other {n}"} for n, line in enumerate(questions())))

    def request(*num_questions):
        return request_of(tmp_path, other, data, num_questions=num_questions)

    check_data(request(5, 7))
    found = [example.id.startswith("other") for example in sources.collect_examples(engine, request(5, 7))]
    assert found == [True] * 5 + [False] * 7
    for wrong in ((5,), (5, 7, 9)):
        with pytest.raises(ConfigError, match=rf"one number, or one for each of the 2 data sources, got {len(wrong)}"):
            check_data(request(*wrong))
    made = prepare_samples(engine, request(5, 7))
    assert prepare_samples(engine, request(5, 7)) == made
    with pytest.raises(ConfigError, match="differs in num_questions"):
        prepare_samples(engine, request(5, 6))


@pytest.mark.parametrize("name", ["needle", "two_hop"])
def test_what_is_learnt_is_not_what_quality_asks(tmp_path, name):
    """Generated sets are made from a seed; the same one for learning and asking would measure what was learnt by heart."""
    request = request_of(tmp_path, name, num_documents=(3, 3), num_questions=40)
    learnt = sources.collect_examples(Engine(load_tiny()), request)
    asked = build_dataset(name, num_documents=3, num_questions=40, seed=request.config.seed)
    assert not {example.documents for example in learnt} & {example.documents for example in asked}


def test_what_an_earlier_version_kept_is_named(tmp_path, data):
    run_adapt(load_tiny(), request_of(tmp_path, data))
    checkpoint = tmp_path / "out" / "checkpoint.pt"
    state = torch.load(checkpoint, weights_only=True)
    del state["config"]["plain_share"]
    torch.save(state, checkpoint)
    with pytest.raises(ConfigError, match=r"differs in plain_share \(not known when it was made\)\); choose another"):
        run_adapt(load_tiny(), request_of(tmp_path, data))
    made = tmp_path / "out" / "samples_made.json"
    known = json.loads(made.read_text())
    made.write_text(json.dumps({name: known[name] for name in known if name != "teacher_documents"}))
    with pytest.raises(
        ConfigError, match=r"differs in seed, teacher_documents \(not known when it was made\)\); choose"
    ):
        run_adapt(load_tiny(), request_of(tmp_path, data, config=replace(SMALL, seed=1)))


def test_samples_of_ones_own_are_taken_as_they_are(tmp_path, data):
    run_adapt(load_tiny(), request_of(tmp_path, data))
    (tmp_path / "mine").mkdir()
    samples = (tmp_path / "out" / "samples.jsonl").read_text()
    (tmp_path / "mine" / "samples.jsonl").write_text(samples)
    run_adapt(load_tiny(), request_of(tmp_path, "needle", output=tmp_path / "mine"))
    assert (tmp_path / "mine" / "samples.jsonl").read_text() == samples


def test_too_long_and_too_few_prompts_are_named_before_any_is_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "step", lambda _: pytest.fail("work before the error"))
    long = {"id": "novel", "question": "who?", "documents": ["the cape " * 2000]}
    data = write(tmp_path / "q.jsonl", *questions(), long)
    with pytest.raises(ConfigError, match="question 'novel' has .* max_model_len"):
        run_adapt(load_tiny(), request_of(tmp_path, data, num_questions=9))
    few = write(tmp_path / "few.jsonl", *questions(3))
    with pytest.raises(ConfigError, match="gives 3 prompts to learn from; at least 4"):
        run_adapt(load_tiny(), request_of(tmp_path, few))


def test_the_documents_of_a_folder_are_what_counts(tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("the cape is north")
    asked = []

    def write_questions(engine, passages, **more):
        assert more["distractors"] == "random"
        asked.append([passage.text for passage in passages])
        return [parse_example(line, "", str(n)) for n, line in enumerate(questions())]

    monkeypatch.setattr(sources, "write_questions", write_questions)
    run_adapt(load_tiny(), request_of(tmp_path, notes, distractors="random"))
    moved = notes.rename(tmp_path / "moved")
    run_adapt(load_tiny(), request_of(tmp_path, moved, distractors="random"))
    with pytest.raises(ConfigError, match="differs in distractors"):
        run_adapt(load_tiny(), request_of(tmp_path, moved))
    assert asked == [["the cape is north"]]
    (moved / "b.txt").write_text("more")
    with pytest.raises(ConfigError, match="differs in data"):
        run_adapt(load_tiny(), request_of(tmp_path, moved, distractors="random"))


def test_a_killed_command_goes_on_where_it_was(tmp_path, data):
    folder = save_tiny(tmp_path / "model", tiny_model(num_hidden_layers=2))
    output = tmp_path / "out"
    command = ["adapt", "--model", str(folder), "--data", str(data), "--output", str(output), "--max-tokens", "3"]
    command += ["--batch-size", "4", "--eval-steps", "2", "--patience", "1000", "--rank", "4", "--num-blocks", "400"]
    endless = [sys.executable, "-c", "from lazyattention.cli import main; main()", *command, "--max-steps", "100000"]
    process = subprocess.Popen(
        endless, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        until_s = time.monotonic() + 60
        while not (output / "checkpoint.pt").exists() and process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
    assert (output / "checkpoint.pt").exists(), err.decode()[-2000:]
    assert not (output / "adapter_model.safetensors").exists()
    result = CliRunner().invoke(app, [*command, "--max-minutes", "0.0001", "--max-steps", "100000"])
    assert result.exit_code == 0, result.output
    report = json.loads((output / "adapt.json").read_text())
    assert report["num_steps"] >= 2
    assert report["stopped"] == "max_minutes"
    assert (output / "adapter_model.safetensors").exists()
    assert "next: lazyattention quality --model" in result.output
