# SPDX-License-Identifier: Apache-2.0
"""What the user names as data: found, checked before anything slow happens, and never mixed up with another run's."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.tiny_engine import loaded_tiny, make_engine
from lazyattention import envs
from lazyattention.documents.document import Document
from lazyattention.engine.gate import find_loss
from lazyattention.errors import ConfigError
from lazyattention.quality import sources
from lazyattention.quality.cli import _print_next, flags_of
from lazyattention.quality.examples import QualityExample
from lazyattention.quality.measure import MeasureConfig, layout_of
from lazyattention.quality.output import hold_output, is_kept, write_whole
from lazyattention.quality.request import QualityRequest
from lazyattention.quality.sources import check_data, collect_examples, refuse_too_long
from lazyattention.quality.workflow import run_calibration, run_quality

TEXTS = ("the cape is north", "the lamp was lit in spring", "the keeper writes the log")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path / "cache")


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture
def engine():
    return make_engine(loaded_tiny(num_hidden_layers=2), block_size=8, num_blocks=600)


def request_of(tmp_path, *data, **more):
    config = MeasureConfig(options=("after_preamble",), system="Answer.", max_tokens=3, num_timed=1)
    options = {
        "output": tmp_path / "out",
        "num_documents": (2,),
        "num_questions": 3,
        "with_plot": False,
        "progress": False,
    }
    return QualityRequest(data=tuple(map(str, data)), config=config, **{**options, **more})


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def asks(monkeypatch):
    """The random model writes no questions: these are written instead. Returns how often it was asked to."""
    calls = []

    def write_questions(engine, passages, *, num_questions, num_documents, seed, on_done):
        calls.append(num_documents)
        return [
            QualityExample(f"own-{n}", f"what {len(calls)} {n}?", tuple(passages[:num_documents]))
            for n in range(num_questions)
        ]

    monkeypatch.setattr(sources, "write_questions", write_questions)
    return calls


def test_wrong_data_is_named_before_a_model_is_there(tmp_path, notes):
    bare = write(tmp_path / "bare.jsonl", {"question": "who?"})
    full = write(tmp_path / "full.jsonl", {"question": "who?", "documents": ["a"]})
    for data, more, message in [
        ((), {}, "no data was given"),
        (("absent",), {}, "'absent' is neither a path"),
        (("nq",), {}, "nq takes a file"),
        (("needle:x",), {}, "needle takes no file"),
        ((f"nq:{notes}",), {}, "it is no file"),
        ((bare,), {}, "line 1 has no 'documents'.*--documents"),
        ((bare,), {"documents": (tmp_path / "no",)}, "no' does not exist"),
        ((full,), {"documents": (notes,)}, "there are no such lines"),
        ((notes, f"{notes}/"), {}, "both make a set 'notes-2'"),
        (("needle", "needle"), {}, "both make a set 'needle-2'"),
        ((write(tmp_path / "notes-2.jsonl", {"question": "who?", "documents": ["a"]}), notes), {}, "both make a set"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_data(request_of(tmp_path, *data, **more))
    check_data(request_of(tmp_path, bare, notes, "needle", documents=(notes,)))


def test_only_lines_without_documents_look_for_them(tmp_path, notes, engine):
    path = write(
        tmp_path / "mixed.jsonl",
        {"question": "who wrote in the log?", "answer": "the keeper"},
        {"question": "why?", "documents": ["mine"], "gold_documents": [0]},
    )
    request = request_of(tmp_path, path, documents=(notes,))
    [(name, (first, second))] = collect_examples(engine, str(path), request)
    assert name == "mixed"
    assert [document.text for document in first.documents][0] == TEXTS[2]
    assert len(first.documents) == 2
    assert second.documents == (Document("mine"),)
    write(path, {"question": "who wrote in the log?", "gold_documents": [0]})
    with pytest.raises(ConfigError, match="'gold_documents' name some"):
        check_data(request)


def test_a_prompt_that_is_too_long_is_named_before_any_is_asked(tmp_path, engine):
    short, long = (
        QualityExample(name, "who?", (Document("the cape " * n),), ("x",)) for name, n in (("a", 3), ("b", 900))
    )
    refuse_too_long(engine, [short], system="", max_tokens=3)
    with pytest.raises(ConfigError, match=rf"question 'b' has .* max_model_len is {engine.max_model_len}; give fewer"):
        refuse_too_long(engine, [short, long], system="", max_tokens=3)
    with pytest.raises(ConfigError, match="question 'a'.*answer up to 100000"):
        refuse_too_long(engine, [short], system="", max_tokens=100_000)
    room = engine.max_model_len - layout_of(engine, short, "").num_tokens
    refuse_too_long(engine, [short], system="", max_tokens=room)
    wordy = replace(short, answers=("cape " * room,))
    for example, max_tokens in ((short, room + 1), (wordy, 3)):
        with pytest.raises(ConfigError, match="question 'a'.*answer up to"):
            refuse_too_long(engine, [example], system="", max_tokens=max_tokens)
    path = write(tmp_path / "q.jsonl", *(example.to_dict() for example in (short, long)))
    for run in (run_quality, run_calibration):
        with pytest.raises(ConfigError, match="question 'b'"):
            run(engine, request_of(tmp_path, path))
    sets = [write(tmp_path / f"{one.id}.jsonl", one.to_dict()) for one in (short, long)]
    with pytest.raises(ConfigError, match="question 'b'"):
        run_quality(engine, request_of(tmp_path, *sets, output=tmp_path / "sets"))
    assert engine.stats.num_steps == 0


def test_what_options_add_to_a_prompt_counts_too(tmp_path):
    example = QualityExample("a", "who?", (Document("the cape"),) * 9, ("x",))
    options = ("after_preamble", f"isolated+sink={'the lamp ' * 60}")
    request = request_of(tmp_path, write(tmp_path / "q.jsonl", example.to_dict()))
    request = replace(request, config=replace(request.config, options=options))
    loaded = loaded_tiny(num_hidden_layers=2)
    num_tokens = layout_of(make_engine(loaded), example, request.config.system).num_tokens
    engine = make_engine(loaded, block_size=8, num_blocks=600, max_model_len=num_tokens + request.config.max_tokens)
    for run in (run_quality, run_calibration):
        with pytest.raises(ConfigError, match="question 'a' has .* max_model_len"):
            run(engine, request)
    assert engine.stats.num_steps == 0
    plain = replace(request, config=replace(request.config, options=options[:1]), output=tmp_path / "plain")
    assert run_quality(engine, plain)["all"]["num_questions"] == 1


def test_questions_are_asked_once_and_never_taken_for_those_of_other_options(tmp_path, notes, engine, asks):
    request = request_of(tmp_path, notes, num_documents=(1, 2))
    first = collect_examples(engine, str(notes), request)
    assert [name for name, _ in first] == ["notes-1", "notes-2"]
    assert collect_examples(engine, str(notes), request) == first
    assert asks == [1, 2]
    for other in ({"num_questions": 2}, {"seed": 1}):
        with pytest.raises(ConfigError, match=f"differs in {next(iter(other))}"):
            collect_examples(engine, str(notes), request_of(tmp_path, notes, num_documents=(1, 2), **other))
    other = make_engine(loaded_tiny(num_hidden_layers=2, seed=1), block_size=8, num_blocks=600)
    with pytest.raises(ConfigError, match="differs in weights_id"):
        collect_examples(other, str(notes), request)
    (notes / "0.txt").write_text("another text")
    with pytest.raises(ConfigError, match="differs in passages"):
        collect_examples(engine, str(notes), request)
    assert asks == [1, 2]


def test_a_run_killed_while_questions_were_written_asks_anew(tmp_path, notes, engine, asks, monkeypatch):
    def killed(path, lines):
        if path.name == "questions.jsonl":
            raise KeyboardInterrupt
        write_whole(path, lines)

    with monkeypatch.context() as patch:
        patch.setattr(sources, "write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            collect_examples(engine, str(notes), request_of(tmp_path, notes))
    [(_, examples)] = collect_examples(engine, str(notes), request_of(tmp_path, notes))
    assert len(examples) == 3
    assert asks == [2, 2]


def test_an_adapted_model_is_asked_what_the_other_run_asked(tmp_path, notes, engine, asks):
    run_quality(engine, request_of(tmp_path, notes))
    other = make_engine(loaded_tiny(num_hidden_layers=2, seed=1), block_size=8, num_blocks=600)
    again = {"output": tmp_path / "again", "against": tmp_path / "out"}
    report = run_quality(other, request_of(tmp_path, notes, **again))
    assert asks == [2]  # the other model would have asked something else
    assert report["sets"]["notes-2"]["against"]["num_questions"] == 3
    with pytest.raises(ConfigError, match=r"notes-1/questions.jsonl is not there \(.*out holds notes-2\)"):
        run_quality(other, request_of(tmp_path, notes, num_documents=(1,), **again))
    with pytest.raises(ConfigError, match="over other questions"):
        run_quality(other, request_of(tmp_path, notes, num_questions=2, **again))
    path = write(tmp_path / "notes-2.jsonl", {"id": "own-0", "question": "another?", "documents": ["a"]})
    with pytest.raises(ConfigError, match="over other questions"):
        run_quality(other, request_of(tmp_path, path, **again))
    with pytest.raises(ConfigError, match="describes no run"):
        run_quality(other, request_of(tmp_path, "needle", **again))


def test_the_loss_of_one_question_is_not_kept(tmp_path, engine, caplog):
    path = write(tmp_path / "q.jsonl", *({"question": f"who {n}?", "documents": [TEXTS[n]]} for n in range(3)))
    run_quality(engine, request_of(tmp_path, path, num_questions=1))
    assert find_loss(engine.loaded.weights_id, engine.config) is None
    assert "one question" in caplog.text
    run_quality(engine, request_of(tmp_path, path, output=tmp_path / "more"))
    assert find_loss(engine.loaded.weights_id, engine.config).num_questions == 3


def test_files_that_are_left_out_are_said(tmp_path, notes, caplog):
    (notes / "empty.txt").write_text("")
    assert len(sources.read_all((notes,))) == 3
    assert "empty.txt is left out: empty" in caplog.text


# Output folders -------------------------------------------------------------------------------------------------------


def test_two_runs_do_not_write_into_one_folder(tmp_path, engine):
    path = write(tmp_path / "q.jsonl", {"question": "who?", "documents": ["a"]})
    with hold_output(tmp_path / "out"):
        for run in (run_quality, run_calibration):
            with pytest.raises(ConfigError, match="out' is in use by another run"):
                run(engine, request_of(tmp_path, path))
    run_quality(engine, request_of(tmp_path, path))


def test_a_killed_run_holds_its_folder_no_longer(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from lazyattention.quality.output import hold_output\n"
        "with hold_output(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="in use"), hold_output(tmp_path / "out"):
            pass
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with hold_output(tmp_path / "out"):
        pass


def test_a_file_is_there_as_a_whole_or_as_it_was(tmp_path, monkeypatch):
    path, write_text = tmp_path / "x.jsonl", Path.write_text

    def killed(self, text, **more):
        write_text(self, text[:2], **more)
        raise KeyboardInterrupt

    write_whole(path, ["old\n"])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, ["newer\n"])
    assert path.read_text() == "old\n"
    write_whole(path, ["newer\n"])
    assert path.read_text() == "newer\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="file/out' cannot be written: .*--output"),
        hold_output(tmp_path / "file" / "out"),
    ):
        pass


def test_file_systems_without_locks_are_no_obstacle(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with hold_output(tmp_path / "out"):
        (tmp_path / "out" / "x").write_text("")


def test_what_another_run_made_is_told_apart(tmp_path):
    path, description = tmp_path / "made.jsonl", tmp_path / "run.json"
    run = {"seed": 1, "counts": (1, 2)}
    assert not is_kept(path, description, {**run, "seed": 7})  # a run that made nothing is in nobody's way
    assert not is_kept(path, description, run)
    write_whole(path, ["x"])
    assert is_kept(path, description, run)
    with pytest.raises(ConfigError, match=r"differs in rank \(not known when it was made\), seed\)"):
        is_kept(path, description, {**run, "seed": 2, "rank": 3})
    description.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        is_kept(path, description, run)
    description.unlink()
    assert is_kept(path, description, {})


def test_the_next_commands_carry_the_options_that_were_measured():
    assert flags_of({"max_chunk_len": 64, "calibrated": True, "compile": False, "sink": "a b"}) == [
        "--max-chunk-len",
        "64",
        "--calibrated",
        "--no-compile",
        "--sink",
        "a b",
    ]


def test_the_next_commands_take_only_options_that_they_accept(tmp_path, capsys):
    _print_next(
        request_of(tmp_path, "needle"), [], None, {"num_blocks": 9, "recompute": "first:16", "calibrated": True}
    )
    train, serve = (line.split() for line in capsys.readouterr().out.splitlines())
    assert train[-2:] == ["--num-blocks", "9"]
    assert not {"--recompute", "--calibrated"} & set(train)
    assert {"--num-blocks", "--recompute", "--calibrated"} <= set(serve)


def test_a_built_in_sets_file_is_read_by_the_set_whatever_its_name(tmp_path):
    path = tmp_path / "open.jsonl"
    path.write_text("")
    check_data(request_of(tmp_path, f"nq:{path}"))
    assert sources.is_jsonl(str(path))
    assert not sources.is_jsonl(f"nq:{path}")
