# SPDX-License-Identifier: Apache-2.0
"""The measurement: its numbers are the engine's, it can be interrupted, and its report says what the records say."""

import contextlib
import io
import json
from dataclasses import asdict, replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fixtures.tiny_engine import loaded_tiny, make_engine
from fixtures.tiny_models import save_tiny, tiny_model
from lazyattention import envs
from lazyattention.cli import app
from lazyattention.config import ChunkOptions
from lazyattention.documents.document import Document
from lazyattention.engine.gate import find_loss
from lazyattention.engine.scoring import generate, score
from lazyattention.errors import ConfigError
from lazyattention.quality import measure as measure_module
from lazyattention.quality.examples import QualityExample
from lazyattention.quality.measure import MeasureConfig, Record, answer_token_ids, layout_of, measure, read_records
from lazyattention.quality.questions import passages_of, write_questions
from lazyattention.quality.report import group_table, loss_of, summarize, summarize_against, summary_table
from lazyattention.quality.request import QualityRequest
from lazyattention.quality.statistics import interval
from lazyattention.quality.workflow import run_quality

CONFIG = MeasureConfig(system="Answer.", max_tokens=4, group_size=2)
TEXTS = ("the cape is north", "the lamp was lit in spring", "the keeper writes the log")
EXAMPLES = [
    QualityExample("a", "what is north?", (Document(TEXTS[0]), Document(TEXTS[1])), ("the cape",), (0,)),
    QualityExample("b", "when?", tuple(Document(text) for text in TEXTS), ("in spring", "spring"), (1,)),
    QualityExample("c", "who writes?", tuple(Document(text) for text in reversed(TEXTS)), ("the keeper",), (0,)),
    QualityExample("d", "what?", (Document(TEXTS[2]),), ("log",), (0,)),
    QualityExample("e", "why?", tuple(Document(text) for text in TEXTS), (), ()),
]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path / "cache")


def engine_of(**options):
    return make_engine(loaded_tiny(num_hidden_layers=2), block_size=8, **options)


def test_numbers_are_those_of_single_requests(tmp_path):
    engine = engine_of()
    records = {record.id: record for record in measure(engine, EXAMPLES, CONFIG, tmp_path)}
    assert list(records) == ["a", "b", "c", "d", "e"]
    example = EXAMPLES[1]
    layout = layout_of(engine, example, "Answer.")
    alone = engine_of()
    full = generate(alone, [layout], max_tokens=4, reuse_method="full_recompute")[0]
    for name, encoding in (("after_preamble", "after_preamble"), ("isolated", "isolated")):
        own = generate(alone, [layout], max_tokens=4, chunk_options=ChunkOptions(encoding=encoding))[0]
        along = score(alone, [layout], [full.token_ids], chunk_options=ChunkOptions(encoding=encoding))[0]
        gold = score(
            alone,
            [layout],
            [answer_token_ids(alone, layout, "in spring")],
            chunk_options=ChunkOptions(encoding=encoding),
        )[0]
        found = records["b"].metrics[name]
        kl = torch.nn.functional.kl_div(along.logprobs, full.logprobs, reduction="none", log_target=True)
        assert found["nll"] == pytest.approx(along.nll, abs=1e-4)
        assert found["kl"] == pytest.approx(kl.sum(1).mean().item(), abs=1e-4)
        assert found["kl"] > 1e-3
        assert found["gold_nll"] == pytest.approx(gold.nll, abs=1e-4)
        assert found["agreement"] == float(own.token_ids == full.token_ids)
        assert records["b"].answers[name] == own.output.text.strip()
    reference = records["b"].metrics["full"]
    assert reference["kl"] == 0
    assert reference["agreement"] == 1
    assert reference["nll"] == pytest.approx(full.nll, abs=1e-4)
    assert "containment" in reference
    assert "containment" not in records["e"].metrics["full"]
    engine.check_idle()


def test_what_an_option_costs_is_counted_over_stored_documents(tmp_path):
    names = ("after_preamble", "recompute_first_16", "recompute_deviation_15", "recompute_attention_15")
    engine = engine_of()
    records = measure(engine, EXAMPLES[:3], replace(CONFIG, options=names), tmp_path)
    layout = layout_of(engine, EXAMPLES[0], "Answer.")
    num_documents = sum(len(span.token_ids) for span in layout.spans if span.is_document)
    num_question = len(layout.spans[-1].token_ids)
    shares = {name: found["computed_share"] * layout.num_tokens for name, found in records[0].metrics.items()}
    assert shares["full"] == layout.num_tokens
    assert shares["after_preamble"] == pytest.approx(num_question)
    first = sum(min(16, len(span.token_ids)) for span in layout.spans if span.is_document)
    assert shares["recompute_first_16"] == pytest.approx(num_question + first)
    # All of the prompt before the question, through both layers of two; then the chosen blocks.
    assert shares["recompute_deviation_15"] > layout.num_tokens
    assert 2 * num_question < shares["recompute_attention_15"] < 2 * num_question + num_documents
    assert all(found["ttft_s"] > 0 for record in records for found in record.metrics.values())
    summary = summarize(records)
    values = sorted(record.metrics["full"]["ttft_s"] for record in records)
    assert summary["options"]["full"]["ttft_s"]["median"] == values[1]
    text = _text_of(summary_table(summary, "costs"))
    assert "tokens computed" in text
    assert f"{values[1]:.3f}" in text
    engine.check_idle()


def test_a_document_that_was_evicted_is_stored_again_before_costs_count(tmp_path, monkeypatch):
    engine, calls = engine_of(), []
    forget = engine.cache.forget_unused_texts

    def evict():
        calls.append("full" if not calls else "after_preamble")
        if len(calls) < 3:
            engine.cache.clear()
        return forget()

    monkeypatch.setattr(engine.cache, "forget_unused_texts", evict)
    [record] = measure(engine, EXAMPLES[:1], replace(CONFIG, options=("after_preamble",)), tmp_path)
    layout = layout_of(engine, EXAMPLES[0], "Answer.")
    share = record.metrics["after_preamble"]["computed_share"]
    assert share * layout.num_tokens == pytest.approx(len(layout.spans[-1].token_ids))
    assert calls == ["full", "after_preamble", "after_preamble"]


def test_costs_are_measured_on_the_first_questions_only(tmp_path):
    config = replace(CONFIG, num_timed=2)
    metrics = [record.metrics["isolated"] for record in measure(engine_of(), EXAMPLES, config, tmp_path)]
    assert ["ttft_s" in found for found in metrics] == [True, True, False, False, False]
    assert all("kl" in found for found in metrics)
    summary = summarize(read_records(tmp_path))["options"]["isolated"]
    assert summary["ttft_s"]["value"]["num_questions"] == 2
    assert summary["kl"]["value"]["num_questions"] == 5
    with pytest.raises(ConfigError, match="num_timed must be at least 0, got -1"):
        replace(CONFIG, num_timed=-1)


def test_blocks_of_the_engines_option_are_measured_and_remembered(tmp_path):
    """`--recompute` changes what the plain options are; their loss is not that of engines without it."""
    measured = measure(engine_of(), EXAMPLES[:2], CONFIG, tmp_path / "without")
    engine = engine_of(recompute="first:16")
    with_blocks = measure(engine, EXAMPLES[:2], CONFIG, tmp_path / "with")
    share = [one[0].metrics["after_preamble"]["computed_share"] for one in (measured, with_blocks)]
    assert share[1] > share[0]
    with pytest.raises(ConfigError, match="differs in options"):
        measure(engine, EXAMPLES[:2], CONFIG, tmp_path / "without")
    (tmp_path / "d.txt").write_text(" ".join(TEXTS))
    config = replace(CONFIG, options=("after_preamble", "recompute_first_16"))
    run_quality(
        engine_of(),
        QualityRequest(
            data=(_jsonl(tmp_path),), output=tmp_path / "out", config=config, progress=False, with_plot=False
        ),
    )
    weights_id = engine.loaded.weights_id
    plain, blocks = (find_loss(weights_id, engine_of(**more).config) for more in ({}, {"recompute": "first:16"}))
    assert plain is not None
    assert blocks is not None
    assert plain.loss != blocks.loss
    assert find_loss(weights_id, engine_of(recompute="first:8").config) is None


def _jsonl(folder):
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(example.to_dict()) + "\n" for example in EXAMPLES[:2]))
    return str(path)


def _text_of(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_one_document_after_the_preamble_is_full_attention_and_loses_nothing(tmp_path):
    # A single document sees the preamble and itself: the chunk mask is the causal mask.
    metrics = measure(engine_of(), EXAMPLES[3:4], CONFIG, tmp_path)[0].metrics
    assert metrics["after_preamble"]["kl"] == pytest.approx(0, abs=1e-5)
    assert metrics["after_preamble"]["agreement"] == 1
    assert metrics["isolated"]["kl"] > 1e-3


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    want = measure(engine_of(), EXAMPLES, CONFIG, tmp_path / "whole")
    asked = []
    ask_group = measure_module._measure_group

    def fail_at_second(engine, group, *more):
        asked.append([example.id for example in group])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return ask_group(engine, group, *more)

    monkeypatch.setattr(measure_module, "_measure_group", fail_at_second)
    with pytest.raises(KeyboardInterrupt):
        measure(engine_of(), EXAMPLES, CONFIG, tmp_path / "cut")
    path = tmp_path / "cut" / "records.jsonl"
    path.write_text(path.read_text() + '{"id": "c", "num_doc')  # killed while writing
    done = []
    got = measure(engine_of(), EXAMPLES, CONFIG, tmp_path / "cut", on_done=done.append)
    assert asked == [["a", "b"], ["c", "d"], ["c", "d"], ["e"]]
    assert done == [2, 2, 1]
    assert [r.id for r in got] == [r.id for r in want]
    for one, other in zip(got, want, strict=True):
        assert one.answers == other.answers
        timeless = [{**record.metrics["isolated"], "ttft_s": 0.0} for record in (one, other)]
        assert timeless[0] == pytest.approx(timeless[1], abs=1e-5)
    assert len(read_records(tmp_path / "cut")) == 5


def test_records_are_read_up_to_where_a_killed_run_was_writing(tmp_path):
    texts = ["one\u2028two", "na\u00efve"]
    records = [Record(str(n), 2, None, 9, {"full": text}, {"full": {"nll": 0.5}}) for n, text in enumerate(texts)]
    lines = [json.dumps(asdict(record), ensure_ascii=False).encode() for record in records]
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert read_records(tmp_path) == records
    inside_a_character = lines[1].index("\u00ef".encode()) + 1
    path.write_bytes(lines[0] + b"\n" + lines[1][:inside_a_character])
    assert read_records(tmp_path) == records[:1]
    path.write_bytes(lines[1][:inside_a_character] + b"\n" + lines[0] + b"\n")
    with pytest.raises(ConfigError, match="line 1 is no record"):
        read_records(tmp_path)
    path.write_bytes(b"")
    assert read_records(tmp_path) == []


def test_a_run_killed_at_any_write_can_be_started_again(tmp_path, monkeypatch):
    want = [record.answers for record in measure(engine_of(), EXAMPLES[:2], CONFIG, tmp_path / "whole")]
    write_whole = measure_module.write_whole
    for num_writes in range(3):
        folder = tmp_path / f"killed-{num_writes}"
        left = iter(range(num_writes))

        def killed(path, lines, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            write_whole(path, lines)

        with monkeypatch.context() as patch:
            patch.setattr(measure_module, "write_whole", killed)
            for _ in range(2):
                with contextlib.suppress(KeyboardInterrupt):
                    measure(engine_of(), EXAMPLES[:2], CONFIG, folder)
        assert [record.answers for record in measure(engine_of(), EXAMPLES[:2], CONFIG, folder)] == want


def test_another_run_does_not_mix_into_a_folder(tmp_path):
    measure(engine_of(), EXAMPLES[:1], CONFIG, tmp_path)
    with pytest.raises(ConfigError, match="differs in examples"):
        measure(engine_of(), EXAMPLES[:2], CONFIG, tmp_path)
    with pytest.raises(ConfigError, match="differs in max_tokens"):
        measure(engine_of(), EXAMPLES[:1], replace(CONFIG, max_tokens=5), tmp_path)
    with pytest.raises(ConfigError, match="not unique"):
        measure(engine_of(), [EXAMPLES[0], EXAMPLES[0]], CONFIG, tmp_path / "twice")


def test_the_summary_says_what_the_records_say(tmp_path):
    records = measure(engine_of(), EXAMPLES, CONFIG, tmp_path)
    summary = summarize(records)
    values = [r.metrics["isolated"]["kl"] for r in records]
    assert summary["options"]["isolated"]["kl"]["value"] == interval(values).to_dict()
    differences = [r.metrics["isolated"]["gold_nll"] - r.metrics["full"]["gold_nll"] for r in records[:4]]
    found = summary["options"]["isolated"]["gold_nll"]["difference"]
    assert found["mean"] == pytest.approx(sum(differences) / 4)
    assert found["num_questions"] == 4  # the question without gold answers does not count
    assert list(summary["by_num_documents"]) == ["1", "2", "3"]
    assert {k: v["num_questions"] for k, v in summary["by_gold_position"].items()} == {"first": 2, "middle": 1}
    loss = loss_of(records[:4], "isolated", "mine")
    assert loss.answers == "gold_nll"
    assert loss.loss == pytest.approx(sum(differences) / 4)
    assert loss_of(records, "isolated", "mine").answers == "nll"
    assert summary_table(summary, "title").row_count == 10
    assert group_table(summary, "by_num_documents").row_count == 9
    assert group_table(summarize(records[:1]), "by_num_documents") is None
    json.dumps(summary)


def test_two_models_are_compared_question_by_question(tmp_path):
    records = measure(engine_of(), EXAMPLES[:4], CONFIG, tmp_path / "one")
    other = make_engine(loaded_tiny(num_hidden_layers=2, seed=1), block_size=8)
    others = measure(other, EXAMPLES[:4], CONFIG, tmp_path / "two")
    found = summarize_against(records, others)["options"]["after_preamble"]
    want = [
        a.metrics["after_preamble"]["gold_nll"] - b.metrics["full"]["gold_nll"]
        for a, b in zip(records, others, strict=True)
    ]
    assert found["gold_nll"]["difference"]["mean"] == pytest.approx(sum(want) / 4)
    assert "kl" not in found
    assert "nll" not in found
    alike = [float(a.answers["after_preamble"] == b.answers["full"]) for a, b in zip(records, others, strict=True)]
    assert found["agreement"]["value"]["mean"] == pytest.approx(sum(alike) / 4)
    with_itself = summarize_against(records, records)["options"]
    assert with_itself["full"]["overlap"]["value"]["mean"] == with_itself["full"]["agreement"]["value"]["mean"] == 1
    assert records[0].metrics["after_preamble"]["agreement"] in (0.0, 1.0)
    assert "overlap" not in records[0].metrics["after_preamble"]
    with pytest.raises(ConfigError, match="lacks 2 of 4"):
        summarize_against(records, others[:2])


def test_answers_are_likened_to_those_of_the_other_run():
    metrics = {"full": {"agreement": 1.0, "nll": 0.5}, "isolated": {"agreement": 0.0, "nll": 0.7}}
    texts = [("the green boat", "a red boat"), ("", ""), ("", "red")]
    ours = [Record(str(n), 2, None, 9, {"full": text, "isolated": ""}, metrics) for n, (text, _) in enumerate(texts)]
    theirs = [Record(str(n), 2, None, 9, {"full": text}, metrics) for n, (_, text) in enumerate(texts)]
    found = summarize_against(ours, theirs)["options"]
    assert found["full"]["agreement"]["value"]["mean"] == pytest.approx(1 / 3)
    assert found["full"]["overlap"]["value"]["mean"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert found["isolated"]["overlap"]["difference"]["mean"] == pytest.approx(-2 / 3)
    assert summary_table({"options": found}, "against").row_count == 2


def test_the_workflow_writes_report_plot_and_loss(tmp_path):
    engine = engine_of(num_blocks=2000)
    lines = "".join(json.dumps(example.to_dict()) + "\n" for example in EXAMPLES)
    (tmp_path / "mine.jsonl").write_text(lines)
    request = QualityRequest(
        data=(str(tmp_path / "mine.jsonl"),), output=tmp_path / "out", config=CONFIG, num_questions=3, progress=False
    )
    report = run_quality(engine, request)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == json.loads(json.dumps(report))
    assert report["sets"]["mine"]["num_questions"] == 3
    assert (tmp_path / "out" / "plot.png").stat().st_size > 5000
    kept = find_loss(engine.loaded.weights_id, engine.config)
    assert kept is not None
    assert kept.loss == report["loss"]["after_preamble"]["loss"]
    isolated = find_loss(engine.loaded.weights_id, engine.config.of(engine.config, encoding="isolated"))
    assert isolated is not None
    assert isolated.loss == report["loss"]["isolated"]["loss"]


def test_wrong_data_is_named_before_anything_runs(tmp_path):
    engine = engine_of()
    (tmp_path / "bare.jsonl").write_text('{"question": "who?"}\n')
    for data, message in [
        (("absent",), "neither a path"),
        ((str(tmp_path / "bare.jsonl"),), "--documents"),
        ((), "no data"),
    ]:
        with pytest.raises(ConfigError, match=message):
            run_quality(engine, QualityRequest(data=data, output=tmp_path / "out", progress=False))
    assert engine.stats.num_steps == 0


def test_questions_without_documents_find_them(tmp_path):
    engine = engine_of()
    folder = tmp_path / "notes"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    (tmp_path / "bare.jsonl").write_text('{"question": "who wrote in the log?", "answer": "the keeper"}\n')
    request = QualityRequest(
        data=(str(tmp_path / "bare.jsonl"),),
        output=tmp_path / "out",
        documents=(folder,),
        num_documents=(2,),
        config=CONFIG,
        with_plot=False,
        progress=False,
    )
    assert run_quality(engine, request)["sets"]["bare"]["num_questions"] == 1
    assert read_records(tmp_path / "out" / "bare")[0].num_documents == 2


class _Asks:
    """Makes an engine's answers come out as given texts: a random model writes no questions."""

    def __init__(self, monkeypatch, texts):
        from lazyattention.quality import questions

        run = questions.run_requests

        def answered(*args, **kwargs):
            outputs = run(*args, **kwargs)
            for output, text in zip(outputs, texts, strict=False):
                output.outputs[0].text = text
            return outputs

        monkeypatch.setattr(questions, "run_requests", answered)


def test_the_model_asks_about_each_passage_and_hides_it(monkeypatch):
    engine = engine_of(max_chunk_len=16)
    passages = passages_of([Document(" ".join(TEXTS), id="long"), Document("  "), Document(TEXTS[0])], engine)
    assert len(passages) == 3
    assert passages[0].document_id == "long#1"
    _Asks(monkeypatch, ["Question: What is it about?"] * len(passages) + ["nothing"])
    examples = write_questions(engine, passages, num_questions=len(passages) + 1, num_documents=(2, 3), seed=3)
    assert len(examples) == len(passages)
    assert {example.question for example in examples} == {"What is it about?"}
    golds = [example.documents[example.gold_documents[0]] for example in examples]
    assert sorted(d.document_id for d in golds) == sorted(d.document_id for d in passages)
    assert {len(example.documents) for example in examples} == {2, 3}
    assert all(len({d.document_id for d in e.documents}) == len(e.documents) for e in examples)
    _Asks(monkeypatch, ["nothing"] * 9)
    with pytest.raises(ConfigError, match="no usable question"):
        write_questions(engine, passages, num_questions=2, num_documents=2)
    with pytest.raises(ConfigError, match="no text"):
        write_questions(engine, [], num_questions=2, num_documents=2)


def test_distractors_may_be_what_a_retriever_would_bring(monkeypatch):
    engine = engine_of()
    names, things = ("ada", "bel", "cor", "dan"), ("lamp", "cape", "boat")
    passages = [Document(f"{name} has the {thing}", id=f"{name} {thing}") for name in names for thing in things]

    def written(distractors, num_documents, seed=0):
        _Asks(monkeypatch, [f"what has {name} beside a house?" for name in names for _ in things])
        more = {"num_documents": num_documents, "distractors": distractors, "seed": seed}
        examples = write_questions(engine, passages, num_questions=len(passages), **more)
        for example in examples:
            assert len({d.document_id for d in example.documents}) == len(example.documents) == num_documents
        golds = {example.documents[example.gold_documents[0]].document_id for example in examples}
        assert golds == {passage.document_id for passage in passages}
        return examples

    def num_alike(examples):
        found = []
        for example in examples:
            others = [d for place, d in enumerate(example.documents) if place not in example.gold_documents]
            found.append(sum(d.text.startswith(example.question.split()[2]) for d in others))
        return found

    similar = written("similar", 3)
    assert {*num_alike(similar), *num_alike(written("similar", 3, seed=1))} == {0, 1, 2}  # from none to all
    assert sum(num_alike(similar)) > 2 * sum(num_alike(written("random", 3)))
    assert {example.gold_documents for example in similar} == {(0,), (1,), (2,)}
    assert written("similar", 3) == similar
    written("similar", len(passages))  # all there are
    # Passages without a word of the question are no better than others: not the first ones every time.
    _Asks(monkeypatch, ["where is the old harbour of it?"] * len(passages))
    strange = write_questions(engine, passages, num_questions=len(passages), num_documents=3, distractors="similar")
    assert len({d.document_id for example in strange for d in example.documents}) == len(passages)
    shown = [d.document_id for e in strange for place, d in enumerate(e.documents) if place not in e.gold_documents]
    assert max(map(shown.count, shown)) <= 5, shown


def test_the_command_measures_and_the_gate_remembers(tmp_path):
    folder = save_tiny(tmp_path / "model", tiny_model(num_hidden_layers=2, max_position_embeddings=2048))
    arguments = ["quality", "--model", str(folder), "--data", "needle", "--num-documents", "2", "--num-documents", "3"]
    arguments += ["--num-questions", "2", "--max-tokens", "3", "--num-blocks", "400", "--no-compile", "--no-plot"]
    arguments += ["--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "needle-2" in result.output
    assert "needle-3" in result.output
    assert "loss of isolated" in result.output
    assert f"next, if that is too much: lazyattention adapt --model {folder} --data needle --output adapter --n" in (
        result.output
    )
    assert (
        f"next, to serve: lazyattention serve --model {folder} --num-blocks 400 --no-compile --max-loss"
        in result.output
    )
    again = CliRunner().invoke(app, [*arguments, "--against", str(tmp_path / "out"), "--json"])
    assert again.exit_code == 0, again.output
    report = json.loads(again.stdout)
    against = report["sets"]["needle-2"]["against"]["options"]["full"]["gold_nll"]
    assert against["difference"]["mean"] == 0
    wrong = CliRunner().invoke(app, [*arguments, "--option", "isolatd"])
    assert wrong.exit_code == 2
    ignored = CliRunner().invoke(app, [*arguments, "--max-loss", "0.1", "--reuse-method", "prefix"])
    assert ignored.exit_code == 2
    assert "--max-loss, --reuse-method has no effect here" in " ".join(ignored.output.split())
