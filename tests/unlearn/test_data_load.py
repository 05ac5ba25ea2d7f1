# SPDX-License-Identifier: Apache-2.0
"""Every kind of record is read, and every mistake is named with file, line and field."""

import json
from pathlib import Path

import pytest

from lazyattention.errors import ConfigError, NotFoundError, RequestError
from lazyattention.unlearn.data import load_examples

SHARED = Path(__file__).parents[3] / "shared" / "data" / "unlearn"


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return path


def test_question_and_answer_with_everything_optional(tmp_path):
    record = {
        "question": "Who?",
        "answer": "Ann.",
        "paraphrased_question": "Which person?",
        "paraphrased_answer": "It was Ann.",
        "perturbed_answers": ["It was Bob.", "It was Cy."],
        "id": 7,
        "source": "a field of the user's own",
    }
    path = write(tmp_path / "forget.jsonl", record, "", {"question": "Where?", "answer": "There."})
    first, second = load_examples(path)
    assert (first.question, first.answer) == ("Who?", "Ann.")
    assert (first.paraphrased_question, first.paraphrased_answer) == ("Which person?", "It was Ann.")
    assert first.perturbed_answers == ("It was Bob.", "It was Cy.")
    assert (first.example_id, first.split, first.kind) == ("7", "forget", "qa")
    # The empty line counts: the id names the line of the file.
    assert (second.example_id, second.perturbed_answers) == ("forget:3", ())


def test_prompt_completion_and_text_are_fed_as_they_stand(tmp_path):
    pair = load_examples(write(tmp_path / "a.jsonl", {"prompt": "Once", "completion": "upon a time"}), split="retain")
    assert (pair[0].question, pair[0].answer, pair[0].kind) == ("Once", "upon a time", "completion")
    assert pair[0].split == "retain"
    text = load_examples(write(tmp_path / "b.jsonl", {"text": "Once upon a time"}))
    assert (text[0].question, text[0].answer, text[0].kind) == ("", "Once upon a time", "completion")


def test_a_json_array_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"question": "q", "answer": "a"}] * 2, indent=2), encoding="utf-8-sig")
    assert [e.example_id for e in load_examples(path)] == ["a:1", "a:2"]


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q\u2028r", "answer": "a"}\n', encoding="utf-8")
    assert load_examples(path)[0].question == "q\u2028r"


def test_limit_takes_the_first(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"question": f"q{i}", "answer": "a"} for i in range(5)))
    assert [e.question for e in load_examples(path, limit=2)] == ["q0", "q1"]
    with pytest.raises(ConfigError, match="limit must be at least 1, got 0"):
        load_examples(path, limit=0)


QA = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([QA, '{"question": "q"'], r"a\.jsonl, line 2: not valid JSON"),
        ([QA, "3"], r"a\.jsonl, line 2: expected a JSON object, got int"),
        ([QA, {"question": "q"}], r"line 2: field 'answer' is missing, the record has \['question'\]"),
        ([{"question": "q", "anwser": "a"}], r"line 1: field 'answer' is missing.*did you mean it by 'anwser'"),
        ([{**QA, "paraphrased_qestion": "p"}], r"did you mean 'paraphrased_question'"),
        ([{**QA, "answer": " "}], r"line 1: field 'answer' must be a non-empty string, got ' '"),
        ([{**QA, "answer": 3}], r"field 'answer' must be a non-empty string, got 3"),
        ([{**QA, "perturbed_answers": ["x", ""]}], r"field 'perturbed_answers' must be a list of non-empty strings"),
        ([{**QA, "id": "1"}, {**QA, "id": 1}], r"line 2: id '1' stands already in .*line 1"),
        ([{**QA, "id": 1.5}], r"field 'id' must be a string or a whole number, got 1.5"),
        ([{"prompt": "p", "completions": "c"}], r"unknown field 'completions'; did you mean 'completion'"),
        ([{"prompt": "p"}], r"line 1: field 'completion' is missing"),
        ([{"q": "p"}], r"line 1: fields \['q'\] are of no known record; known: .*question"),
        ([], r"holds no example"),
        ([{"id": "x1", "input": "i", "output": "o", "task": "Task1"}], r"LUME id 'x1' must end in 'sc<number>'"),
    ],
)
def test_mistakes_are_named(tmp_path, records, message):
    with pytest.raises(RequestError, match=message):
        load_examples(write(tmp_path / "a.jsonl", *records))


def test_a_broken_array_names_its_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n{"question": "q",\n"answer" "a"}]')
    with pytest.raises(RequestError, match="line 3: not valid JSON"):
        load_examples(path)


def test_other_encodings_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"question": "né", "answer": "a"}'.encode("latin-1"))
    with pytest.raises(RequestError, match="not UTF-8 text"):
        load_examples(path)


def test_names_are_looked_up_in_data_dir_and_among_generated_people(tmp_path):
    write(tmp_path / "mine.jsonl", QA)
    assert load_examples("mine", data_dir=tmp_path)[0].split == "mine"
    assert len(load_examples("people/forget?num_people=20&num_facts=3&seed=5")) == 6
    with pytest.raises(NotFoundError, match="'yours' is not a file nor a file in"):
        load_examples("yours", data_dir=tmp_path)
    with pytest.raises(NotFoundError, match="there are: forget, retain, holdout"):
        load_examples("people/test")
    with pytest.raises(RequestError, match="unknown option 'people'; allowed: num_people"):
        load_examples("people/forget?people=3")
    with pytest.raises(RequestError, match="must be a number, got 'many'"):
        load_examples("people/forget?num_people=many")


def test_lume_keeps_subtasks_and_leaves_real_people_out(tmp_path):
    records = [
        {"id": '"ab"sc1', "input": "Once", "output": "upon", "task": "Task1"},
        {"id": "abqa0", "input": "Who?", "output": "Ann", "task": "Task2"},
        {"id": "cqa0", "input": "Who?", "output": "Bob", "task": "Task3"},
    ]
    path = write(tmp_path / "lume.jsonl", *records)
    found = load_examples(path)
    assert [(e.example_id, e.kind, e.group) for e in found] == [
        ("absc1", "completion", "Task1"),
        ("abqa0", "qa", "Task2"),
    ]
    assert len(load_examples(path, lume_tasks=("Task1", "Task2", "Task3"))) == 3
    with pytest.raises(RequestError, match="lume_tasks"):
        load_examples(path, lume_tasks=())


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no TOFU and LUME files at {SHARED}")
def test_tofu_and_lume_files_are_read_whole():
    counts = {path.stem: len(load_examples(path, lume_tasks=("Task1", "Task2", "Task3"))) for path in SHARED.iterdir()}
    assert counts["tofu_forget10"] == 400
    assert counts["tofu_retain90"] == 3600
    assert counts["lume_forget"] == 2732
    assert counts["lume_retain"] == 2734
    perturbed = load_examples("tofu_forget10_perturbed", data_dir=SHARED)
    assert all(e.paraphrased_question and e.paraphrased_answer and len(e.perturbed_answers) == 5 for e in perturbed)
    facts = load_examples("tofu_world_facts_perturbed", data_dir=SHARED)
    assert all(len(e.perturbed_answers) >= 3 and e.paraphrased_answer is None for e in facts)
