# SPDX-License-Identifier: Apache-2.0
"""A model that is ready to be served, with the facts about it that the engine needs."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lazyattention.errors import ConfigError
from lazyattention.models.adapter import AdapterNotes
from lazyattention.models.attention import ATTENTION_NAME
from lazyattention.models.probe import ProbeResult, check_model
from lazyattention.models.rope import layer_rotaries
from lazyattention.models.weights_id import tensors_digest, weights_id_of
from lazyattention.ops.rotary import LayerRotary


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A transformers model behind our attention function, checked at load time.

    Attributes:
        name: What users call it.
        model: In eval mode, without gradients; called as `models/attention.py` says.
        tokenizer: Its tokenizer.
        weights_id: Fingerprint of weights, adapter and configuration.
        rotaries: Per layer, how heads turn.
        kv_shapes: Per layer `(num_kv_heads, head_dim)`.
        num_q_heads: Query heads per layer.
        vocab_size: Rows of the logits.
        max_model_len: Positions the model knows, tokens.
        eos_token_ids: Any of these ends an answer.
        probe: What the load-time probe measured.
        adapter_notes: What is known of the adapter, if `lazyattention adapt` made one.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    weights_id: str
    rotaries: tuple[LayerRotary, ...]
    kv_shapes: tuple[tuple[int, int], ...]
    num_q_heads: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    probe: ProbeResult
    adapter_notes: AdapterNotes | None = None

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.kv_shapes)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of KV unless the cache is told otherwise."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.device

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template of its own."""
        return bool(getattr(self.tokenizer, "chat_template", None))


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str | None = None,
    weights_id: str | None = None,
) -> LoadedModel:
    """Prepare a model that is in memory already, and check it. The model object is changed, not copied.

    It is switched to our attention function, to eval mode and to needing no gradients.

    Args:
        model: A causal language model of transformers, on the device it is to run on.
        tokenizer: Its tokenizer.
        name: What to call it; None = the model's own name or path.
        weights_id: Fingerprint; None = hash all weights in memory. Whoever changes weights afterwards must wrap again.

    Raises:
        ConfigError: `model` or `tokenizer` is of another kind, or the weights are broken.
        UnsupportedError: The model cannot be served exactly.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model is a {type(model).__name__}; expected a transformers PreTrainedModel; for a PEFT model pass the "
            "adapter's folder as adapter=, or model.merge_and_unload()"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"tokenizer is a {type(tokenizer).__name__}; expected a transformers tokenizer; load it with AutoTokenizer"
        )
    rotaries = tuple(layer_rotaries(model))
    model.set_attn_implementation(ATTENTION_NAME)
    model.eval().requires_grad_(False)
    probe = check_model(model, rotaries)
    config = model.config.get_text_config()
    return LoadedModel(
        name=name or config.name_or_path or config.model_type,
        model=model,
        tokenizer=tokenizer,
        weights_id=weights_id or weights_id_of(tensors_digest(model.state_dict()), model.config),
        rotaries=rotaries,
        kv_shapes=probe.kv_shapes,
        num_q_heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_model_len=_max_model_len(config),
        eos_token_ids=_eos_token_ids(model, tokenizer),
        probe=probe,
    )


def _max_model_len(config: Any) -> int:  # noqa: ANN401
    """Return how many positions the model knows."""
    limit = int(config.max_position_embeddings)
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "yarn" and parameters.get("original_max_position_embeddings"):
        # Some configurations state the extended length here, others only the original one and the factor.
        limit = max(limit, int(parameters["original_max_position_embeddings"] * parameters["factor"]))
    if config.model_type == "llama4_text":
        # Beyond its chunk size, a layer no longer sees the whole text, which our plan does not model.
        limit = min(limit, int(config.attention_chunk_size or limit))
    return limit


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Collect the ids that end an answer from generation config, model config and tokenizer."""
    found: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)
