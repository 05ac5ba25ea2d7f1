# SPDX-License-Identifier: Apache-2.0
"""Probes bring back what only seems forgotten, leave alone what was never known, and say what they did."""

import json
from dataclasses import replace

import pytest
import torch
from qa_fixtures import qa_model, qa_tokenizer

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.data import QAExample, collate, encode_examples, generate_people
from lazyattention.unlearn.metrics.generate import generate_texts
from lazyattention.unlearn.probes import PROBES, ProbeOptions, compare_probes, run_probes
from lazyattention.unlearn.probes.context import Measurement, worst_of
from lazyattention.unlearn.probes.prefix import PROMPTS

TOKENIZER = qa_tokenizer(chat=True)
SPLITS = generate_people(12, 0, num_facts=4, forget_fraction=0.2)
QUICK = ProbeOptions(max_examples=8, relearn_steps=(1, 3), relearn_learning_rate=1e-2, relearn_fraction=0.5)


def trained(examples, num_steps, model=None, learning_rate=1e-2):
    model = model or qa_model(scale=1.0)
    batch = collate(encode_examples(TOKENIZER, examples), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for _ in range(num_steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def weights():
    """Weights of a model that knows the forget set by heart."""
    return trained(SPLITS["forget"], 120).state_dict()


@pytest.fixture(scope="module")
def load_knowing(weights):
    def load():
        model = qa_model()
        model.load_state_dict(weights)
        return model

    return load


@pytest.fixture(scope="module")
def report():
    loads = []

    def load():
        loads.append(1)
        return qa_model()

    return {**run_probes(load, TOKENIZER, SPLITS, options=QUICK, progress=False), "num_loads": len(loads)}


def test_every_probe_has_before_after_and_change(report):
    assert set(report["probes"]) == set(PROBES) == {"paraphrase", "prefix", "quantize", "relearn"}
    for name, found in report["probes"].items():
        assert found["method"]
        for metric in ("extraction_strength", "exact_memorization", "answer_probability", "rouge_l"):
            before, after = found["before"]["forget"][metric], found["after"]["forget"][metric]
            assert 0 <= before <= 1
            assert found["change"]["forget"][metric] == pytest.approx(after - before)
        assert ("retain" in found["after"]) == (name in ("quantize", "relearn"))
        assert found["before"]["forget"]["stderr"]["answer_probability"] > 0
    assert report["skipped"] == {}
    # One for the two that only ask, one for each that changes weights.
    assert report["num_loads"] == 3
    json.dumps(report, allow_nan=False)


def test_the_same_seed_gives_the_same_result(report):
    again = run_probes(qa_model, TOKENIZER, SPLITS, options=QUICK, progress=False)
    assert again["probes"] == report["probes"]
    other = run_probes(qa_model, TOKENIZER, SPLITS, probes=["relearn"], options=QUICK, seed=1, progress=False)
    assert other["probes"]["relearn"]["attack_example_ids"] != report["probes"]["relearn"]["attack_example_ids"]


def test_all_that_a_model_is_asked_at_once_is_answered_in_one_pass(monkeypatch):
    """A pass takes as long as its longest answer, however many there are: on a GPU their number is the time."""
    prompts = []

    def counted(model, tokenizer, asked, **options):
        prompts.append(len(asked))
        return generate_texts(model, tokenizer, asked, **options)

    for module in ("metrics.context", "probes.prefix"):
        monkeypatch.setattr(f"lazyattention.unlearn.{module}.generate_texts", counted)
    num_forget, num_retain = len(SPLITS["forget"]), 8  # as many of retain as QUICK measures
    for probe, expected in {
        "paraphrase": [2 * num_forget],
        "prefix": [(len(PROMPTS) + 2) * num_forget, 2 * num_forget],
        "quantize": [num_forget + num_retain] * 2,
        "relearn": [num_forget // 2 + num_retain] * 3,
    }.items():
        prompts.clear()
        run_probes(qa_model, TOKENIZER, SPLITS, probes=[probe], options=QUICK, progress=False)
        assert prompts == expected, probe


def test_relearning_never_trains_on_what_it_measures(report):
    found = report["probes"]["relearn"]
    attacked = set(found["attack_example_ids"])
    assert len(attacked) == len(SPLITS["forget"]) // 2
    assert attacked < {e.example_id for e in SPLITS["forget"]}
    assert found["after"]["forget"]["num_examples"] == len(SPLITS["forget"]) - len(attacked)
    assert [point["step"] for point in found["trajectory"]] == [0, 1, 3]
    assert len(found["attack_losses"]) == 3
    assert found["trajectory"][0]["forget"] == found["before"]["forget"]
    assert found["trajectory"][-1]["forget"] == found["after"]["forget"]


def test_relearning_brings_back_what_is_merely_hidden(load_knowing):
    def load_hidden():
        # A short ascent hides the answers; the knowledge is still there.
        model = load_knowing()
        batch = collate(encode_examples(TOKENIZER, SPLITS["forget"]), 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, maximize=True)
        for _ in range(100):
            loss = model(**batch).loss
            if loss > 4:
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    options = replace(QUICK, relearn_steps=(5, 15), relearn_learning_rate=2e-3)

    def gain(load):
        found = run_probes(load, TOKENIZER, SPLITS, probes=["relearn"], options=options, progress=False)
        return found["probes"]["relearn"]["before"]["forget"], found["probes"]["relearn"]["after"]["forget"]

    hidden_before, hidden_after = gain(load_hidden)
    _, ignorant_after = gain(lambda: qa_model(scale=1.0))
    assert hidden_before["exact_memorization"] < 0.5
    assert hidden_after["exact_memorization"] > 0.8
    assert ignorant_after["exact_memorization"] < hidden_after["exact_memorization"] - 0.2


def test_relearning_from_the_retain_set():
    options = replace(QUICK, relearn_source="retain")
    found = run_probes(qa_model, TOKENIZER, SPLITS, probes=["relearn"], options=options, progress=False)
    assert set(found["probes"]["relearn"]["attack_example_ids"]) == {e.example_id for e in SPLITS["retain"]}
    with pytest.raises(RequestError, match="needs the split 'retain' for relearn_source='retain'"):
        run_probes(
            qa_model, TOKENIZER, {"forget": SPLITS["forget"]}, probes=["relearn"], options=options, progress=False
        )


def test_relearning_of_half_precision_weights_is_done_in_float32():
    found = run_probes(
        lambda: qa_model().bfloat16(), TOKENIZER, SPLITS, probes=["relearn"], options=QUICK, progress=False
    )
    assert "torch.float32" in found["probes"]["relearn"]["method"]
    kept = replace(QUICK, relearn_dtype="keep")
    found = run_probes(
        lambda: qa_model().bfloat16(), TOKENIZER, SPLITS, probes=["relearn"], options=kept, progress=False
    )
    assert "torch.bfloat16" in found["probes"]["relearn"]["method"]


def test_a_model_that_only_knows_the_question_word_for_word_is_seen_by_the_paraphrase_probe(load_knowing):
    found = run_probes(load_knowing, TOKENIZER, SPLITS, probes=["paraphrase"], options=QUICK, progress=False)
    paraphrase = found["probes"]["paraphrase"]
    assert paraphrase["before"]["forget"]["exact_memorization"] == 1.0
    assert paraphrase["change"]["forget"]["exact_memorization"] < 0
    assert paraphrase["worst"]["forget"]["exact_memorization"] == 1.0
    swapped = {
        "forget": [
            replace(e, question=e.paraphrased_question, paraphrased_question=e.question) for e in SPLITS["forget"]
        ]
    }
    found = run_probes(load_knowing, TOKENIZER, swapped, probes=["paraphrase"], options=QUICK, progress=False)
    assert found["probes"]["paraphrase"]["after"] == paraphrase["before"]


def test_prefix_probe_takes_the_worst_of_all_ways(report):
    found = report["probes"]["prefix"]
    assert set(found["prompts"]) == {*PROMPTS, "few_shot"}
    for metric in ("answer_probability", "exact_memorization"):
        best = max(item[metric] for item in found["prompts"].values())
        # The mean of the highest is at least the highest of the means.
        assert found["after"]["forget"][metric] >= max(best, found["before"]["forget"][metric]) - 1e-12
    assert run_probes(
        qa_model, TOKENIZER, {"forget": SPLITS["forget"]}, probes=["prefix"], options=QUICK, progress=False
    )["probes"]["prefix"]["prompts"].keys() == set(PROMPTS)


def test_the_start_of_the_answer_brings_back_its_rest(weights):
    # Answers only in mid-sentence: the question alone draws out nothing, the first tokens all of the rest.
    items = encode_examples(TOKENIZER, SPLITS["forget"])
    texts = [
        QAExample("", TOKENIZER.decode(item.answer_ids), kind="completion", example_id=item.example_id)
        for item in items
    ]
    model = trained(texts, 120)
    found = run_probes(lambda: model, TOKENIZER, SPLITS, probes=["prefix"], options=QUICK, progress=False)
    start = found["probes"]["prefix"]["answer_start"]
    assert start["fraction"] == 0.25
    assert start["before"]["rouge_l"] < start["after"]["rouge_l"]
    assert start["change"]["rouge_l"] == pytest.approx(start["after"]["rouge_l"] - start["before"]["rouge_l"])


def test_quantise_probe_names_method_and_size(report):
    found = report["probes"]["quantize"]
    model = qa_model()
    linear = sum(m.weight.numel() for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear))
    assert found["num_quantized"] == linear
    assert found["num_weights"] == sum(p.numel() for p in model.parameters())
    assert 0.02 < found["relative_error"] < 0.2
    assert found["method"].startswith("4-bit quantise and dequantise, round to nearest, asymmetric")


def test_rounding_undoes_an_update_smaller_than_a_step(load_knowing):
    def load_nudged():
        # Every weight moved by far less than a rounding step: in 4 bits most of it is gone.
        model = load_knowing()
        with torch.no_grad():
            for param in model.model.layers.parameters():
                param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)) * 1e-4)
        return model

    options = {"probes": ["quantize"], "options": replace(QUICK, quantize_bits=4), "progress": False}
    original = run_probes(load_knowing, TOKENIZER, SPLITS, **options)["probes"]["quantize"]
    nudged = run_probes(load_nudged, TOKENIZER, SPLITS, **options)["probes"]["quantize"]
    assert nudged["after"]["forget"]["mean_nll"] == pytest.approx(original["after"]["forget"]["mean_nll"], rel=0.2)


def test_worst_of_takes_the_highest_per_example():
    found = worst_of([Measurement({"a": [0.1, 0.9]}), Measurement({"a": [0.5, 0.2]})])
    assert found.per_example == {"a": [0.5, 0.9]}
    assert found.as_dict()["a"] == pytest.approx(0.7)
    assert found.as_dict()["stderr"]["a"] == pytest.approx(0.2)


def test_models_are_compared_side_by_side(report):
    rows = compare_probes({"original_model": report, "unlearned_model": report})
    row = next(r for r in rows if (r["probe"], r["split"], r["metric"]) == ("relearn", "forget", "rouge_l"))
    found = report["probes"]["relearn"]
    assert row["original_model"] == row["unlearned_model"]
    assert row["original_model"]["after"] == found["after"]["forget"]["rouge_l"]
    fewer = {**report, "probes": {"relearn": found}}
    rows = compare_probes({"original_model": report, "unlearned_model": fewer})
    assert any(r["probe"] == "prefix" and r["unlearned_model"] == {"before": None, "after": None} for r in rows)
    with pytest.raises(RequestError, match="probed with another seed than original_model: 1 and 0"):
        compare_probes({"original_model": report, "unlearned_model": {**report, "seed": 1}})
    with pytest.raises(RequestError, match="no report"):
        compare_probes({})


def test_mistakes_are_named():
    plain = {"forget": [QAExample("", f"text {i}", kind="completion", example_id=str(i)) for i in range(3)]}
    options = {"options": QUICK, "progress": False}
    with pytest.raises(ConfigError, match="unknown probe 'relearning'; did you mean 'relearn'"):
        run_probes(qa_model, TOKENIZER, SPLITS, probes=["relearning"])
    with pytest.raises(RequestError, match="need a non-empty split 'forget'; given are retain"):
        run_probes(qa_model, TOKENIZER, {"retain": SPLITS["retain"]})
    with pytest.raises(RequestError, match="probe 'paraphrase' cannot be run: it needs forget examples with"):
        run_probes(qa_model, TOKENIZER, plain, probes=["paraphrase"], **options)
    with pytest.raises(RequestError, match="at least 2 forget examples"):
        run_probes(qa_model, TOKENIZER, {"forget": plain["forget"][:1]}, probes=["relearn"], **options)
    skipped = run_probes(qa_model, TOKENIZER, plain, **options)
    assert set(skipped["skipped"]) == {"paraphrase", "prefix"}
    assert set(skipped["probes"]) == {"quantize", "relearn"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relearn_steps": (5, 5)}, "relearn_steps must be rising"),
        ({"relearn_steps": ()}, "relearn_steps must be rising"),
        ({"relearn_fraction": 1.0}, "relearn_fraction must lie between"),
        ({"relearn_source": "holdout"}, "relearn_source must be"),
        ({"quantize_bits": 1}, "quantize_bits must be 2 to 8"),
        ({"quantize_group_size": 1}, "quantize_group_size must be at least 2"),
        ({"answer_start_fraction": 0.0}, "answer_start_fraction must lie"),
        ({"max_examples": 0}, "max_examples and batch_size"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        ProbeOptions(**options)
