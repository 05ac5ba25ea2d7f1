# SPDX-License-Identifier: Apache-2.0
"""Tiny random causal models of every supported architecture, and random batches for them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lazyattention.unlearn.batch import IGNORED_LABEL, TokenBatch

VOCAB_SIZE = 61
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {**_COMMON, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB_SIZE}
_OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE}

CONFIGS = {
    "llama": {**_GQA, "tie_word_embeddings": False},
    "llama-tied": {**_GQA, "tie_word_embeddings": True, "model_type": "llama"},
    "llama-bias": {**_GQA, "mlp_bias": True, "attention_bias": True, "model_type": "llama"},
    "mistral": _GQA,
    "qwen2": _GQA,
    "qwen3": {**_GQA, "head_dim": 8},
    "gemma": {**_GQA, "head_dim": 8},
    "gemma2": {**_GQA, "head_dim": 8},
    "gemma3_text": {**_GQA, "head_dim": 8},
    "olmo": _GQA,
    "olmo2": _GQA,
    "olmo3": _GQA,
    "smollm3": _GQA,
    "granite": _GQA,
    "cohere": _GQA,
    "cohere2": _GQA,
    "stablelm": _GQA,
    "helium": {**_GQA, "head_dim": 8},
    "exaone4": {**_GQA, "head_dim": 8},
    "ministral": {**_GQA, "head_dim": 8},
    "phi": _GQA,
    "phi3": _GQA,
    "starcoder2": _GQA,
    "gpt_neox": _COMMON,
    "gpt2": {**_GPT2, "bos_token_id": 1, "eos_token_id": 2},
    "opt": {
        **_OPT, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    },
}  # fmt: skip


def tiny_model(name="llama", seed=0, dtype=torch.float32, **overrides):
    """Build one in evaluation mode, activations large enough that scores are far from rounding errors."""
    options = {**CONFIGS[name], **overrides}
    model_type = options.pop("model_type", name)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options))
    with torch.no_grad():
        for param_name, param in model.named_parameters():
            if param.dim() > 1:
                param.normal_(std=0.6 / param.shape[-1] ** 0.5 if "embed" not in param_name else 0.5)
            elif "bias" in param_name:
                param.normal_(std=0.1)
    return model.to(dtype).eval()


def random_batch(batch=3, seq_len=9, seed=0, padding_side="right"):
    """Examples of unequal length whose second half is the answer."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB_SIZE, (batch, seq_len), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    labels = input_ids.clone()
    labels[:, : seq_len // 2] = IGNORED_LABEL
    for row in range(1, batch):
        cut = slice(seq_len - row, None)
        input_ids[row, cut], attention_mask[row, cut], labels[row, cut] = 0, 0, IGNORED_LABEL
    if padding_side == "left":
        input_ids, attention_mask, labels = (
            torch.stack([x[row].roll(row if row else 0) for row in range(batch)])
            for x in (input_ids, attention_mask, labels)
        )
    return TokenBatch(input_ids, attention_mask, labels)
