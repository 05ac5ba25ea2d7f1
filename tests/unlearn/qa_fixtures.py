# SPDX-License-Identifier: Apache-2.0
"""A tokenizer trained on generated people, with or without a chat template, and tiny random models that speak it."""

import copy
import functools

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lazyattention.unlearn.data import generate_people

CHAT_TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
_COMMON = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@functools.cache
def _trained():
    splits = generate_people(30, 0, num_facts=12)
    texts = [f"{e.question}\n{e.answer} {e.paraphrased_answer}" for examples in splits.values() for e in examples]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*texts, "Question: Answer:"], trainer)
    return tokenizer


def qa_tokenizer(chat=False):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(_trained()), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def qa_model(family="llama", seed=0, scale=4.0, **overrides):
    """Scaled weights: with the usual initialisation every token is about equally likely and nothing can be told."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(qa_tokenizer()), "max_position_embeddings": 512, **_COMMON}
    if family == "gpt2":
        sizes = {"vocab_size": len(qa_tokenizer()), "n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4}
        sizes |= _COMMON | overrides
    else:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "tie_word_embeddings": False} | overrides
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(scale)
    return model.eval()
