# SPDX-License-Identifier: Apache-2.0
"""Metrics, intervals, examples, generated and public data sets: everything that needs no model."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyattention.config import ChunkOptions
from lazyattention.errors import ConfigError, RequestError
from lazyattention.quality.datasets import build_dataset
from lazyattention.quality.examples import read_examples
from lazyattention.quality.metrics import containment, exact_match, f1, normalize
from lazyattention.quality.options import REUSE_OPTIONS, reuse_option
from lazyattention.quality.questions import read_question
from lazyattention.quality.statistics import interval, paired_difference

SHARED = Path(__file__).parents[3] / "shared" / "data" / "qa"
NQ, HOTPOT = SHARED / "nq-open-oracle.jsonl.gz", SHARED / "hotpotqa_100.json"


def test_answers_are_compared_as_words():
    assert normalize("The  Nile, (of Egypt)!") == "nile of egypt"
    assert exact_match("the Nile.", ["Amazon", "Nile"]) == 1
    assert exact_match("the Nile river", ["Nile"]) == 0
    assert containment("It is the Nile river", ["nile"]) == 1
    assert containment("It is in Nileland", ["nile"]) == 0  # whole words only
    assert containment("anything", ["the"]) == 0  # nothing is left of it
    assert f1("Nile river", ["the Nile"]) == pytest.approx(2 / 3)
    assert f1("", ["Nile"]) == 0
    assert f1("x", []) == 0


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_an_interval_surrounds_its_mean_and_is_repeatable(values):
    found = interval(values)
    assert found == interval(values)
    assert found.low <= found.mean + 1e-9
    assert found.high >= found.mean - 1e-9
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9


def test_pairing_sees_what_separate_intervals_hide():
    others = [float(i % 7) for i in range(60)]
    values = [value + 0.1 for value in others]
    paired = paired_difference(values, others)
    assert paired.mean == pytest.approx(0.1)
    assert paired.low > 0.09
    alone = interval(values)
    assert alone.high - alone.low > 0.5


def test_the_interval_covers_as_often_as_it_says():
    import random

    draw = random.Random(5)
    hits = 0
    for _ in range(150):
        found = interval([draw.random() for _ in range(40)])
        hits += found.low <= 0.5 <= found.high
    assert 0.86 < hits / 150 <= 1.0


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_examples_are_read_as_written(tmp_path):
    path = write(
        tmp_path / "q.jsonl",
        {"question": "Who?", "documents": ["a", {"text": "b", "id": "B"}], "answers": ["x"], "gold_documents": ["B"]},
        "",
        {"id": "mine", "question": "When?", "documents": ["a"], "answer": "today"},
    )
    first, second = read_examples(path)
    assert (first.id, first.answers, first.gold_documents, first.gold_position) == ("1", ("x",), (1,), "last")
    twice = write(
        tmp_path / "twice.jsonl",
        {"question": "q", "documents": [{"text": t, "id": "A"} for t in "xyz"], "gold_documents": "A"},
    )
    assert read_examples(twice)[0].gold_documents == (0, 1, 2)  # an id names all documents that have it
    assert (second.id, second.answers, second.gold_documents, second.gold_position) == ("mine", ("today",), (), None)
    again = read_examples(write(tmp_path / "again.jsonl", *[json.dumps(e.to_dict()) for e in (first, second)]))
    assert again == [first, second]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON: .* at character 2"),
        ([1], "write one object per line"),
        ({"documents": ["a"]}, "'question' must be"),
        ({"question": "q"}, "line 1 has no 'documents'"),
        ({"question": "q", "documents": []}, "'documents' must be"),
        ({"question": "q", "documents": "a"}, "'documents' must be"),
        ({"question": " ", "documents": ["a"]}, "'question' must be"),
        ('"' + "[" * 3 + '"', "is a str"),
        ("[" * 100_000, "line 1 is not JSON"),
        ({"question": "\ud83d?", "documents": ["a"]}, "half of a surrogate pair"),
        ({"question": "q", "documents": ["a"], "id": 1.5}, "'id' must be"),
        ({"question": "q", "documents": ["a"], "id": ""}, "'id' must be"),
        ({"question": "q", "documents": [{"txt": "a"}]}, "unknown document field"),
        ({"question": "q", "documents": ["a"], "gold": 1}, "unknown field"),
        ({"question": "q", "documents": ["a"], "answers": "x"}, "'answers' must be a list"),
        ({"question": "q", "documents": ["a"], "gold_documents": [1]}, "'gold_documents' holds 1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        read_examples(write(tmp_path / "q.jsonl", line))


def test_line_ends_inside_texts_and_a_byte_order_mark_are_no_trouble(tmp_path):
    text = "one\u2028two\x85three"
    line = json.dumps({"id": None, "question": f"{text}?", "documents": [text]}, ensure_ascii=False)
    (tmp_path / "q.jsonl").write_text(f"\ufeff{line}\r\n\n{line}\n", encoding="utf-8")
    found = read_examples(tmp_path / "q.jsonl")
    assert [example.documents[0].text for example in found] == [text, text]
    assert [example.id for example in found] == ["1", "3"]


def test_an_id_given_twice_is_named_with_both_lines(tmp_path):
    line = {"question": "q", "documents": ["a"]}
    with pytest.raises(ConfigError, match="line 2: id 'x' is that of line 1"):
        read_examples(write(tmp_path / "q.jsonl", {**line, "id": "x"}, {**line, "id": "x"}))
    with pytest.raises(ConfigError, match="line 2: id '2' is that of line 1"):
        read_examples(write(tmp_path / "q.jsonl", {**line, "id": 2}, line))


def test_no_lines_and_no_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match="holds no questions"):
        read_examples(write(tmp_path / "q.jsonl", "", ""))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_examples(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("name", ["needle", "two_hop"])
@pytest.mark.parametrize("num_documents", [2, 3, 10])
def test_generated_sets_hold_their_answers_where_they_say(name, num_documents):
    examples = build_dataset(name, num_documents=num_documents, num_questions=24)
    assert examples == build_dataset(name, num_documents=num_documents, num_questions=24)
    assert examples != build_dataset(name, num_documents=num_documents, num_questions=24, seed=1)
    assert len({example.id for example in examples}) == 24
    for example in examples:
        assert len(example.documents) == num_documents
        holders = [place for place, d in enumerate(example.documents) if example.answers[0] in d.text]
        # A fruit may be several people's favourite; everything else has one holder.
        assert set(holders) & set(example.gold_documents)
        assert len(example.gold_documents) == (1 if name == "needle" else 2)
    if num_documents == 10:
        assert len({example.gold_documents[0] for example in examples}) > 4
        starts = [e.documents[e.gold_documents[0]].text.find("of") < 30 for e in examples]
        assert 0 < sum(starts) < len(starts)  # at several depths


def test_two_hops_need_two_documents():
    for example in build_dataset("two_hop", num_documents=6, num_questions=10):
        person = example.question.split("team that ")[1].split(" belongs")[0]
        first, second = sorted(
            (example.documents[p].text for p in example.gold_documents), key=lambda t: person not in t
        )
        assert person in first
        assert example.answers[0] not in first
        assert example.answers[0] in second
        assert person not in second
    with pytest.raises(ConfigError, match="at least 2 documents"):
        build_dataset("two_hop", num_documents=1, num_questions=1)


def test_wrong_data_sets_are_named(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'needle'"):
        build_dataset("neddle", num_documents=2, num_questions=1)
    with pytest.raises(ConfigError, match="nq takes a file"):
        build_dataset("nq", num_documents=2, num_questions=1)
    with pytest.raises(ConfigError, match="needle takes no file"):
        build_dataset("needle:x", num_documents=2, num_questions=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        build_dataset(f"nq:{tmp_path / 'absent'}", num_documents=2, num_questions=1)
    with pytest.raises(ConfigError, match="not of the form"):
        build_dataset(f"nq:{write(tmp_path / 'x.jsonl', {'question': 'q'})}", num_documents=2, num_questions=1)
    with pytest.raises(ConfigError, match="not of the form"):
        build_dataset(f"nq:{write(tmp_path / 'x.jsonl', '{')}", num_documents=2, num_questions=1)
    with pytest.raises(ConfigError, match="gives no questions"):
        build_dataset(f"nq:{write(tmp_path / 'x.jsonl', '')}", num_documents=2, num_questions=1)
    with pytest.raises(ConfigError, match="gives no questions"):
        build_dataset(f"hotpotqa:{write(tmp_path / 'x.json', '[]')}", num_documents=2, num_questions=1)
    broken = bytearray(gzip.compress(bytes(range(256)) * 9))
    broken[20:60] = b"\xff" * 40
    (tmp_path / "x.jsonl.gz").write_bytes(broken)
    with pytest.raises(ConfigError, match="cannot be read"):
        build_dataset(f"nq:{tmp_path / 'x.jsonl.gz'}", num_documents=2, num_questions=1)
    with pytest.raises(ConfigError, match="distractor form"):
        build_dataset(f"hotpotqa:{write(tmp_path / 'x.json', [{'question': 'q'}])}", num_documents=2, num_questions=1)


@pytest.mark.skipif(not NQ.exists(), reason=f"needs {NQ}")
def test_natural_questions_hide_one_gold_passage():
    test = build_dataset(f"nq:{NQ}", num_documents=10, num_questions=50)
    train = build_dataset(f"nq-train:{NQ}", num_documents=10, num_questions=5000)
    assert len(test) == 50
    assert len(train) > 1200
    tested = build_dataset(f"nq:{NQ}", num_documents=1, num_questions=5000)
    assert len(tested) == 1000
    titles = {example.documents[0].title for example in tested}
    assert not titles & {document.title for example in train for document in example.documents}
    num_found = 0
    for example in test:
        assert len({document.text for document in example.documents}) == 10
        held = [containment(document.text, example.answers) for document in example.documents]
        assert sum(held) == held[example.gold_documents[0]]
        num_found += sum(held)
    assert num_found >= 45  # a few answers are spelt otherwise in their passage
    assert len({example.gold_documents[0] for example in test}) == 10


@pytest.mark.skipif(not HOTPOT.exists(), reason=f"needs {HOTPOT}")
def test_hotpotqa_keeps_its_gold_paragraphs():
    whole = build_dataset(f"hotpotqa:{HOTPOT}", num_documents=10, num_questions=100)
    small = build_dataset(f"hotpotqa:{HOTPOT}", num_documents=4, num_questions=100)
    assert [e.question for e in whole] == [e.question for e in small]
    assert {len(e.documents) for e in small} == {4}
    for large, fewer in zip(whole, small, strict=True):
        assert len(large.gold_documents) == 2
        assert [large.documents[p].title for p in large.gold_documents] == [
            fewer.documents[p].title for p in fewer.gold_documents
        ]


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Question: Who built the lighthouse?\nAnswer: nobody", "Who built the lighthouse?"),
        ('1. "When was the lamp first lit?" I hope', "When was the lamp first lit?"),
        ("**Question:** Where is the cape of winds?", "Where is the cape of winds?"),
        ("Sure, here it is:\nHow tall is the tower?", "How tall is the tower?"),
        ("Why?", None),
        ("The tower is tall.", None),
        ("", None),
    ],
)
def test_a_written_question_is_found(text, question):
    assert read_question(text) == question


def test_an_unknown_option_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'isolated'"):
        REUSE_OPTIONS["isolate"]


def test_options_compose_on_the_command_line():
    option = reuse_option("isolated+num_hidden=8+sink=\\n+recompute=first:16")
    base = ChunkOptions(positions="parallel")
    assert option.chunk_options(base) == ChunkOptions(
        encoding="isolated", num_hidden=8, sink="\n", positions="parallel"
    )
    assert option.recompute == "first:16"
    assert reuse_option("recompute_first_16+parallel").recompute == "first:16"
    assert reuse_option("chunk_temperature=0.8+chunk_bias=-1").changes == {"chunk_temperature": 0.8, "chunk_bias": -1.0}
    assert reuse_option("calibrated=true").changes == reuse_option("calibrated").changes
    assert reuse_option("parallel") is REUSE_OPTIONS["parallel"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("isolated+encoding=after_preamble", "sets encoding twice"),
        ("hidden=3", "no chunk option 'hidden'"),
        ("num_hidden=few", "num_hidden must be a number"),
        ("num_hidden=-1", "num_hidden must be a whole number"),
        ("calibrated=maybe", "must be true or false"),
        ("isolated+paralel", "did you mean 'parallel'"),
        ("", "unknown reuse option"),
    ],
)
def test_a_wrong_composition_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        reuse_option(text)
    with pytest.raises(RequestError, match="first"):
        reuse_option("recompute=first:0")
