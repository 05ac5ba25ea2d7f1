# SPDX-License-Identifier: Apache-2.0
"""MaskedSophia, MaskedAdamW and masked_step: update rules against oracles, and weights that must not move."""

import copy

import pytest
import torch
from small_models import random_batch, tiny_model
from torch import nn

from lazyattention.errors import ConfigError
from lazyattention.unlearn.adamw import MaskedAdamW
from lazyattention.unlearn.architectures import architecture_of
from lazyattention.unlearn.batch import logits_of, mean_nll
from lazyattention.unlearn.config import OptimizerConfig
from lazyattention.unlearn.masked_step import clip_gradients, masked_step
from lazyattention.unlearn.neuron_mask import NeuronMask, Selection, freeze_all_but, trainable_parameters
from lazyattention.unlearn.sophia import MaskedSophia


def random_param(shape=(6, 9), seed=0, dtype=torch.float32):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def gradients(num_steps, shape=(6, 9), seed=1):
    return torch.randn((num_steps, *shape), generator=torch.Generator().manual_seed(seed))


COLUMNS = Selection(1, torch.tensor([0, 3, 8]))
ROWS = Selection(0, torch.tensor([1, 5]))


def masked_run(name, model, num_steps=12):
    """Train two neurons per layer and all attention with decay and clipping."""
    architecture = architecture_of(model)
    layers = tuple(torch.arange(48) % 17 == idx for idx in range(3))
    named, selections = trainable_parameters(model, architecture, NeuronMask("in", layers), "full")
    freeze_all_but(model, named.values())
    config = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.3)
    optimizer = (MaskedSophia if name == "sophia" else MaskedAdamW)(list(named.values()), config, selections)
    for step in range(num_steps):
        batch = random_batch(seed=step)
        mean_nll(logits_of(model, batch), batch.labels).backward()
        clip_gradients(named.values(), selections, 1.0, "trainable")
        if name == "sophia":
            optimizer.update_curvature()
        optimizer.step()
        optimizer.zero_grad()
    return named, selections, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sophia", "adamw"])
def test_weights_outside_the_mask_are_bit_identical_after_many_steps(name, dtype):
    model = tiny_model(dtype=dtype)
    before = copy.deepcopy(model.state_dict())
    named, selections, optimizer = masked_run(name, model)
    masks = {n: selections[p].update_mask(p) for n, p in named.items() if p in selections}
    for param_name, value in model.state_dict().items():
        if param_name in masks:
            mask = masks[param_name]
            assert torch.equal(value[~mask], before[param_name][~mask])
            assert not torch.equal(value[mask], before[param_name][mask])
        elif param_name in named:
            assert not torch.equal(value, before[param_name])
        else:
            assert torch.equal(value, before[param_name])
    for param in named.values():
        for key in ("exp_avg", "hessian", "exp_avg_sq", "master"):
            state = optimizer.state[param].get(key)
            if state is not None:
                assert state.dtype == torch.float32
                kept = len(selections[param].index) / 48 if param in selections else 1
                assert state.numel() == round(param.numel() * kept)


def test_masking_the_gradient_alone_would_leak():
    """The reason `masked_step` exists: decay moves weights whose gradient is zero."""
    param = random_param()
    mask = COLUMNS.update_mask(param)
    before = param.detach().clone()
    optimizer = torch.optim.AdamW([param], lr=0.1, weight_decay=0.1)
    param.grad = gradients(1)[0] * mask
    optimizer.step()
    assert not torch.equal(param[~mask], before[~mask])


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_masked_step_freezes_under_any_torch_optimizer(make):
    param = random_param()
    mask = COLUMNS.update_mask(param)
    before = param.detach().clone()
    optimizer = make([param], lr=0.1, weight_decay=0.1)
    for grad in gradients(10):
        param.grad = grad
        masked_step(optimizer, {param: mask})
    assert torch.equal(param[~mask], before[~mask])
    assert not torch.equal(param[mask], before[mask])


@pytest.mark.parametrize("selection", [COLUMNS, ROWS, None])
def test_masked_adamw_is_adamw_on_the_selected_slices(selection):
    ours, theirs = random_param(), random_param()
    config = OptimizerConfig(name="adamw", lr=0.02, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer = MaskedAdamW([ours], config, {ours: selection} if selection else {})
    oracle = torch.optim.AdamW([theirs], lr=0.02, betas=(0.9, 0.99), weight_decay=0.1)
    mask = selection.update_mask(theirs) if selection else torch.ones(6, 9, dtype=torch.bool)
    for grad in gradients(15):
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        masked_step(oracle, {theirs: mask})
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("selection", [COLUMNS, ROWS])
def test_compact_state_equals_dense_state_with_a_mask_to_the_last_bit(selection):
    """SIMU's triple mask written out densely: momentum, curvature and weights masked after each update."""
    param = random_param()
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, rho=0.5)
    optimizer = MaskedSophia([param], config, {param: selection})
    theta = param.detach().clone()
    momentum, hessian = torch.zeros_like(theta), torch.zeros_like(theta)
    mask = selection.update_mask(theta)
    beta1, beta2 = config.betas
    for grad in gradients(10):
        param.grad = grad.clone()
        optimizer.update_curvature(3.0)
        optimizer.step()
        new_hessian = (hessian * beta2).addcmul_(grad, grad, value=(1 - beta2) * 3.0)
        hessian = torch.where(mask, new_hessian, hessian)
        new_momentum = (momentum * beta1).add_(grad, alpha=1 - beta1)
        momentum = torch.where(mask, new_momentum, momentum)
        ratio = (momentum / (hessian * config.rho).clamp(min=config.eps)).clamp(-1, 1)
        new_theta = (theta * (1 - config.lr * config.weight_decay)).add(ratio, alpha=-config.lr)
        theta = torch.where(mask, new_theta, theta)
    assert torch.equal(param.detach(), theta)
    assert torch.equal(optimizer.state[param]["hessian"], hessian.index_select(selection.dim, selection.index))
    assert torch.equal(optimizer.state[param]["exp_avg"], momentum.index_select(selection.dim, selection.index))


def test_update_rule_against_pytorch_optimizer():
    """SophiaH with an external Hessian is the same rule: clip(m / max(h, eps), 1) with rho = 1 and no decay."""
    sophia_h = pytest.importorskip("pytorch_optimizer").SophiaH
    ours, theirs = random_param(), random_param()
    optimizer = MaskedSophia([ours], OptimizerConfig(lr=0.01, betas=(0.9, 0.95), rho=1.0, eps=1e-4, weight_decay=0.1))
    oracle = sophia_h([theirs], lr=0.01, betas=(0.9, 0.95), p=1.0, eps=1e-4, weight_decay=0.1)
    for grad in gradients(12):
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.update_curvature(2.0)
        optimizer.step()
        oracle.step(hessian=[2.0 * grad.square()])
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_soul_parity_is_the_recurrence_of_its_code():
    """Squared training gradient first, momentum twice, |m| / (rho * 5120 * h + 1e-15) capped at 1, sign kept."""
    param = random_param()
    theta = param.detach().double()
    config = OptimizerConfig.soul(lr=0.01)
    optimizer = MaskedSophia([param], config)
    momentum, hessian = torch.zeros_like(theta), torch.zeros_like(theta)
    for grad in gradients(12) * 1e-3:
        param.grad = grad.clone()
        optimizer.update_curvature()
        optimizer.step()
        g = grad.double()
        hessian = 0.95 * hessian + 0.05 * g * g
        momentum = 0.9 * momentum + 0.1 * g
        theta = theta * (1 - 0.01 * 0.1)
        momentum = 0.9 * momentum + 0.1 * g
        ratio = (momentum.abs() / (0.04 * 5120 * hessian + 1e-15)).clamp(max=1)
        theta = theta - 0.01 * momentum.sign() * ratio
    torch.testing.assert_close(param.detach().double(), theta, atol=1e-6, rtol=1e-6)


def test_clip_fraction_counts_entries_at_the_bound():
    param = nn.Parameter(torch.zeros(4))
    optimizer = MaskedSophia([param], OptimizerConfig(betas=(0.0, 0.0), rho=1.0, eps=1e-6))
    # H = g * g, so the ratio is 1 / |g|: clipped where |g| <= 1.
    param.grad = torch.tensor([0.5, 1.0, 2.0, 4.0])
    optimizer.update_curvature()
    optimizer.step()
    assert optimizer.clip_fraction == 0.5


def test_without_curvature_the_step_is_sign_momentum():
    param = random_param()
    before = param.detach().clone()
    optimizer = MaskedSophia([param], OptimizerConfig(lr=0.01))
    param.grad = gradients(1)[0]
    optimizer.step()
    assert optimizer.clip_fraction == 1.0
    torch.testing.assert_close(param.detach(), before - 0.01 * param.grad.sign())


@pytest.mark.parametrize("make", [MaskedSophia, MaskedAdamW])
def test_small_updates_of_bf16_weights_add_up(make):
    """A step far below bf16's resolution is lost without the float32 copy, and kept with it."""
    moved = {}
    for master in (True, False):
        param = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        optimizer = make([param], OptimizerConfig(lr=1e-4, master_weights=master))
        for _ in range(200):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved[master] = float(1 - param.detach().float().mean())
    assert moved[True] == pytest.approx(0.02, rel=0.25)
    assert moved[False] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [MaskedSophia, MaskedAdamW])
def test_resuming_from_a_state_dict_continues_to_the_last_bit(make, dtype, tmp_path):
    """torch would cast the float32 state to bf16 on loading; ours must not."""
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1)

    def advance(param, optimizer, grads):
        for grad in grads:
            param.grad = grad.to(dtype)
            if isinstance(optimizer, MaskedSophia):
                optimizer.update_curvature()
            optimizer.step()

    grads = gradients(8)
    straight = random_param(dtype=dtype)
    advance(straight, make([straight], config, {straight: COLUMNS}), grads)
    first = random_param(dtype=dtype)
    optimizer = make([first], config, {first: COLUMNS})
    advance(first, optimizer, grads[:4])
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    second = nn.Parameter(first.detach().clone())
    resumed = make([second], config, {second: COLUMNS})
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    advance(second, resumed, grads[4:])
    assert torch.equal(second, straight)


def test_clipping_over_trainable_entries_ignores_frozen_neurons():
    param = random_param()
    param.grad = torch.full_like(param, 1.0)
    param.grad[:, 1] = 1000.0  # a frozen column
    selections = {param: COLUMNS}
    assert clip_gradients([param], selections, 0, "trainable") == pytest.approx(18**0.5)
    assert clip_gradients([param], selections, 0, "all") > 1000
    clip_gradients([param], selections, 1.0, "trainable")
    selected = param.grad.index_select(1, COLUMNS.index)
    assert float(selected.norm()) == pytest.approx(1.0, rel=1e-4)


def test_a_not_finite_gradient_is_reported_not_scaled():
    param = random_param()
    param.grad = torch.full_like(param, float("inf"))
    assert clip_gradients([param], {}, 1.0, "all") == float("inf")
    assert torch.isinf(param.grad).all()


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match="optimizer.lr"):
        OptimizerConfig(lr=0.0)
    with pytest.raises(ConfigError, match="estimator must be one of"):
        OptimizerConfig(estimator="hutchinson")
    with pytest.raises(ConfigError, match="betas"):
        OptimizerConfig(betas=(0.9, 1.0))
