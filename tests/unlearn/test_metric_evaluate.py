# SPDX-License-Identifier: Apache-2.0
"""evaluate(): every metric once, JSON in and out, resumed where it stopped, independent of the batch size."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qa_fixtures import qa_model, qa_tokenizer

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.data import QAExample, collate, encode_examples, generate_people
from lazyattention.unlearn.metrics import METRICS, EvalOptions, evaluate, quick_metrics
from lazyattention.unlearn.metrics import evaluate as evaluate_function
from lazyattention.unlearn.metrics.context import EvalContext
from lazyattention.unlearn.metrics.quick import evenly_spaced

TOKENIZER = qa_tokenizer(chat=True)
OPTIONS = EvalOptions(max_new_tokens=12)


def make_splits():
    splits = generate_people(8, 0, num_facts=3)
    world = [replace(e, paraphrased_answer=None, paraphrased_question=None) for e in splits["retain"][:4]]
    return {**splits, "retain": splits["retain"][:6], "real_authors": world[:2], "world_facts": world[2:]}


SPLITS = make_splits()


def run(model=None, **options):
    return evaluate(model or qa_model(), TOKENIZER, SPLITS, **{"options": OPTIONS, "progress": False, **options})


@pytest.fixture(scope="module")
def logs():
    return run()


def test_all_metrics_that_the_sets_allow(logs):
    assert set(logs["metrics"]) == set(METRICS) - {"lume", "forget_quality"}
    assert set(logs["skipped"]) == {"lume", "forget_quality"}
    assert "retrained_logs" in logs["skipped"]["forget_quality"]
    assert json.loads(json.dumps(logs, allow_nan=False)) == logs
    assert {"probability/holdout", "truth_ratio/forget", "model_utility", "mia_loss"} <= logs["summary"].keys()
    assert logs["metrics"]["probability"]["splits"]["forget"]["per_example"].keys() == {
        e.example_id for e in SPLITS["forget"]
    }


def test_model_utility_is_the_harmonic_mean_of_its_nine_parts(logs):
    found = logs["metrics"]["model_utility"]
    assert found["is_complete"]
    assert len(found["parts"]) == 9
    metrics = logs["metrics"]
    assert found["parts"]["retain/probability"] == metrics["probability"]["splits"]["retain"]["value"]
    assert (
        found["parts"]["world_facts/probability"]
        == metrics["probability"]["splits"]["world_facts"]["normalized"]["value"]
    )
    assert found["parts"]["real_authors/rouge_l"] == metrics["rouge_l"]["splits"]["real_authors"]["value"]
    assert found["parts"]["retain/truth_ratio"] == metrics["truth_ratio"]["splits"]["retain"]["preference_for_truth"]
    expected = 0.0 if 0 in found["parts"].values() else 9 / sum(1 / value for value in found["parts"].values())
    assert found["value"] == pytest.approx(expected)


def test_model_utility_says_what_is_missing():
    plain = {"retain": [QAExample("q", "a", example_id="1")]}
    found = evaluate(qa_model(), TOKENIZER, plain, metrics=["model_utility"], options=OPTIONS, progress=False)
    utility = found["metrics"]["model_utility"]
    assert not utility["is_complete"]
    assert set(utility["parts"]) == {"retain/probability", "retain/rouge_l"}
    assert len(utility["missing"]) == 7


def test_truth_ratio_uses_the_paraphrase_and_all_wrong_answers(logs):
    model = qa_model()

    def mean_nll(question, answer):
        item = encode_examples(TOKENIZER, [QAExample(question, answer)])
        with torch.no_grad():
            return float(model(**collate(item, 0)).loss)

    found = logs["metrics"]["truth_ratio"]["splits"]
    e = SPLITS["forget"][1]
    wrong = sum(mean_nll(e.question, answer) for answer in e.perturbed_answers) / len(e.perturbed_answers)
    expected = torch.tensor(mean_nll(e.question, e.paraphrased_answer) - wrong).exp()
    assert found["forget"]["ratios"][e.example_id] == pytest.approx(float(expected), rel=1e-4)
    # Without a paraphrase the answer itself is compared.
    e = SPLITS["world_facts"][0]
    wrong = sum(mean_nll(e.question, answer) for answer in e.perturbed_answers) / len(e.perturbed_answers)
    expected = torch.tensor(mean_nll(e.question, e.answer) - wrong).exp()
    assert found["world_facts"]["ratios"][e.example_id] == pytest.approx(float(expected), rel=1e-4)
    assert found["forget"]["aggregate"] == "closeness_to_one"
    assert found["retain"]["aggregate"] == "preference_for_truth"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batch_size_does_not_change_a_result(logs, batch_size):
    found = run(batch_size=batch_size)["summary"]
    assert found.keys() == logs["summary"].keys()
    for name, value in logs["summary"].items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_each_pass_is_done_once(monkeypatch):
    passes = []
    original = EvalContext._pass

    def counted(self, name, total):
        passes.append(name)
        return original(self, name, total)

    monkeypatch.setattr(EvalContext, "_pass", counted)
    run()
    assert len(passes) == len(set(passes)) == 3 * len(SPLITS) + 1  # three scorings per set, one generation for all


def test_sets_answered_together_get_the_texts_they_get_alone():
    texts = [QAExample("", "one two three four", kind="completion", example_id="t")]
    splits = {**SPLITS, "texts": texts}
    together = EvalContext(qa_model(), TOKENIZER, splits, OPTIONS)
    together.generate(splits)
    alone = {name: EvalContext(qa_model(), TOKENIZER, splits, OPTIONS).texts(name) for name in splits}
    assert {name: together.texts(name) for name in splits} == alone
    assert len({tuple(found) for found in alone.values()}) == len(splits)
    limits = {name: 1 + place for place, name in enumerate(SPLITS)}
    limited = EvalContext(qa_model(), TOKENIZER, SPLITS, OPTIONS)
    limited.generate(SPLITS, limits)
    for name, limit in limits.items():
        few = EvalContext(qa_model(), TOKENIZER, SPLITS, replace(OPTIONS, max_new_tokens=limit))
        assert limited.texts(name) == few.texts(name)


def test_forget_quality_and_privleak_against_the_retrained_model(logs, tmp_path):
    path = tmp_path / "retrained.json"
    path.write_text(json.dumps(logs))
    same = run(metrics=["forget_quality", "privleak"], retrained_logs=path)
    assert same["summary"] == {"forget_quality": pytest.approx(1.0), "privleak": 0.0}
    assert same["metrics"]["forget_quality"]["statistic"] == 0.0
    assert same["metrics"]["privleak"]["reference"] == "retrained"
    other = run(qa_model(seed=5), metrics=["forget_quality", "privleak"], retrained_logs=logs)
    assert other["metrics"]["forget_quality"]["statistic"] > 0.0


def test_logs_that_do_not_fit_are_refused(logs):
    fewer = {**SPLITS, "forget": SPLITS["forget"][:2]}
    more = {"retrained_logs": logs, "options": OPTIONS, "progress": False}
    with pytest.raises(RequestError, match="needs retrained_logs of the same 'forget' examples"):
        evaluate(qa_model(), TOKENIZER, fewer, metrics=["forget_quality"], **more)
    other = {**SPLITS, "holdout": SPLITS["holdout"][:2]}
    with pytest.raises(RequestError, match="needs retrained_logs of the same 'holdout' examples"):
        evaluate(qa_model(), TOKENIZER, other, metrics=["privleak"], **more)
    without = {**logs, "metrics": {}}
    with pytest.raises(RequestError, match="needs 'truth_ratio' in retrained_logs"):
        run(metrics=["forget_quality"], retrained_logs=without)
    with pytest.raises(RequestError, match="needs 'mia_min_k' in retrained_logs"):
        run(metrics=["privleak"], retrained_logs=without)
    with pytest.raises(RequestError, match=r"made with min_k_fraction=0.2, they have 0.4"):
        run(metrics=["privleak"], retrained_logs=logs, options=EvalOptions(min_k_fraction=0.2))
    with pytest.raises(RequestError, match=r"made with resolved_template='plain', they have 'chat'"):
        run(metrics=["forget_quality"], retrained_logs=logs, options=EvalOptions(template="plain"))


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch, logs):
    path = tmp_path / "deep" / "result.json"

    def interrupt(context):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(METRICS, "_items", {**METRICS._items, "rouge_l": replace(METRICS["rouge_l"], compute=interrupt)})
        with pytest.raises(KeyboardInterrupt):
            run(metrics=["probability", "perplexity", "rouge_l", "mia_loss"], resume_path=path)
    kept = json.loads(path.read_text())
    assert set(kept["metrics"]) == {"probability", "perplexity"}
    with monkeypatch.context() as patch:
        refuse = {name: replace(METRICS[name], compute=interrupt) for name in ("probability", "perplexity")}
        patch.setattr(METRICS, "_items", {**METRICS._items, **refuse})
        found = run(metrics=["probability", "perplexity", "rouge_l", "mia_loss"], resume_path=path)
    assert list(found["metrics"]) == ["probability", "perplexity", "rouge_l", "mia_loss"]
    assert found["summary"]["mia_loss"] == logs["summary"]["mia_loss"]
    assert json.loads(path.read_text()) == found
    assert not list(path.parent.glob("*.part"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": qa_model(seed=1)}, r"digests\['weights'\]"),
        ({"options": EvalOptions(max_new_tokens=11)}, r"settings\['max_new_tokens'\]"),
        ({"splits": {**SPLITS, "forget": SPLITS["forget"][:1]}}, r"digests\['split/forget'\]"),
    ],
)
def test_a_result_file_of_something_else_is_refused(tmp_path, change, message):
    path = tmp_path / "result.json"
    arguments = {"model": qa_model(), "splits": SPLITS, "options": OPTIONS}
    more = {"metrics": ["perplexity"], "resume_path": path, "progress": False}

    def call(model, splits, options):
        return evaluate_function(model, TOKENIZER, splits, options=options, **more)

    call(**arguments)
    call(**arguments)
    with pytest.raises(RequestError, match=message):
        call(**{**arguments, **change})


def test_a_file_that_is_no_result_is_refused(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("{}")
    with pytest.raises(RequestError, match="is not a result file"):
        run(metrics=["perplexity"], resume_path=path)
    path.write_text("{")
    with pytest.raises(RequestError, match="is not valid JSON"):
        run(metrics=["perplexity"], resume_path=path)


def test_mistakes_in_arguments_are_named():
    with pytest.raises(ConfigError, match="unknown metric 'perplexty'; did you mean 'perplexity'"):
        run(metrics=["perplexty"])
    with pytest.raises(RequestError, match="metric 'forget_quality' cannot be computed: it needs retrained_logs"):
        run(metrics=["forget_quality"])
    with pytest.raises(RequestError, match="it needs the split 'holdout'; given are forget"):
        evaluate(qa_model(), TOKENIZER, {"forget": SPLITS["forget"]}, metrics=["mia_loss"], progress=False)
    with pytest.raises(RequestError, match="splits is empty"):
        evaluate(qa_model(), TOKENIZER, {})
    with pytest.raises(RequestError, match="split 'forget' holds no example"):
        evaluate(qa_model(), TOKENIZER, {"forget": []})
    with pytest.raises(ConfigError, match="min_k_fraction must be above 0"):
        EvalOptions(min_k_fraction=0)
    with pytest.raises(ConfigError, match="mmlu_accuracy must lie between 0 and 1"):
        EvalOptions(mmlu_accuracy=37.1)


def test_examples_without_ids_keep_apart():
    nameless = [replace(e, example_id="") for e in SPLITS["forget"]]
    found = evaluate(qa_model(), TOKENIZER, {"forget": nameless}, metrics=["probability"], progress=False)
    assert list(found["metrics"]["probability"]["splits"]["forget"]["per_example"]) == ["#0", "#1", "#2"]


def test_training_goes_on_undisturbed_by_quick_metrics():
    def trained(with_quick):
        torch.manual_seed(0)
        model = qa_model(scale=1.0, attention_dropout=0.3).train()
        model.gradient_checkpointing_enable()
        batch = collate(encode_examples(TOKENIZER, SPLITS["forget"]), 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        for _ in range(3):
            if with_quick:
                quick_metrics(model, TOKENIZER, SPLITS["forget"], SPLITS["retain"])
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    first, second = trained(False), trained(True)
    assert second.training
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_quick_metrics_agree_with_evaluate(logs):
    found = quick_metrics(qa_model(), TOKENIZER, SPLITS["forget"], SPLITS["retain"])
    for split in ("forget", "retain"):
        assert found[split]["extraction_strength"] == logs["summary"][f"extraction_strength/{split}"]
        assert found[split]["exact_memorization"] == logs["summary"][f"exact_memorization/{split}"]
        assert found[split]["answer_probability"] == pytest.approx(logs["summary"][f"probability/{split}"])
        assert found[split]["num_examples"] == len(SPLITS[split])
    assert found["forget"]["mean_nll"] == pytest.approx(torch.tensor(logs["summary"]["perplexity/forget"]).log().item())


def test_quick_metrics_take_evenly_spaced_examples_and_may_skip_texts():
    found = quick_metrics(qa_model(), TOKENIZER, SPLITS["forget"], [], max_examples=2, with_rouge=False)
    assert set(found) == {"forget"}
    assert found["forget"]["num_examples"] == 2
    assert "rouge_l" not in found["forget"]
    with pytest.raises(ConfigError, match="max_examples must be at least 1, got 0"):
        quick_metrics(qa_model(), TOKENIZER, SPLITS["forget"], [], max_examples=0)


@given(st.integers(1, 60), st.integers(1, 70))
def test_examples_are_spread_over_the_whole_list(total, count):
    examples = [QAExample("q", "a", example_id=str(i)) for i in range(total)]
    places = [int(e.example_id) for e in evenly_spaced(examples, count)]
    assert len(set(places)) == len(places) == min(total, count)
    assert places == sorted(places)
    gaps = [b - a for a, b in zip(places, [*places[1:], total], strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_a_model_that_memorised_scores_one():
    model = qa_model(scale=1.0)
    batch = collate(encode_examples(TOKENIZER, SPLITS["forget"]), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = quick_metrics(model, TOKENIZER, SPLITS["forget"], SPLITS["retain"])
    assert found["forget"]["extraction_strength"] == 1.0
    assert found["forget"]["exact_memorization"] == 1.0
    assert found["forget"]["rouge_l"] == 1.0
    assert found["forget"]["answer_probability"] > 0.9
    assert found["retain"]["extraction_strength"] < 0.6


def test_every_metric_says_how_to_read_it():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert all((metric.unit, metric.value_range, metric.direction, metric.source))
