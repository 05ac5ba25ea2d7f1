# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest
import torch
from small_models import CONFIGS, random_batch, tiny_model

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.attribution import AttributionScores, attribute, estimate_cost
from lazyattention.unlearn.batch import TokenBatch, logits_of, token_log_probs
from lazyattention.unlearn.config import AttributionConfig


def summed_nll(model, batch):
    with torch.no_grad():
        return -float(token_log_probs(logits_of(model, batch), batch.labels)[0].sum())


def loss_with_layer_zeroed(model, batch, layer_idx, axis, positions="answer"):
    """First principles: zero the activation at the counted positions with a hook of the test's own."""
    from lazyattention.unlearn.architectures import architecture_of

    module = architecture_of(model).down[layer_idx].module
    counted = batch.positions(positions)

    def zero(x):
        return x * ~counted.reshape(*x.shape[:-1], 1)

    if axis == "in":
        handle = module.register_forward_pre_hook(lambda _, args: (zero(args[0]),))
    else:
        handle = module.register_forward_hook(lambda _, args, output: zero(output))
    loss = summed_nll(model, batch)
    handle.remove()
    return loss


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("axis", ["in", "out"])
def test_scores_of_a_layer_sum_to_the_loss_change(name, axis):
    model, batch = tiny_model(name), random_batch()
    config = AttributionConfig(neuron_axis=axis, num_steps=24, rule="power")
    result = attribute(model, [batch], None, config)
    full = summed_nll(model, batch)
    for idx, score in enumerate(result.forget):
        change = full - loss_with_layer_zeroed(model, batch, idx, axis)
        assert abs(change) > 1e-3
        assert float(score.sum()) == pytest.approx(change, rel=2e-2, abs=2e-2)
        assert result.loss_change[idx] == pytest.approx(change, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("positions", ["answer", "all"])
def test_both_rules_converge_and_the_midpoint_is_closer(positions):
    model, batch = tiny_model(), random_batch()
    errors = {}
    for rule in ("right", "midpoint"):
        for m in (4, 64):
            config = AttributionConfig(num_steps=m, rule=rule, positions=positions)
            result = attribute(model, [batch], None, config)
            errors[rule, m] = sum(
                abs(float(s.sum()) - c) for s, c in zip(result.forget, result.loss_change, strict=True)
            )
    assert errors["right", 64] < errors["right", 4] / 8
    assert errors["midpoint", 64] < errors["right", 64]
    assert errors["midpoint", 4] < errors["right", 4]


@pytest.mark.parametrize("name", ["olmo2", "gemma2", "exaone4"])
def test_normalised_mlp_outputs_need_the_power_rule_and_a_warning_says_so(name, caplog):
    model, batch = tiny_model(name), random_batch()
    midpoint = attribute(model, [batch], None, AttributionConfig(num_steps=16, rule="midpoint"))
    assert max(midpoint.residuals) > 0.3
    assert "attribution.rule = 'power'" in caplog.text
    caplog.clear()
    power = attribute(model, [batch], None, AttributionConfig(num_steps=16, rule="power"))
    assert max(power.residuals) < 0.02
    assert not caplog.text


def test_joint_path_sums_to_the_change_of_zeroing_all_layers():
    model, batch = tiny_model(), random_batch()
    result = attribute(model, [batch], None, AttributionConfig(path="joint", num_steps=64))
    handles = []
    counted = batch.positions("answer").unsqueeze(-1)
    for layer in model.model.layers:
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0] * ~counted,)))
    zeroed = summed_nll(model, batch)
    for handle in handles:
        handle.remove()
    total = sum(float(score.sum()) for score in result.forget)
    assert total == pytest.approx(summed_nll(model, batch) - zeroed, rel=1e-2)


@pytest.mark.parametrize("axis", ["in", "out"])
def test_fast_is_the_gradient_times_the_activation(axis):
    """By finite differences: scaling one neuron by 1 + h at counted positions changes the loss by h * score."""
    model, batch = tiny_model(dtype=torch.float64), random_batch()
    result = attribute(model, [batch], None, AttributionConfig(path="fast", neuron_axis=axis))
    counted, h, k = batch.positions("answer"), 1e-5, 7
    module = model.model.layers[1].mlp.down_proj

    def loss_at(scale):
        def change(x):
            factor = torch.ones_like(x)
            factor[..., k] = torch.where(counted, scale, 1.0)
            return x * factor

        if axis == "in":
            handle = module.register_forward_pre_hook(lambda _, args: (change(args[0]),))
        else:
            handle = module.register_forward_hook(lambda _, args, output: change(output))
        loss = summed_nll(model, batch)
        handle.remove()
        return loss

    slope = (loss_at(1 + h) - loss_at(1 - h)) / (2 * h)
    # summed_nll is float32 inside: the difference carries its rounding.
    assert float(result.forget[1][k]) == pytest.approx(slope, abs=0.3, rel=0.3)


def test_one_linear_layer_has_the_closed_form():
    """With a single layer, no residual use after it but the head: the score of the last position is exact."""
    model = tiny_model(num_hidden_layers=1)
    batch = random_batch(batch=1, seq_len=5)
    labels = batch.labels.clone()
    labels[:, :4] = -100
    batch = TokenBatch(batch.input_ids, batch.attention_mask, labels)
    result = attribute(model, [batch], None, AttributionConfig(num_steps=7))
    captured = {}
    layer = model.model.layers[0]
    layer.mlp.register_forward_hook(lambda _, args, output: captured.update(mlp=output.detach()))
    layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: captured.update(beta=args[0].detach()))
    layer.register_forward_hook(lambda _, args, output: captured.update(out=output.detach()))
    logits_of(model, batch)
    beta = captured["beta"][0, 3]
    rest = captured["out"][0, 3] - captured["mlp"][0, 3]
    expected = torch.zeros_like(beta)
    for j in range(7):
        a = (beta * (j + 0.5) / 7).requires_grad_()
        hidden = rest + layer.mlp.down_proj.weight.detach() @ a
        logits = model.lm_head(model.model.norm(hidden))
        (-logits.log_softmax(-1)[batch.labels[0, 4]]).backward()
        expected += beta * a.grad / 7
    torch.testing.assert_close(result.forget[0], expected.detach(), atol=1e-5, rtol=1e-4)


def test_batch_size_and_padding_side_do_not_matter():
    model = tiny_model()
    config = AttributionConfig(num_steps=3)
    whole = random_batch()
    rows = [
        TokenBatch(*(getattr(whole, f.name)[i : i + 1] for f in dataclasses.fields(TokenBatch)))
        for i in range(whole.input_ids.shape[0])
    ]
    together = attribute(model, [whole], None, config)
    apart = attribute(model, rows, None, config)
    left = attribute(model, [random_batch(padding_side="left")], None, config)
    for a, b, c in zip(together.forget, apart.forget, left.forget, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(a, c, atol=1e-4, rtol=1e-3)


def test_the_model_is_left_as_it_was():
    model = tiny_model()
    model.train()
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    before = {name: (p.requires_grad, p.clone()) for name, p in model.named_parameters()}
    batch = random_batch()
    expected = logits_of(model.eval(), batch)
    model.train()
    attribute(model, [batch], [batch], AttributionConfig(num_steps=2))
    assert model.training
    for name, param in model.named_parameters():
        assert param.requires_grad == before[name][0]
        assert torch.equal(param, before[name][1])
        assert param.grad is None
    assert torch.equal(logits_of(model.eval(), batch), expected)
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_signs_and_contrast():
    scores = AttributionScores(
        "in",
        forget=[torch.tensor([-4.0, 2.0])],
        retain=[torch.tensor([-1.0, 0.0])],
        num_forget_tokens=2,
        num_retain_tokens=1,
    )
    assert scores.signed(AttributionConfig(sign="support"))[0][0].tolist() == [2.0, -1.0]
    assert scores.signed(AttributionConfig(sign="literal"))[0][0].tolist() == [-2.0, 1.0]
    assert scores.signed(AttributionConfig(sign="abs"))[0][0].tolist() == [2.0, 1.0]
    assert scores.signed(AttributionConfig(contrast=True))[0][0].tolist() == [1.0, -1.0]
    scores.retain = None
    with pytest.raises(RequestError, match="retain"):
        scores.signed(AttributionConfig(contrast=True))


def test_cost_estimate_counts_the_passes_that_happen():
    model, batch = tiny_model(), random_batch()
    for path in ("layerwise", "joint", "fast"):
        config = AttributionConfig(path=path, num_steps=5)
        calls = 0

        def count(*_):
            nonlocal calls
            calls += 1

        handles = [layer.mlp.register_forward_hook(count) for layer in model.model.layers]
        attribute(model, [batch], None, config)
        for handle in handles:
            handle.remove()
        estimate = estimate_cost(model, [batch], config)
        num_forward = {
            "layerwise": (5 + 1) * 6 + 3,
            "joint": 5 * 3 + 3,
            "fast": 3,
        }[path]
        assert calls == num_forward
        num_backward = {"layerwise": 5 * 6, "joint": 5 * 3, "fast": 3}[path]
        assert estimate.num_layer_passes == num_forward + num_backward
        assert estimate.flops > 0


def test_save_and_load(tmp_path):
    result = attribute(tiny_model(), [random_batch()], [random_batch(seed=1)], AttributionConfig(num_steps=2))
    result.save(tmp_path / "scores.safetensors")
    loaded = AttributionScores.load(tmp_path / "scores.safetensors")
    assert loaded.axis == "in"
    assert loaded.num_retain_tokens == result.num_retain_tokens
    assert loaded.loss_change == result.loss_change
    for a, b in zip(loaded.retain, result.retain, strict=True):
        assert torch.equal(a, b)


def test_nothing_to_attribute_is_an_error():
    batch = random_batch()
    empty = TokenBatch(batch.input_ids, batch.attention_mask, torch.full_like(batch.labels, -100))
    with pytest.raises(RequestError, match="no answer token"):
        attribute(tiny_model(), [empty], None, AttributionConfig())


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match="neuron_axis must be one of 'in', 'out'"):
        AttributionConfig(neuron_axis="columns")
    with pytest.raises(ConfigError, match="num_steps"):
        AttributionConfig(num_steps=0)
