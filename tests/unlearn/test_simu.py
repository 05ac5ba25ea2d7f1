# SPDX-License-Identifier: Apache-2.0
"""The two steps together on tiny random models: what moves, what stays, resuming, guards, several processes."""

import copy
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memorizing_model import new_model, people, word_tokenizer

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.config import GuardConfig, NeuronConfig
from lazyattention.unlearn.guards import CollapseError, Guard
from lazyattention.unlearn.neuron_mask import select_neurons
from lazyattention.unlearn.objectives import IDK_ANSWERS, OBJECTIVES
from lazyattention.unlearn.presets import preset
from lazyattention.unlearn.simu import UnlearnSets, unlearn, with_idk_answers
from lazyattention.unlearn.snapshot import Snapshot
from lazyattention.unlearn.trainer import PairDataset, TrainingSets

SPLITS = people(num_people=8, num_facts=2, forget_fraction=0.25)
TOKENIZER = word_tokenizer(SPLITS)
SETS = UnlearnSets(forget=SPLITS["forget"], retain=SPLITS["retain"], holdout=SPLITS["holdout"])
QUICK = {
    "train.num_epochs": 4,
    "train.batch_size": 2,
    "train.template": "plain",
    "attribution.num_steps": 2,
    "optimizer.lr": 1e-3,
    "optimizer.weight_decay": 0.1,
    "guards.eval_every": 0,
    "guards.target": 1e6,
    "guards.max_utility_drop": 1e6,
}


def small_model():
    return new_model(TOKENIZER, hidden_size=48, intermediate_size=96, num_hidden_layers=2)


def run(method="simu", tmp_path=None, model=None, sets=SETS, resume_from=None, **options):
    overrides = QUICK | {name.replace("__", "."): value for name, value in options.items()}
    model = model if model is not None else small_model()
    before = copy.deepcopy(model.state_dict())
    result = unlearn(
        model,
        TOKENIZER,
        sets,
        preset(method, overrides=overrides),
        output_dir=Path(tmp_path or "unused"),
        resume_from=resume_from,
    )
    return before, result


@pytest.mark.parametrize(
    "method", ["simu", "simu+random", "simu+none", "simu+all", "simu-mlp", "simu+adamw", "simu-soul"]
)
def test_only_attention_and_selected_neurons_move(method):
    """Weight decay is on; after 8 steps every other weight has the same bits."""
    before, result = run(method)
    counts = result.mask.counts
    changed = 0
    for name, value in result.model.state_dict().items():
        differs = value != before[name]
        if name.endswith("down_proj.weight"):
            idx = int(name.split(".")[2])
            assert torch.equal(differs.any(dim=0), result.mask.layers[idx] & differs.any(dim=0))
        elif "self_attn" in name and method != "simu-mlp":
            assert differs.any()
        else:
            assert not differs.any(), name
        changed += int(differs.sum())
    assert changed == result.num_changed <= result.num_trainable
    if method == "simu+none":
        assert sum(counts) == 0
    if method == "simu+all":
        assert result.mask.share == 1.0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_with_gradient_checkpointing_trains(checkpointing):
    """Frozen embeddings and checkpointed layers: without input gradients nothing would be trained, silently."""
    before, result = run("simu-lora", train__gradient_checkpointing=checkpointing)
    loras = [p for n, p in result.model.named_parameters() if "lora_B" in n]
    assert len(loras) == 2 * 4
    assert all(p.abs().max() > 0 for p in loras)
    base = result.model.get_base_model().state_dict()
    for name, value in before.items():
        wrapped = name.replace("_proj.weight", "_proj.base_layer.weight") if "self_attn" in name else name
        if "down_proj" not in name:
            assert torch.equal(base[wrapped], value)


def test_checkpointing_does_not_change_the_result():
    results = [run(train__gradient_checkpointing=flag)[1] for flag in (False, True)]
    for a, b in zip(*(r.model.state_dict().values() for r in results), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains(name):
    _, result = run(objective__name=name, train__num_epochs=1)
    assert result.num_changed > 0
    assert all(math.isfinite(row["loss"]) for row in result.steps)
    kinds = {row["retain_loss"] is None for row in result.steps}
    assert kinds == {name == "ga"}


def test_the_reference_model_stays_the_original():
    """KL to the original is 0 at the first step and positive later; the reference did not move along."""
    _, result = run(objective__name="kl", train__gradient_accumulation_steps=1)
    losses = [row["retain_loss"] for row in result.steps]
    assert losses[0] == pytest.approx(0.0, abs=1e-6)
    assert losses[-1] > 1e-4


def test_accumulated_gradients_are_a_mean_not_a_sum():
    """Two micro-batches of 2 are one step of 4, up to the weight of examples of unequal length."""
    norms = [
        run(train__batch_size=size, train__gradient_accumulation_steps=count)[1].steps[count - 1]["grad_norm"]
        for size, count in ((4, 1), (2, 2))
    ]
    assert norms[1] == pytest.approx(norms[0], rel=0.2)


def test_bf16_weights_train_with_float32_state():
    before, result = run("simu", model=small_model().to(torch.bfloat16))
    assert result.num_changed > 0
    assert all(value.dtype == torch.bfloat16 for value in result.model.state_dict().values())
    frozen = [n for n in before if "mlp.up_proj" in n or "embed" in n]
    assert all(torch.equal(result.model.state_dict()[n], before[n]) for n in frozen)


def test_one_seed_gives_one_result_and_another_another():
    states = [run(train__seed=seed)[1] for seed in (3, 3, 4)]
    digests = [[t.clone() for t in r.model.state_dict().values()] for r in states]
    assert all(torch.equal(a, b) for a, b in zip(digests[0], digests[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(digests[0], digests[2], strict=True))
    assert states[0].mask.digest() == states[1].mask.digest()


@pytest.mark.parametrize("method", ["simu", pytest.param("simu-lora", marks=pytest.mark.slow), "graddiff"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(method, tmp_path):
    options = {"train__save_steps": 3, "optimizer__hessian_interval": 2, "objective__name": "npo"}
    _, whole = run(method, tmp_path=tmp_path / "whole", **options)
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    assert {p.name for p in checkpoint.iterdir()} >= {"trainable.safetensors", "optimizer.pt"}
    assert not (checkpoint / "model.safetensors").exists()
    _, resumed = run(method, tmp_path=tmp_path / "again", resume_from=str(checkpoint), **options)
    for a, b in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert resumed.num_changed == whole.num_changed
    assert resumed.guard.before == whole.guard.before


def test_each_epoch_shows_every_forget_example_once_beside_all_retain_examples_in_turn():
    sets = TrainingSets(list("abcd"), list("0123456"), 0)
    rows = list(PairDataset(sets, num_epochs=7, seed=1))
    for epoch in range(7):
        assert sorted(f for f, _ in rows[4 * epoch : 4 * epoch + 4]) == list("abcd")
    retain = [r for _, r in rows]
    assert all(sorted(retain[i : i + 7]) == list("0123456") for i in range(0, 28, 7))
    assert rows == list(PairDataset(sets, num_epochs=7, seed=1))
    assert rows != list(PairDataset(sets, num_epochs=7, seed=2))
    assert {r for _, r in PairDataset(TrainingSets(list("ab"), [], 0), 1, 0)} == {None}


def test_a_stopped_run_reports_its_target():
    _, result = run(guards__target=0.0, guards__eval_every=1)
    assert result.guard.stop_reason == "target reached"
    assert result.guard.after["step"] == 1


def test_the_utility_bound_takes_weights_back():
    """Random weights know nothing, so utility is forced down by hand: the second measurement passes the bound."""
    param = torch.nn.Parameter(torch.zeros(2))
    snapshot = Snapshot({"w": param}, {})
    values = iter([1.0, 0.98, 0.5])

    def measure():
        value = next(values)
        return {"forget": {"mean_nll": 1.0}, "retain": {"mean_nll": 1.0, "exact_memorization": value}}

    guard = Guard(GuardConfig(max_utility_drop=5.0), measure, snapshot)
    guard.start()
    with torch.no_grad():
        param.fill_(1.0)
    assert guard.check(1) is None
    with torch.no_grad():
        param.fill_(2.0)
    assert guard.check(2) == "utility bound"
    assert param.tolist() == [1.0, 1.0]
    assert guard.after["step"] == 1
    assert guard.num_changed() == 2


def test_a_not_finite_measurement_takes_weights_back():
    param = torch.nn.Parameter(torch.zeros(2))
    losses = iter([1.0, float("nan")])
    guard = Guard(GuardConfig(), lambda: {"forget": {"mean_nll": next(losses)}}, Snapshot({"w": param}, {}))
    guard.start()
    with torch.no_grad():
        param.fill_(1.0)
    assert guard.check(1) == "not finite"
    with pytest.raises(RequestError, match="changed no weight"):
        guard.num_changed()


def test_a_collapsed_model_is_refused():
    losses = iter([1.0, 2.5])

    def measure():
        return {"forget": {"mean_nll": 1.0}, "retain": {"mean_nll": next(losses), "exact_memorization": 1.0}}

    guard = Guard(GuardConfig(collapse_loss=1.0), measure, Snapshot({"w": torch.nn.Parameter(torch.zeros(1))}, {}))
    guard.start()
    guard.finish(5)
    with pytest.raises(CollapseError, match="1.50 nats"):
        guard.refuse_collapse()


def test_not_finite_gradients_end_the_run_and_move_nothing(monkeypatch):
    from lazyattention.unlearn import trainer

    original, calls = trainer.clip_gradients, []

    def poisoned(params, *args):
        calls.append(1)
        if len(calls) == 3:
            params[0].grad.fill_(float("nan"))
        return original(params, *args)

    monkeypatch.setattr(trainer, "clip_gradients", poisoned)
    _, result = run(guards__eval_every=1)
    assert result.guard.stop_reason == "not finite"
    assert result.guard.after["step"] == 2
    assert all(torch.isfinite(value).all() for value in result.model.state_dict().values())


def test_overlapping_sets_are_refused():
    with pytest.raises(RequestError, match="stand in the forget set and in the retain set"):
        UnlearnSets(forget=SPLITS["forget"], retain=[*SPLITS["retain"], SPLITS["forget"][0]])
    with pytest.raises(RequestError, match="forget set is empty"):
        UnlearnSets(forget=[])


def test_a_missing_retain_set_is_refused_before_training():
    with pytest.raises(RequestError, match="needs a retain set"):
        run(sets=UnlearnSets(forget=SPLITS["forget"]))
    with pytest.raises(RequestError, match="retain set"):
        run(sets=UnlearnSets(forget=SPLITS["forget"]), attribution__contrast=True)
    _, result = run("simu", sets=UnlearnSets(forget=SPLITS["forget"]), objective__name="ga")
    assert result.num_changed > 0


def test_idk_answers_replace_answers_only():
    replaced = with_idk_answers(SPLITS["forget"])
    assert [e.question for e in replaced] == [e.question for e in SPLITS["forget"]]
    assert len({e.answer for e in replaced}) > 1
    assert {e.answer for e in replaced} <= set(IDK_ANSWERS)
    assert [e.example_id for e in replaced] == [e.example_id for e in SPLITS["forget"]]


def test_dual_policies_need_and_report_the_retain_score():
    _, keep = run(attribution__contrast=True)
    assert 0.0 <= keep.dual_share <= 1.0
    _, drop = run(neurons__dual="drop", neurons__min_per_layer=0)
    _, only = run(neurons__dual="only", neurons__min_per_layer=0)
    critical = select_neurons(
        drop.scores.signed(preset("simu").attribution)[0], NeuronConfig(min_per_layer=0), axis="in"
    )
    for all_of, without, dual in zip(critical.layers, drop.mask.layers, only.mask.layers, strict=True):
        assert torch.equal(all_of, without | dual)
        assert not (without & dual).any()
    share = sum(only.mask.counts) / sum(critical.counts)
    assert drop.dual_share == only.dual_share
    assert drop.dual_share == pytest.approx(share, abs=0.1)
    assert run()[1].dual_share is None


def test_wrong_schedules_fail_loudly():
    with pytest.raises((ConfigError, ValueError)):
        run(train__schedule="lineal")


@pytest.mark.slow
def test_two_processes_do_the_same_as_each_other(tmp_path):
    """Under torchrun gradients are averaged and every process ends with the same weights."""
    script = Path(__file__).with_name("distributed_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29531", str(script)]
    finished = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], value) for name, value in new_model(TOKENIZER).state_dict().items())
