# SPDX-License-Identifier: Apache-2.0
"""Greedy texts equal argmax by hand, one prompt at a time, whatever the batch or the model's own settings."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from qa_fixtures import qa_model, qa_tokenizer

from lazyattention.errors import ConfigError
from lazyattention.unlearn.data import encode_examples, generate_people
from lazyattention.unlearn.metrics.generate import generate_texts, stop_token_ids_of

TOKENIZER = qa_tokenizer(chat=True)
PROMPTS = [e.prompt_ids for e in encode_examples(TOKENIZER, generate_people(8, 0, num_facts=3)["retain"][:7])]
PROMPTS += [[5], [1, 2, 3]]


def by_hand(model, prompt, count, stop=()):
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop:
            ids.pop()
            break
    return TOKENIZER.decode(ids[len(prompt) :], skip_special_tokens=True).strip()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_batched_texts_equal_argmax_by_hand(family, batch_size):
    model = qa_model(family)
    texts = generate_texts(model, TOKENIZER, PROMPTS, max_new_tokens=12, stop_token_ids=[], batch_size=batch_size)
    assert texts == [by_hand(model, prompt, 12) for prompt in PROMPTS]
    assert len(set(texts)) > 3


def test_each_prompt_has_its_own_limit_whatever_its_batch():
    model = qa_model()
    limits = [1 + index for index in range(len(PROMPTS))]
    texts = generate_texts(model, TOKENIZER, PROMPTS, max_new_tokens=limits, stop_token_ids=[], batch_size=4)
    assert texts == [by_hand(model, prompt, count) for prompt, count in zip(PROMPTS, limits, strict=True)]


def test_a_stop_token_ends_its_own_text_only():
    model = qa_model()
    ids = PROMPTS[0]
    with torch.no_grad():
        first = int(model(torch.tensor([ids])).logits[0, -1].argmax())
    texts = generate_texts(model, TOKENIZER, PROMPTS, max_new_tokens=8, stop_token_ids=[first], batch_size=16)
    assert texts[0] == ""
    assert texts == [by_hand(model, prompt, 8, stop=[first]) for prompt in PROMPTS]


def test_settings_of_the_model_are_put_aside_and_put_back():
    model = qa_model()
    expected = generate_texts(model, TOKENIZER, PROMPTS, max_new_tokens=12, stop_token_ids=[])
    own = model.generation_config
    own.update(do_sample=True, temperature=5.0, top_p=0.9, repetition_penalty=3.0, no_repeat_ngram_size=1)
    own.update(max_new_tokens=2, min_new_tokens=2, eos_token_id=4)
    model.train()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert generate_texts(model, TOKENIZER, PROMPTS, max_new_tokens=12, stop_token_ids=[]) == expected
    assert torch.equal(state, torch.get_rng_state())
    assert model.generation_config is own
    assert own.repetition_penalty == 3.0
    assert model.training


def test_a_lora_model_answers_with_its_adapter():
    base = qa_model()
    expected = generate_texts(base, TOKENIZER, PROMPTS, max_new_tokens=6, stop_token_ids=[])
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert generate_texts(model, TOKENIZER, PROMPTS, max_new_tokens=6, stop_token_ids=[]) == expected
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_()
    changed = generate_texts(model, TOKENIZER, PROMPTS, max_new_tokens=6, stop_token_ids=[])
    assert changed != expected
    assert changed == [by_hand(model, prompt, 6) for prompt in PROMPTS]


def test_stop_tokens_of_tokenizer_settings_and_template_are_joined():
    model = qa_model()
    end_of_turn = TOKENIZER("<|end|>", add_special_tokens=False)["input_ids"][0]
    model.generation_config.eos_token_id = [4, 2]
    assert stop_token_ids_of(model, TOKENIZER, "chat") == sorted({2, 4, end_of_turn})
    assert stop_token_ids_of(model, TOKENIZER, "plain") == [2, 4]


def test_batch_size_is_checked():
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        generate_texts(qa_model(), TOKENIZER, PROMPTS, max_new_tokens=1, stop_token_ids=[], batch_size=0)
