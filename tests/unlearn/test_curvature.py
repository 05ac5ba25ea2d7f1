# SPDX-License-Identifier: Apache-2.0
"""The Gauss-Newton-Bartlett estimate against the exact Gauss-Newton diagonal, formed by brute force."""

import torch
from torch import nn

from lazyattention.unlearn.batch import TokenBatch, mean_nll
from lazyattention.unlearn.curvature import gauss_newton_bartlett

VOCAB = 7


class _TinyNet(nn.Module):
    """An embedding, a tanh layer and a projection: 7*5 + 5*6 + 6*7 weights, no attention needed here."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 5)
        self.hidden = nn.Linear(5, 6, bias=False)
        self.out = nn.Linear(6, VOCAB, bias=False)

    def forward(self, input_ids):
        return self.out(torch.tanh(self.hidden(self.embed(input_ids))))


def _setup():
    torch.manual_seed(0)
    net = _TinyNet().double()
    input_ids = torch.randint(0, VOCAB, (2, 5))
    labels = input_ids.clone()
    labels[:, :2] = -100
    return net, TokenBatch(input_ids, torch.ones_like(input_ids), labels)


def exact_diagonal(net, batch):
    """diag of (1/B) * sum_b J_b^T (diag(p_b) - p_b p_b^T) J_b, one Jacobian row at a time."""
    predicts = batch.positions("answer")
    rows = net(batch.input_ids)[predicts]
    params = list(net.parameters())
    total = [torch.zeros_like(p) for p in params]
    for row in rows:
        p = row.softmax(-1).detach()
        jacobian = [
            torch.autograd.grad(row[v], params, retain_graph=True) for v in range(VOCAB)
        ]  # jacobian[v][i]: d logit_v / d param_i
        for i in range(len(params)):
            stacked = torch.stack([jacobian[v][i] for v in range(VOCAB)])  # [vocab, ...]
            weights = p.view(-1, *([1] * params[i].dim()))
            total[i] += (weights * stacked.square()).sum(0) - (weights * stacked).sum(0).square()
    return [t / rows.shape[0] for t in total]


def test_the_estimate_is_unbiased_and_the_squared_gradient_is_not():
    net, batch = _setup()
    exact = torch.cat([d.flatten() for d in exact_diagonal(net, batch)])
    generator = torch.Generator().manual_seed(1)
    draws = []
    for _ in range(2000):
        net.zero_grad()
        num_predictions = gauss_newton_bartlett(lambda b: net(b.input_ids), batch, generator)
        assert num_predictions == 6
        draws.append(torch.cat([num_predictions * p.grad.square().flatten() for p in net.parameters()]))
    draws = torch.stack(draws)
    standard_errors = (draws.mean(0) - exact) / (draws.std(0) / len(draws) ** 0.5 + 1e-12)
    live = exact > 1e-8
    assert live.sum() > 80
    # About 100 correlated entries: the largest deviation of a fair estimate stays below 4.5 standard errors.
    assert standard_errors[live].abs().max() < 4.5
    assert standard_errors[live].square().mean() < 3.0
    net.zero_grad()
    mean_nll(net(batch.input_ids), batch.labels).backward()
    squared = torch.cat([6 * p.grad.square().flatten() for p in net.parameters()])
    assert ((squared - exact)[live].abs() > 0.5 * exact[live]).double().mean() > 0.5


def test_one_seed_gives_one_estimate():
    net, batch = _setup()
    results = []
    for _ in range(2):
        net.zero_grad()
        gauss_newton_bartlett(lambda b: net(b.input_ids), batch, torch.Generator().manual_seed(7))
        results.append([p.grad.clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_answer_token_leaves_no_gradient():
    net, batch = _setup()
    empty = TokenBatch(batch.input_ids, batch.attention_mask, torch.full_like(batch.labels, -100))
    assert gauss_newton_bartlett(lambda b: net(b.input_ids), empty, torch.Generator()) == 0
    assert all(p.grad is None for p in net.parameters())
