# SPDX-License-Identifier: Apache-2.0
"""Adapting: the student learns the teacher, runs stop and go on as they should, and the adapter serves in the engine."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fixtures.tiny_engine import make_engine, prompt
from fixtures.tiny_models import save_tiny, tiny_model
from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention.adapt import workflow
from lazyattention.adapt.config import AdaptConfig
from lazyattention.adapt.objectives import OBJECTIVES, distill_loss, labels_loss
from lazyattention.adapt.rows import TrainingRow, make_batch
from lazyattention.adapt.samples import Sample, plain_samples, taught_example
from lazyattention.adapt.trainer import Trainer, cut_by_tokens, split_samples
from lazyattention.adapt.workflow import AdaptRequest, prepare_samples, run_adapt
from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.documents.document import Document
from lazyattention.engine.scoring import generate, score
from lazyattention.errors import ConfigError, LazyAttentionError, UnsupportedError
from lazyattention.models.loaded_model import wrap_model
from lazyattention.models.loader import load_model
from lazyattention.quality.examples import QualityExample, read_examples
from lazyattention.reuse import Chunking, SpanUse

ISOLATED = Chunking(ChunkOptions(encoding="isolated"))
SMALL = AdaptConfig(rank=8, alpha=16, learning_rate=3e-3, batch_size=4, max_steps=6, eval_steps=3, held_out=2)
MODEL = {"num_hidden_layers": 2, "max_position_embeddings": 4096, "hidden_size": 32, "intermediate_size": 48}


def load_tiny(**more):
    return wrap_model(tiny_model(**MODEL, **more), tiny_tokenizer(), name="tiny")


def request_of(folder, config=SMALL, **more):
    data = folder.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(example) + "\n" for example in short_examples()))
    options = {"data": (str(data),), "num_questions": 12, "max_tokens": 4, "progress": False}
    return AdaptRequest(output=folder, config=config, system="Answer.", **{**options, **more})


def short_examples():
    """Questions over two or three short documents: 40 to 60 tokens."""
    names = [first + second for first in "abcdef" for second in ("lo", "mi", "ra", "tu")]
    for index, name in enumerate(names):
        others = [names[(index + step) % len(names)] for step in range(1, 2 + index % 2)]
        documents = [f"{other} is the keeper" for other in [*others, name]]
        yield {"question": f"who is {name}?", "documents": documents, "answers": ["the keeper"]}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A tiny model on disk and an adapter trained for it."""
    folder = save_tiny(tmp_path_factory.mktemp("model"), tiny_model(**MODEL))
    output = tmp_path_factory.mktemp("adapter")
    config = replace(SMALL, max_steps=40, eval_steps=10, full_share=0.2, held_out=4)
    log = run_adapt(load_model(str(folder), progress=False), request_of(output, config, num_questions=24))
    return folder, output, log


def test_the_student_comes_nearer_to_the_teacher(adapted):
    _, output, log = adapted
    first, best = log.evaluations[0], min(log.evaluations, key=lambda e: e["chunk"])
    assert first["full"] == pytest.approx(0, abs=1e-6)  # a new adapter changes nothing
    assert first["chunk"] > 1e-3
    assert best["chunk"] < 0.8 * first["chunk"]
    assert log.best_step == best["step"]
    report = json.loads((output / "adapt.json").read_text())
    assert report["num_steps"] == 40
    assert report["stopped"] == "max_steps"
    assert report["config"]["rank"] == 8
    assert 0 <= report["attention_check_kl"] < 1e-5


def test_the_adapter_serves_and_is_nearer_in_the_engine_itself(adapted, caplog):
    folder, output, log = adapted
    plain = load_model(str(folder), progress=False)
    with_adapter = load_model(str(folder), adapter=str(output), progress=False)
    assert plain.weights_id != with_adapter.weights_id
    make_engine(with_adapter, encoding="isolated")
    assert "made for encoding=after_preamble" in caplog.text
    caplog.clear()
    stock, tuned = make_engine(plain, num_blocks=600), make_engine(with_adapter, num_blocks=600)
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    (output / "again.jsonl").write_text("".join(json.dumps(s["example"]) + "\n" for s in samples))
    examples = read_examples(output / "again.jsonl")
    layouts = [workflow_layout(stock, example) for example in examples]
    # The teacher's answers were kept as full attention gives them.
    full = generate(stock, layouts, max_tokens=4, reuse_method="full_recompute")
    assert [list(one.token_ids) for one in full] == [sample["answer"] for sample in samples]

    def distance(engine):
        scored = score(engine, layouts, [one.token_ids for one in full])
        parts = [
            (f.logprobs.exp() * (f.logprobs - s.logprobs)).sum(1).mean() for f, s in zip(full, scored, strict=True)
        ]
        return float(sum(parts) / len(parts))

    assert distance(tuned) < 0.8 * distance(stock)
    assert "made for" not in caplog.text


def workflow_layout(engine, example):
    from lazyattention.quality.measure import layout_of

    return layout_of(engine, example, "Answer.")


def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(tmp_path):
    whole = run_adapt(load_tiny(), request_of(tmp_path / "whole"))

    class Stop(Exception):
        pass

    save = Trainer._save

    def save_and_stop(self):
        save(self)
        if self.log.num_steps == 3:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save", save_and_stop)
        with pytest.raises(Stop):
            run_adapt(load_tiny(), request_of(tmp_path / "stopped"))
    resumed = run_adapt(load_tiny(), request_of(tmp_path / "stopped"))
    assert resumed.num_steps == 6
    assert resumed.losses == pytest.approx(whole.losses, abs=1e-5)
    for one, other in zip(resumed.evaluations, whole.evaluations, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    with pytest.raises(ConfigError, match="differs in rank\\)"):
        run_adapt(load_tiny(), request_of(tmp_path / "stopped", replace(SMALL, rank=4)))
    longer = run_adapt(load_tiny(), request_of(tmp_path / "stopped", replace(SMALL, max_steps=9)))
    assert longer.num_steps == 9


def sample(lengths, answer):
    return Sample(prompt(lengths), prompt(lengths), answer)


def trainer_of(tmp_path, config=SMALL, loaded=None, num_samples=8, **more):
    from peft import LoraConfig, get_peft_model

    from lazyattention.adapt.attention import TRAINING_ATTENTION_NAME

    loaded = loaded or load_tiny()
    loaded.model.set_attn_implementation(TRAINING_ATTENTION_NAME)
    torch.manual_seed(0)
    model = get_peft_model(loaded.model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    samples = [sample(f"p7 d{9 + n} d12 t{4 + n}", (5, 6 + n)) for n in range(num_samples)]
    return Trainer(model, loaded.rotaries, samples, config, tmp_path, **more)


def test_the_teacher_reads_what_the_question_is_about(tmp_path):
    """With gold documents named, answers and targets are those over these documents alone."""
    names = ["alo", "bmi", "cra", "dtu", "elo", "fmi"]
    data = tmp_path / "gold.jsonl"
    lines = []
    for index, name in enumerate(names):
        documents = [f"{other} is the keeper" for other in names]
        gold = [5 - index, index, index] if index % 2 else [index]
        lines.append({"question": f"who is {name}?", "documents": documents, "gold_documents": gold})
    lines[-1]["gold_documents"] = []  # not known: the teacher reads all
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    request = request_of(tmp_path / "out", data=(str(data),), config=replace(SMALL, full_share=0.0))
    engine = make_engine(load_tiny(), num_blocks=600)
    samples = prepare_samples(engine, request)
    examples = {example.question: example for example in read_examples(data)}
    shown = [tuple(sorted({*examples[f"who is {name}?"].gold_documents})) for name in names]
    alone = [
        replace(examples[f"who is {name}?"], documents=tuple(examples[f"who is {name}?"].documents[p] for p in gold))
        if gold
        else examples[f"who is {name}?"]
        for name, gold in zip(names, shown, strict=True)
    ]
    layouts = [workflow_layout(engine, replace(example, gold_documents=())) for example in alone]
    assert [list(sample.teacher_layout.token_ids) for sample in samples] == [list(one.token_ids) for one in layouts]
    wholes = [workflow_layout(engine, examples[f"who is {name}?"]) for name in names]
    assert [list(sample.layout.token_ids) for sample in samples] == [list(one.token_ids) for one in wholes]
    answers = generate(engine, layouts, max_tokens=4, reuse_method="full_recompute")
    assert [tuple(one.token_ids) for one in answers] == [sample.answer for sample in samples]
    assert prepare_samples(engine, request) == samples  # read again
    with pytest.raises(ConfigError, match="teacher_documents"):
        prepare_samples(engine, replace(request, config=replace(SMALL, teacher_documents="all")))

    alike = prepare_samples(
        engine, replace(request, output=tmp_path / "all", config=replace(SMALL, teacher_documents="all"))
    )
    assert [sample.teacher_layout for sample in alike] == [sample.layout for sample in alike] == wholes
    answers = generate(engine, wholes, max_tokens=4, reuse_method="full_recompute")
    assert [tuple(one.token_ids) for one in answers] == [sample.answer for sample in alike]

    def kl(teacher_layouts, method):
        taught = score(engine, teacher_layouts, [one.answer for one in samples], reuse_method="full_recompute")
        student = score(engine, wholes, [one.answer for one in samples], reuse_method=method)
        pairs = zip(taught, student, strict=True)
        return sum(float((t.logprobs.exp() * (t.logprobs - s.logprobs)).sum(1).mean()) for t, s in pairs) / len(samples)

    trainer = trainer_of(tmp_path)
    trainer.held_out = samples
    for method in ("rotate_query", "full_recompute"):
        assert trainer.held_out_loss(method) == pytest.approx(kl(layouts, method), rel=1e-3)
        assert trainer.held_out_loss(method) != pytest.approx(kl(wholes, method), rel=1e-2)
    keeping = trainer_of(tmp_path, replace(SMALL, keep_full=True))
    keeping.held_out = samples
    assert keeping.held_out_loss("rotate_query") == pytest.approx(kl(layouts, "rotate_query"), rel=1e-3)
    assert keeping.held_out_loss("full_recompute") == pytest.approx(0, abs=1e-6)  # nothing was learnt yet


def test_a_teacher_is_not_left_without_text():
    documents = (Document("  "), Document("a"), Document("b"))
    known = QualityExample("1", "who?", documents, gold_documents=(2, 0))
    assert taught_example(known, "gold").documents == (documents[2],)
    nothing = replace(known, gold_documents=(0,))
    assert taught_example(nothing, "gold") == nothing


def test_documents_are_plain_text_too(tmp_path):
    prompts = [prompt("p7 d40 d12 t4"), prompt("p7 d300 t5"), prompt("p7 d40 d90 t4"), prompt("p30 d24 t40")]
    samples = [Sample(layout, layout, (5, 6)) for layout in prompts]
    found = plain_samples(samples, (3,), seed=0)
    texts = {span.token_ids for layout in prompts for span in layout.spans if span.is_document}
    long = {text for text in texts if len(text) >= 24}
    wholes = {(*plain.layout.token_ids[1:], *plain.answer) for plain in found}
    assert wholes == {text[:160] for text in long}
    assert len(found) == len(wholes)  # the same document in two prompts is one
    for plain in found:
        assert plain.layout.token_ids[0] == 3
        assert plain.teacher_layout == plain.layout
        assert len(plain.layout.token_ids) > len(plain.answer) >= 8
    assert plain_samples(samples, (3,), seed=0) == found != plain_samples(samples, (3,), seed=1)

    def trainer(num_texts=12, **more):
        config = replace(SMALL, batch_size=4, held_out=2, max_steps=30, eval_steps=30, learning_rate=1e-2, **more)
        plain = [sample(f"p{30 + n % num_texts}", (7, 8, 9 + n % num_texts)) for n in range(12)]
        return trainer_of(tmp_path / str(len(made)), config, num_samples=10, plain=plain)

    made = []
    few = trainer(plain_share=0.375)
    rows = [few._plain_rows_of_step(step) for step in range(12)]
    assert [len(one) for one in rows[:4]] == [1, 2, 1, 2]
    assert len({row.answer for row in [row for one in rows for row in one][:9]}) == 9  # each once
    assert not {row.answer for one in rows for row in one} & {sample.answer for sample in few.plain_held_out}
    without_teacher = trainer(objective="labels")
    assert not without_teacher._plain_rows_of_step(3)
    without_teacher._evaluate()
    assert set(without_teacher.log.evaluations[0]) == {"step", "chunk", "full"}
    large = trainer_of(tmp_path, replace(SMALL, batch_size=100, plain_share=0.5), num_samples=10, plain=few.plain)
    assert (len(large._rows_of_step(0)), len(large._plain_rows_of_step(0))) == (8, 4)
    many = trainer_of(tmp_path, num_samples=10, plain=[sample("p30", (7, n)) for n in range(136)])
    assert (len(many.plain_held_out), len(many.plain)) == (32, 104)
    drifts = []
    for share in (0.0, 1.0):
        (tmp_path / str(len(made))).mkdir()
        log = trainer(num_texts=1, plain_share=share).train()
        made.append(log)
        assert log.num_prompts == 120
        assert log.evaluations[0]["plain"] == pytest.approx(0, abs=1e-6)
        drifts.append(log.evaluations[-1]["plain"])
    assert 0 < drifts[1] < 0.6 * drifts[0], drifts
    # At first plain text costs nothing; it counts as much as a prompt.
    assert made[1].losses[0] == pytest.approx(made[0].losses[0] / 2, rel=1e-3)


def test_plain_text_begins_as_any_text_does(tmp_path, monkeypatch):
    seen = []

    class Noting(Trainer):
        def __init__(self, model, rotaries, samples, *args, plain, **more):
            seen.append((samples, plain))
            super().__init__(model, rotaries, samples, *args, plain=plain, **more)

    monkeypatch.setattr(workflow, "Trainer", Noting)
    run_adapt(
        load_tiny(), request_of(tmp_path, replace(SMALL, max_steps=1, seed=1), data=("needle",), num_documents=(2, 2))
    )
    ((samples, plain),) = seen
    assert plain == plain_samples(samples, (tiny_tokenizer().bos_token_id,), seed=1)
    assert plain


def test_steps_that_are_not_finite_are_skipped_and_counted(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    losses = Trainer._losses
    calls = []

    def sometimes_nan(self, rows, **more):
        calls.append(more["question_weight"])
        found = losses(self, rows, **more)
        is_training = more["question_weight"] > 0
        return found * float("nan") if is_training and self.log.num_steps == 1 else found

    monkeypatch.setattr(Trainer, "_losses", sometimes_nan)
    log = trainer.train()
    assert log.num_skipped == 1
    assert log.num_steps == 6
    assert math.isnan(log.losses[1])
    assert all(bool(param.isfinite().all()) for param in trainer.params)
    monkeypatch.setattr(Trainer, "_losses", lambda self, rows, **more: losses(self, rows, **more) * float("nan"))
    with pytest.raises(LazyAttentionError, match="not finite"):
        trainer_of(tmp_path / "absent", replace(SMALL, max_steps=50, eval_steps=50)).train()


def test_training_stops_when_it_no_longer_helps_and_keeps_the_best(tmp_path, monkeypatch):
    found = iter([3.0, 2.0, 1.0, 1.5, 1.2, 0.5])
    monkeypatch.setattr(Trainer, "held_out_loss", lambda self, method: next(found) if method == "rotate_query" else 0.0)
    trainer = trainer_of(tmp_path, replace(SMALL, max_steps=100, eval_steps=1, patience=2))
    seen = {}
    log = trainer.train(lambda log: seen.setdefault(log.num_steps, [p.detach().clone() for p in trainer.params]))
    assert log.num_steps == 4
    assert log.best_step == 2
    assert "no improvement" in log.stopped
    for param, best in zip(trainer.params, seen[2], strict=True):
        assert torch.equal(param, best)
    assert not torch.equal(trainer.params[1], seen[4][1])


def test_time_ends_training(tmp_path):
    log = trainer_of(tmp_path, replace(SMALL, max_steps=10_000, max_minutes=1e-4, eval_steps=1000)).train()
    assert log.stopped == "max_minutes"
    assert log.num_steps < 100


def test_checkpointed_layers_give_the_same_gradients_and_recompute(tmp_path):
    def gradients(is_checkpointed):
        loaded = load_tiny()
        trainer = trainer_of(tmp_path / "absent", loaded=loaded)
        if is_checkpointed:
            workflow._checkpoint_layers(loaded)
        layer = loaded.model.model.layers[0]
        calls = []
        layer.self_attn.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        rows = trainer._rows_of_step(0)
        loss = trainer._losses(rows, question_weight=0.1).sum()
        num_forward = len(calls)
        loss.backward()
        return [param.grad for param in trainer.params], len(calls) - num_forward

    plain, num_plain = gradients(is_checkpointed=False)
    again, num_again = gradients(is_checkpointed=True)
    assert (num_plain, num_again) == (0, 1)
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_how_prompts_are_cut_into_forward_passes_changes_neither_loss_nor_gradients(objective, tmp_path):
    """Answers of 1 and of 12 tokens: who shares a pass must not matter."""
    found = []
    for limit in (1, 10_000):
        config = replace(SMALL, objective=objective, micro_batch_tokens=limit, full_share=0.0)
        trainer = trainer_of(tmp_path / "absent", config)
        samples = [*trainer.training, *trainer.held_out]
        mixed = [replace(sample, answer=(7,) * (1, 12)[n % 2]) for n, sample in enumerate(samples)]
        trainer.training, trainer.held_out = mixed[:-2], mixed[-2:]
        gradients = []
        trainer.optimizer.step = lambda t=trainer, g=gradients: g.extend(param.grad.clone() for param in t.params)
        trainer._step()
        found.append((trainer.held_out_loss("rotate_query"), trainer.log.losses[0], gradients))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-4)
    assert any(bool(one.any()) for one in found[1][2])
    for one, other in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_every_prompt_is_seen_once_an_epoch_and_some_with_full_attention(tmp_path):
    trainer = trainer_of(tmp_path, replace(SMALL, batch_size=2, full_share=0.5, held_out=2), num_samples=42)
    rows = [row for step in range(20) for row in trainer._rows_of_step(step)]
    assert len({tuple(row.layout.token_ids) for row in rows}) == 40
    num_full = sum(all(planned.use is SpanUse.TEXT for planned in row.plan.spans) for row in rows)
    assert 8 < num_full < 32
    held = {tuple(sample.layout.token_ids) for sample in trainer.held_out}
    assert not held & {tuple(row.layout.token_ids) for row in rows}
    assert trainer._rows_of_step(3) == trainer._rows_of_step(3)
    assert {r.layout for s in range(20, 40) for r in trainer._rows_of_step(s)} == {r.layout for r in rows}


def test_a_prompt_given_twice_is_not_trained_on_when_held_out():
    samples = [sample(f"p7 d9 t{4 + n % 3}", (5,)) for n in range(12)]
    training, held_out = split_samples(samples, replace(SMALL, held_out=1))
    assert len(held_out) == 1
    assert len(training) == 8
    with pytest.raises(ConfigError, match="at least 4"):
        split_samples(samples[:3], SMALL)


def test_forward_passes_stay_within_their_tokens():
    rows = [TrainingRow.of(prompt(f"t{n}"), (1,), "rotate_query", ISOLATED) for n in (3, 4, 9, 30, 31, 2)]
    parts = cut_by_tokens(rows, 20)
    assert [row for part in parts for row in part] == rows
    assert [len(part) for part in parts] == [3, 1, 1, 1]


def test_the_objectives_are_what_they_say():
    rows = [
        TrainingRow.of(prompt("p3 d9 t5"), (7, 8), "rotate_query", ISOLATED),
        TrainingRow.of(prompt("t4"), (9,), "rotate_query", ISOLATED),
    ]
    batch = make_batch(rows, [])
    torch.manual_seed(1)
    student, teacher = torch.randn(2, len(batch.kept), 384).unbind(0)
    masks = [batch.answer_mask & (batch.kept_rows == row) for row in range(2)]
    answer = []
    for mask in masks:
        p, q = teacher[mask].softmax(-1), student[mask].softmax(-1)
        answer.append((p * (p / q).log()).sum(-1).mean())
    torch.testing.assert_close(distill_loss(student, teacher, batch, 0.0), torch.stack(answer))
    more = distill_loss(student, teacher, batch, 0.1)
    assert bool((more > torch.stack(answer)).all())
    assert float(distill_loss(teacher, teacher, batch, 0.1).abs().max()) < 1e-6
    nll = [
        -student[mask].log_softmax(-1)[range(len(a)), a].mean() for mask, a in zip(masks, ([7, 8], [9]), strict=True)
    ]
    torch.testing.assert_close(labels_loss(student, None, batch, 0.1), torch.stack(nll))
    with pytest.raises(ConfigError, match="did you mean 'labels'"):
        OBJECTIVES["label"]


def test_gold_answers_can_be_learnt(tmp_path):
    config = replace(SMALL, objective="labels", max_steps=30, eval_steps=10, full_share=0.0)
    log = run_adapt(load_tiny(), request_of(tmp_path, config))
    assert min(e["chunk"] for e in log.evaluations) < log.evaluations[0]["chunk"] - 0.1
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    tokenizer = tiny_tokenizer()
    for sample in samples:
        assert tokenizer.decode(sample["answer"], skip_special_tokens=True) == sample["example"]["answers"][0]
        assert sample["answer"][-1] == tokenizer.eos_token_id
    path = tmp_path / "bare.jsonl"
    path.write_text("".join(json.dumps({"question": f"who {n}?", "documents": ["a"]}) + "\n" for n in range(5)))
    with pytest.raises(ConfigError, match="no gold answer"):
        run_adapt(load_tiny(), request_of(tmp_path / "other", config, data=(str(path),)))


def test_a_16_bit_model_is_trained_with_a_float32_adapter(tmp_path):
    from safetensors.torch import load_file

    model = tiny_model(**MODEL).to(torch.bfloat16)
    loaded = wrap_model(model, tiny_tokenizer(), name="tiny")
    log = run_adapt(loaded, request_of(tmp_path / "a", replace(SMALL, max_steps=12, eval_steps=6)))
    assert log.num_skipped == 0
    assert min(e["chunk"] for e in log.evaluations) < 0.9 * log.evaluations[0]["chunk"]
    kept = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert model.model.layers[0].mlp.down_proj.base_layer.weight.dtype == torch.bfloat16


def test_a_model_trained_under_other_attention_is_refused(tmp_path, monkeypatch):
    import lazyattention.adapt.attention as attention_module

    monkeypatch.setattr(attention_module, "turn", lambda rows, *_: rows)
    with pytest.raises(UnsupportedError, match="differs from the one it is served with"):
        run_adapt(load_tiny(), request_of(tmp_path))


def test_recomputed_blocks_are_not_trained_for_and_said_so(tmp_path):
    with pytest.raises(ConfigError, match="first:16"):
        run_adapt(load_tiny(), request_of(tmp_path), EngineConfig.of(recompute="first:16"))
    assert not list(tmp_path.iterdir())


def test_the_isolated_encoding_is_trained_as_such(tmp_path, monkeypatch):
    seen = set()
    make = workflow.make_batch

    def note(rows, *args, **more):
        batch = make(rows, *args, **more)
        seen.add(batch.visibility.num_extra)
        return batch

    monkeypatch.setattr(workflow, "make_batch", note)
    monkeypatch.setattr("lazyattention.adapt.trainer.make_batch", note)
    run_adapt(load_tiny(), request_of(tmp_path, replace(SMALL, chunk=ChunkOptions(encoding="isolated"), max_steps=1)))
    assert seen == {0}
