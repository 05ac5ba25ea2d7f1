# SPDX-License-Identifier: Apache-2.0
"""Every objective against a formula written with loops and plain numbers."""

import math

import pytest
import torch

from lazyattention.errors import ConfigError
from lazyattention.unlearn.config import ObjectiveConfig
from lazyattention.unlearn.objectives import IDK_ANSWERS, OBJECTIVES, ObjectiveInputs, compute_terms

BATCH, SEQ_LEN, VOCAB = 3, 6, 5


def _logits(seed):
    return torch.randn(BATCH, SEQ_LEN, VOCAB, generator=torch.Generator().manual_seed(seed))


def _labels(seed):
    labels = torch.randint(0, VOCAB, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(seed))
    labels[:, :2] = -100
    labels[1, 4:] = -100
    return labels


INPUTS = ObjectiveInputs(
    forget_logits=_logits(0),
    forget_labels=_labels(1),
    retain_logits=_logits(2),
    retain_labels=_labels(3),
    ref_forget_logits=_logits(4),
    ref_retain_logits=_logits(5),
)


def log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(x - top) for x in row)) + top
    return [x - total for x in row]


def token_log_probs(logits, labels):
    """One list of log-probabilities per example."""
    rows = []
    for b in range(BATCH):
        rows.append(
            [log_softmax(logits[b, i - 1].tolist())[labels[b, i]] for i in range(1, SEQ_LEN) if labels[b, i] != -100]
        )
    return rows


def flat_mean_nll(logits, labels):
    values = [x for row in token_log_probs(logits, labels) for x in row]
    return -sum(values) / len(values)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > -30 else x


def expected_npo(beta, reduction):
    total = 0.0
    now, ref = (token_log_probs(x, INPUTS.forget_labels) for x in (INPUTS.forget_logits, INPUTS.ref_forget_logits))
    for a, b in zip(now, ref, strict=True):
        size = 1 if reduction == "sum" else len(a)
        total += -2 / beta * log_sigmoid(-beta * (sum(a) - sum(b)) / size)
    return total / BATCH


def expected_simnpo(beta, margin):
    rows = token_log_probs(INPUTS.forget_logits, INPUTS.forget_labels)
    return sum(-2 / beta * log_sigmoid(-beta * sum(r) / len(r) - margin) for r in rows) / BATCH


def expected_undial(beta):
    total, count = 0.0, 0
    for b in range(BATCH):
        for i in range(1, SEQ_LEN):
            label = int(INPUTS.forget_labels[b, i])
            if label == -100:
                continue
            teacher = INPUTS.ref_forget_logits[b, i - 1].tolist()
            teacher[label] -= beta
            target = [math.exp(x) for x in log_softmax(teacher)]
            student = log_softmax(INPUTS.forget_logits[b, i - 1].tolist())
            total -= sum(t * s for t, s in zip(target, student, strict=True))
            count += 1
    return total / count


def expected_kl():
    total, count = 0.0, 0
    for b in range(BATCH):
        for i in range(1, SEQ_LEN):
            if int(INPUTS.retain_labels[b, i]) == -100:
                continue
            now = log_softmax(INPUTS.retain_logits[b, i - 1].tolist())
            ref = log_softmax(INPUTS.ref_retain_logits[b, i - 1].tolist())
            total += sum(math.exp(r) * (r - n) for r, n in zip(ref, now, strict=True))
            count += 1
    return total / count


FORGET_NLL = flat_mean_nll(INPUTS.forget_logits, INPUTS.forget_labels)
RETAIN_NLL = flat_mean_nll(INPUTS.retain_logits, INPUTS.retain_labels)
ROWS = [
    ({"name": "ga"}, -FORGET_NLL, None),
    ({"name": "graddiff"}, -FORGET_NLL, RETAIN_NLL),
    ({"name": "graddiff", "retain_loss": "kl"}, -FORGET_NLL, expected_kl()),
    ({"name": "kl"}, -FORGET_NLL, expected_kl()),
    ({"name": "npo"}, expected_npo(0.1, "sum"), RETAIN_NLL),
    ({"name": "npo", "npo_reduction": "mean", "beta": 0.5}, expected_npo(0.5, "mean"), RETAIN_NLL),
    ({"name": "simnpo"}, expected_simnpo(4.5, 0.0), RETAIN_NLL),
    ({"name": "simnpo", "beta": 2.0, "simnpo_margin": 0.7}, expected_simnpo(2.0, 0.7), RETAIN_NLL),
    ({"name": "po"}, FORGET_NLL, RETAIN_NLL),
    ({"name": "undial"}, expected_undial(10.0), RETAIN_NLL),
    ({"name": "undial", "undial_beta": 1.0}, expected_undial(1.0), RETAIN_NLL),
]


def test_every_objective_has_a_row():
    assert {options["name"] for options, _, _ in ROWS} == set(OBJECTIVES)


@pytest.mark.parametrize(("options", "forget", "retain"), ROWS)
def test_terms_match_the_formula(options, forget, retain):
    config = ObjectiveConfig(forget_weight=0.7, retain_weight=1.3, **options)
    terms = compute_terms(OBJECTIVES[config.name], INPUTS, config)
    assert float(terms.forget_loss) == pytest.approx(forget, rel=1e-5)
    if retain is None:
        assert terms.retain_loss is None
        assert float(terms.loss) == pytest.approx(0.7 * forget, rel=1e-5)
    else:
        assert float(terms.retain_loss) == pytest.approx(retain, rel=1e-5)
        assert float(terms.loss) == pytest.approx(0.7 * forget + 1.3 * retain, rel=1e-5)


def test_npo_is_steepest_where_the_model_is_the_original_and_fades():
    """At the original model the gradient is that of ascent; far below it, it vanishes: no runaway."""
    grads = []
    for shift in (0.0, 60.0):
        logits = INPUTS.forget_logits.clone()
        labels = INPUTS.forget_labels
        for b in range(BATCH):
            for i in range(1, SEQ_LEN):
                if labels[b, i] != -100:
                    logits[b, i - 1, labels[b, i]] -= shift
        logits.requires_grad_()
        inputs = ObjectiveInputs(
            forget_logits=logits, forget_labels=labels, ref_forget_logits=INPUTS.forget_logits.detach()
        )
        OBJECTIVES["npo"].forget_loss(inputs, ObjectiveConfig(name="npo")).backward()
        grads.append(float(logits.grad.norm()))
    assert grads[1] < 0.01 * grads[0]


def test_a_missing_retain_set_is_named():
    inputs = ObjectiveInputs(forget_logits=INPUTS.forget_logits, forget_labels=INPUTS.forget_labels)
    with pytest.raises(ConfigError, match="needs a retain set"):
        compute_terms(OBJECTIVES["graddiff"], inputs, ObjectiveConfig())
    without = compute_terms(OBJECTIVES["graddiff"], inputs, ObjectiveConfig(retain_weight=0.0))
    assert without.retain_loss is None


def test_a_misspelt_objective_is_suggested():
    with pytest.raises(ConfigError, match="did you mean 'graddiff'"):
        OBJECTIVES["gradif"]


def test_idk_answers_differ():
    assert len(set(IDK_ANSWERS)) == len(IDK_ANSWERS) >= 5
