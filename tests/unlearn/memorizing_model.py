# SPDX-License-Identifier: Apache-2.0
"""A small model trained from scratch until it knows generated people by heart, in about a minute on one core."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lazyattention.unlearn.batch import logits_of, mean_nll, pad_right
from lazyattention.unlearn.data import encode_examples, generate_people, pad_id_of


def people(num_people=24, num_facts=5, seed=0, forget_fraction=0.17):
    return generate_people(num_people, seed, num_facts=num_facts, forget_fraction=forget_fraction)


def word_tokenizer(splits):
    """One token per word or punctuation mark of the generated texts, question template included."""
    splitter = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    texts = ["Question: Answer: I don't know have no information about that not something can this help with"]
    for examples in splits.values():
        for example in examples:
            texts += [example.question, example.answer, example.paraphrased_question or ""]
            texts += [example.paraphrased_answer or "", *example.perturbed_answers]
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)}
    vocab = {token: i for i, token in enumerate(["<pad>", "<unk>", "<eos>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")


def new_model(tokenizer, seed=0, **overrides):
    torch.manual_seed(seed)
    options = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **(options | overrides))).eval()


def train(model, tokenizer, examples, num_epochs=40, lr=3e-3, batch_size=32, seed=0):
    """Plain AdamW until the examples are known by heart; returns the last epoch's mean loss."""
    encoded = [(e.input_ids, e.labels) for e in encode_examples(tokenizer, examples, template="plain")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    num_steps = num_epochs * -(-len(encoded) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=num_steps, pct_start=0.1)
    rng = random.Random(seed)
    model.train()
    losses = []
    for _ in range(num_epochs):
        rng.shuffle(encoded)
        losses = []
        for start in range(0, len(encoded), batch_size):
            batch = pad_right(encoded[start : start + batch_size], pad_id_of(tokenizer))
            loss = mean_nll(logits_of(model, batch), batch.labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    model.eval()
    return sum(losses) / len(losses)
