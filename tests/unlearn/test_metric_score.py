# SPDX-License-Identifier: Apache-2.0
"""Scores equal transformers' own loss one example at a time, whatever the batch size, padding or logits kept."""

import inspect

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from qa_fixtures import qa_model, qa_tokenizer
from torch import nn

from lazyattention.errors import ConfigError
from lazyattention.unlearn.data import QAExample, encode_example, encode_examples, generate_people
from lazyattention.unlearn.metrics import score
from lazyattention.unlearn.metrics.batches import run_in_batches
from lazyattention.unlearn.metrics.score import accepts_logits_to_keep, evaluating, score_answers

TOKENIZER = qa_tokenizer(chat=True)
EXAMPLES = [
    *generate_people(6, 0, num_facts=4)["retain"][:9],
    QAExample("Q?", "a"),
    QAExample("", "plain text", kind="completion"),
]
ENCODED = encode_examples(TOKENIZER, EXAMPLES)


class WithoutLogitsToKeep(nn.Module):
    """A model whose forward computes all logits, as older architectures do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, use_cache):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)


def equal(first, second, atol=1e-5):
    return all(
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.is_greedy, b.is_greedy)
        and np.allclose(a.logprobs, b.logprobs, atol=atol)
        and np.allclose(a.vocab_mean, b.vocab_mean, atol=atol)
        and np.allclose(a.vocab_std, b.vocab_std, atol=atol)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_from_first_principles(family):
    model = qa_model(family)
    for item, found in zip(ENCODED, score_answers(model, ENCODED, pad_id=0, batch_size=4), strict=True):
        ids = torch.tensor([item.input_ids])
        with torch.no_grad():
            output = model(ids, labels=torch.tensor([item.labels]))
        assert found.mean_nll == pytest.approx(float(output.loss), abs=1e-5)
        rows = output.logits[0, item.num_prompt_tokens - 1 : -1].double().softmax(-1)  # [num_tokens, vocab_size]
        assert found.token_ids.tolist() == item.input_ids[item.num_prompt_tokens :]
        assert found.is_greedy.tolist() == (rows.argmax(-1) == torch.tensor(found.token_ids)).tolist()
        for row, mean, std in zip(rows, found.vocab_mean, found.vocab_std, strict=True):
            assert mean == pytest.approx(float((row * row.log()).sum()), abs=1e-4)
            assert std == pytest.approx(float((row * row.log().square()).sum() - mean**2) ** 0.5, abs=1e-3)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_batch_size_and_order_do_not_matter(batch_size):
    model = qa_model()
    expected = score_answers(model, ENCODED, pad_id=0, batch_size=3)
    assert equal(expected, score_answers(model, ENCODED, pad_id=7, batch_size=batch_size))
    backwards = score_answers(model, ENCODED[::-1], pad_id=0, batch_size=batch_size)
    assert equal(expected, backwards[::-1])


def test_all_logits_or_only_those_needed():
    model = qa_model()
    assert accepts_logits_to_keep(model)
    whole = WithoutLogitsToKeep(model)
    assert not accepts_logits_to_keep(whole)
    assert equal(score_answers(model, ENCODED, pad_id=0), score_answers(whole, ENCODED, pad_id=0))


def test_an_adapter_counts():
    base = qa_model()
    plain = score_answers(base, ENCODED, pad_id=0)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert accepts_logits_to_keep(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_()
    with_adapter = score_answers(model, ENCODED, pad_id=0)
    assert not equal(plain, with_adapter)
    assert equal(with_adapter, score_answers(model.merge_and_unload(), ENCODED, pad_id=0), atol=1e-4)


def test_only_answer_positions_are_computed(monkeypatch):
    model = qa_model()
    kept = []
    forward = model.forward

    def spy(*args, logits_to_keep, **kwargs):
        kept.append(logits_to_keep.tolist())
        return forward(*args, logits_to_keep=logits_to_keep, **kwargs)

    spy.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(model, "forward", spy)
    score_answers(model, ENCODED[:1], pad_id=0)
    item = ENCODED[0]
    assert kept == [list(range(item.num_prompt_tokens - 1, len(item.input_ids) - 1))]


def test_slices_of_the_logits_do_not_matter(monkeypatch):
    expected = score_answers(qa_model(), ENCODED, pad_id=0)
    monkeypatch.setattr(score, "_MAX_SLICE_NUMEL", 1)
    assert equal(expected, score_answers(qa_model(), ENCODED, pad_id=0))


def test_a_token_that_is_ruled_out_is_no_nan():
    model = qa_model()
    banned = TOKENIZER("z", add_special_tokens=False)["input_ids"][0]
    model.lm_head.register_forward_hook(lambda m, args, out: out.index_fill(-1, torch.tensor([banned]), -torch.inf))
    found = score_answers(model, ENCODED, pad_id=0)
    assert all(np.isfinite(item.vocab_mean).all() and np.isfinite(item.vocab_std).all() for item in found)


def test_modes_gradients_and_inference_flags_are_as_before():
    model = qa_model().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == modes
    score_answers(model, ENCODED, pad_id=0)
    assert [module.training for module in model.modules()] == modes
    loss = model(torch.tensor([ENCODED[0].input_ids]), labels=torch.tensor([ENCODED[0].labels])).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_mode_is_restored_after_an_error():
    model = qa_model().train()
    with pytest.raises(RuntimeError), evaluating(model):
        raise RuntimeError
    assert model.training


def test_bfloat16_scores_are_close_and_float32():
    model = qa_model(scale=2.0)
    expected = score_answers(model, ENCODED, pad_id=0)
    found = score_answers(model.bfloat16(), ENCODED, pad_id=0)
    assert all(item.logprobs.dtype == np.float32 for item in found)
    assert max(abs(a.mean_nll - b.mean_nll) for a, b in zip(expected, found, strict=True)) < 0.05


def test_end_token_is_no_part_of_the_answer():
    item = encode_example(TOKENIZER, EXAMPLES[0])
    found = score_answers(qa_model(), [item], pad_id=0)[0]
    assert len(found.answer_is_greedy) == len(found.is_greedy) - 1 == len(item.answer_ids)


def test_progress_counts_every_example():
    seen = []
    score_answers(qa_model(), ENCODED, pad_id=0, batch_size=4, on_batch=seen.append)
    assert seen == [4, 4, 3]
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        score_answers(qa_model(), ENCODED, pad_id=0, batch_size=0)


def test_a_batch_that_does_not_fit_is_halved_and_no_example_is_lost(caplog):
    asked = []

    def run(places):
        asked.append(len(places))
        if len(places) > 3:
            raise torch.OutOfMemoryError
        return [10 * place for place in places]

    order = list(range(20, 0, -1))
    found = [
        pair
        for places, values in run_in_batches(qa_model(), order, 16, run)
        for pair in zip(places, values, strict=True)
    ]
    assert found == [(place, 10 * place) for place in order]
    assert asked == [16, 8, 4, *[2] * 10]  # once small, always small
    assert "does not suffice for batches of 4; going on with 2" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        list(run_in_batches(qa_model(), [1, 2], 2, lambda places: (_ for _ in ()).throw(torch.OutOfMemoryError())))


def test_the_device_chooses_the_batch_size():
    assert [len(places) for places, _ in run_in_batches(qa_model(), range(20), None, len)] == [8, 8, 4]
