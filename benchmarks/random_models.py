# SPDX-License-Identifier: Apache-2.0
"""Models of real shapes with random weights, built in memory: speed does not depend on what weights say.

Answers of such models mean nothing; whoever prints a figure measured with one says so.
"""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lazyattention.models.loaded_model import LoadedModel, wrap_model

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}

# name -> configuration, as published with the model of that name.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {**_LLAMA3, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {**_LLAMA3, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 65536,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    },
}


def random_model(
    shape: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: object
) -> LoadedModel:
    """Build a model on the device it will run on, and check it as every model is checked.

    Args:
        shape: A key of SHAPES.
        device: Where it is built.
        dtype: Of its weights.
        seed: Of its weights.
        **overrides: Fields of its configuration, for example num_hidden_layers=2.
    """
    fields = {**SHAPES[shape], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, **overrides}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    tokenizer = word_tokenizer(config.vocab_size)
    return wrap_model(model, tokenizer, name=f"{shape} (random weights)", weights_id=f"random {shape} {seed}")


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the words "0", "1", and so on."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="0", eos_token="1")
